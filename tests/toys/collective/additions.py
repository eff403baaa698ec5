"""An inclusive scan: each rank gets the reduction of the data of the ranks up to itself."""

SECTION = "A collective"

OF_TEAM = (
    "  Status run_scan(const std::byte* in, std::byte* out, size_t count, "
    "const Reduction& reduction,\n"
    "                  const CallOptions& options) override"
)
ARGUMENTS = "const std::byte* in, std::byte* out, size_t count, const Reduction& reduction"
# Over any Team that gathers: takes memory for the data of all ranks.
BY_ALL_GATHER = """
Status {team}::run_scan(const std::byte* in, std::byte* out, size_t count,
                        const Reduction& reduction, const CallOptions& options) {{
  const size_t bytes = count * dtype_bytes(reduction.dtype), ranks = static_cast<size_t>(size());
  std::vector<std::byte> all(ranks * bytes);
  const std::vector<size_t> counts(ranks, count);
  std::vector<void*> outs;
  for (size_t k = 0; k < ranks; ++k) outs.push_back(all.data() + k * bytes);
  DSCOMM_RETURN_IF_ERROR(run_all_gather(in, count, reduction.dtype, outs, counts, options));
  const std::vector<const void*> sources(outs.begin(), outs.end());
  if (count > 0)
    dscomm::reduce(out, sources.data(), rank() + 1, count, reduction, rank() + 1);
  return {{}};
}}

}}  // namespace dscomm
"""

EDITS = [
    ("csrc/core/team/call.h", "after", "  kBarrier = 9,\n", "  kScan = 10,\n"),
    ("csrc/core/team/call.h", "instead", '"barrier"};', '"barrier", "scan"};'),
    (
        "csrc/core/team/call.h",
        "instead",
        "std::size(kNames) == static_cast<size_t>(Collective::kBarrier)",
        "std::size(kNames) == static_cast<size_t>(Collective::kScan)",
    ),
    (
        "csrc/core/team/call_tally.h",
        "instead",
        "static_cast<size_t>(Collective::kBarrier)> tallies_;",
        "static_cast<size_t>(Collective::kScan)> tallies_;",
    ),
    (
        "csrc/core/team/team.h",
        "after",
        "  Status barrier(const CallOptions& options);\n",
        """
  // out[i] = reduction over the ranks up to this one of in[i]; AVG divides by their number. in may
  // equal out.
  Status scan(const void* in, void* out, size_t count, const Reduction& reduction,
              const CallOptions& options);
""",
    ),
    (
        "csrc/core/team/team.h",
        "after",
        "  virtual Status run_barrier(const CallOptions& options) = 0;\n",
        f"  virtual Status run_scan({ARGUMENTS}, const CallOptions& options) = 0;\n",
    ),
    (
        "csrc/core/team/team.cc",
        "before",
        "Status Team::barrier(const CallOptions& options) {\n",
        """\
Status Team::scan(const void* in, void* out, size_t count, const Reduction& reduction,
                  const CallOptions& options) {
  DSCOMM_RETURN_IF_ERROR(check_reduction(reduction));
  Call call{make_record(Collective::kScan, reduction, count, options), &options};
  DSCOMM_RETURN_IF_ERROR(begin_call(call));
  return end_call(run_scan(bytes(in), bytes(out), count, reduction, *call.options));
}

""",
    ),
    (
        "csrc/core/shm/shm_team.h",
        "after",
        "  Status run_barrier(const CallOptions&) override;\n",
        f"{OF_TEAM};\n",
    ),
    (
        "csrc/core/team/self_team.h",
        "after",
        "  Status run_barrier(const CallOptions&) override { return {}; }\n",
        f"  Status run_scan({ARGUMENTS}, const CallOptions&) override {{\n"
        "    return reduce_one(in, out, count, reduction);\n"
        "  }\n",
    ),
    (
        "csrc/core/team/hierarchical_team.h",
        "after",
        "  Status run_barrier(const CallOptions& sub_call) override;\n",
        f"{OF_TEAM};\n",
    ),
    (
        "csrc/core/team/hierarchical_reduce.cc",
        "instead",
        "\n}  // namespace dscomm\n",
        BY_ALL_GATHER.format(team="HierarchicalTeam"),
    ),
    (
        "csrc/mpi/mpi_team.h",
        "after",
        "  Status run_barrier(const CallOptions& options) override;\n",
        f"{OF_TEAM};\n",
    ),
    (
        "csrc/mpi/mpi_team_reduce.cc",
        "instead",
        "\n}  // namespace dscomm\n",
        BY_ALL_GATHER.format(team="MpiTeam"),
    ),
    (
        "tests/core/thread_team.h",
        "after",
        '    return meet("barrier", {}, options).status();\n  }\n',
        f"""\
{OF_TEAM} {{
    auto posts = meet(call_of("scan", reduction) + " of " + std::to_string(count),
                      {{bytes_of(in, count, reduction.dtype)}}, options);
    if (!posts.ok()) return posts.status();
    std::vector<const void*> sources;
    for (int rank = 0; rank <= rank_; ++rank)
      sources.push_back(block(*posts.value(), rank, 0).data());
    if (count > 0) reduce_scalar(out, sources.data(), rank_ + 1, count, reduction, rank_ + 1);
    return {{}};
  }}
""",
    ),
    (
        "tests/core/pooled_team.h",
        "after",
        "  Status run_barrier(const CallOptions& options) override "
        "{ return inner_->barrier(options); }\n",
        f"""\
{OF_TEAM} {{
    if (!draw()) return inner_->scan(in, out, count, reduction, options);
    Tensor tensor(*this, in, count * dtype_bytes(reduction.dtype));
    void* result = in == out ? tensor.data() : out;
    Status status = inner_->scan(tensor.data(), result, count, reduction, options);
    if (in == out) tensor.copy_to(out);
    return status;
  }}
""",
    ),
    (
        "tests/transports/sockets/socket_team.h",
        "after",
        "  Status run_barrier(const CallOptions& options) override;\n",
        f"{OF_TEAM};\n",
    ),
    (
        "tests/transports/sockets/socket_team.cc",
        "instead",
        "\n}  // namespace dscomm\n",
        BY_ALL_GATHER.format(team="SocketTeam"),
    ),
    (
        "tests/core/team_reference.h",
        "before",
        "  void check_barrier() {\n",
        """\
  void check_scan(const Reduction& reduction, size_t count, bool in_place) {
    begin("scan", reduction, count, in_place ? "in place" : "");
    GuardedBuffer in = input(reduction, rank(), count, salt_), out(in.bytes());
    GuardedBuffer& result = in_place ? in : out;
    finish(team_.scan(in.data(), result.data(), count, reduction, call_options()));
    std::vector<GuardedBuffer> sources;
    for (int source = 0; source <= rank(); ++source)
      sources.push_back(input(reduction, source, count, salt_));
    GuardedBuffer expected(in.bytes());
    if (count > 0)
      reduce_scalar(expected.data(), const_pointers(sources).data(), rank() + 1, count, reduction,
                    rank() + 1);
    expect(reduction.dtype, result, expected, count);
    if (!in_place) expect_unchanged(in, reduction, count, salt_);
  }

""",
    ),
    (
        "tests/core/team_reference.h",
        "after",
        "        rank.check_all_reduce(reduction, count, in_place);\n",
        "        rank.check_scan(reduction, count, in_place);\n",
    ),
    (
        "csrc/torch/backend.h",
        "after",
        "  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override;\n",
        """\
  c10::intrusive_ptr<c10d::Work> scan(const at::Tensor& tensor, const c10d::ReduceOp& op,
                                      bool asynchronous);
""",
    ),
    (
        "csrc/torch/collectives.cc",
        "before",
        "struct PlannedAllReduceBody {\n",
        """\
struct ScanBody : AllReduceBody {
  using AllReduceBody::AllReduceBody;

  Status operator()(Team& team, const CallOptions& options) const {
    buffer.load();
    DSCOMM_RETURN_IF_ERROR(
        team.scan(buffer.data(), buffer.data(), buffer.count(), reduction, options));
    return store_all({&buffer, 1});
  }
};

""",
    ),
    (
        "csrc/torch/collectives.cc",
        "before",
        "WorkPtr DscommBackend::all_reduce_tensor(",
        """\
WorkPtr DscommBackend::scan(const at::Tensor& tensor, const c10d::ReduceOp& op,
                            bool asynchronous) {
  const CoalescingGuard on_error(*this);
  CallInfo call(OpType::UNKNOWN, "dscomm:scan", asynchronous, std::chrono::milliseconds(0));
  ScanBody body(tensor, op, {"tensor"});
  describe_data(call, body);
  auto work = submit(call, std::move(body), tensor, tensor);
  bump_version_of(tensor);
  return work;
}

""",
    ),
    (
        "csrc/torch/bindings.cc",
        "before",
        "c10::intrusive_ptr<c10d::Work> all_reduce_caching(",
        """\
c10::intrusive_ptr<c10d::Work> scan(DscommBackend& backend, const at::Tensor& tensor,
                                    const py::object& op, bool async_op) {
  const c10d::ReduceOp torch_op = to_torch_op(op);
  py::gil_scoped_release without_gil;
  return backend.scan(tensor, torch_op, async_op);
}

""",
    ),
    (
        "csrc/torch/bindings.cc",
        "before",
        '      .def("all_reduce_caching", ',
        '      .def("scan", &scan, py::arg("tensor"), py::arg("op"), py::arg("async_op"),\n'
        '           "Reduces the tensors of the ranks up to this one.")\n',
    ),
    (
        "deepspeed_comm/_C.pyi",
        "after",
        "    def all_reduce(self, tensor: Tensor, op: Any, async_op: bool) -> Work | None: ...\n",
        "    def scan(self, tensor: Tensor, op: Any, async_op: bool) -> Work | None: ...\n",
    ),
    (
        "csrc/core/engine/flight_record.cc",
        "after",
        '  if (title == "gather") return {"gather", true};\n',
        '  if (title == "scan") return {"all_reduce"};\n',
    ),
    (
        "tests/torch/test_collectives.py",
        "after",
        "def test_reduce_scatter(ranks: RankSets, size: int) -> None:\n"
        "    ranks(size).run(_reduce_scatter_case)\n",
        """

def _scan_case() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    for number, (dtype, op) in enumerate(_reductions()):
        inputs = [make_input(dtype, (7,), k, seed=number) for k in range(size)]
        tensor = inputs[rank].clone()
        is_async = number % 2 == 0
        _finish(backend.scan(tensor, OPS[op], is_async), is_async)
        assert_same_bits(tensor, reduce_reference(inputs[: rank + 1], op), (dtype, op))


@needs_torch_2
@pytest.mark.parametrize("size", SIZES)
def test_scan(ranks: RankSets, size: int) -> None:
    ranks(size).run(_scan_case)
""",
    ),
    ("tests/schedules/program.h", "after", "  kAllToAll,\n", "  kScan,\n"),
    ("tests/schedules/program.cc", "instead", '"all_to_all", ', '"all_to_all", "scan", '),
    ("tests/schedules/program.cc", "instead", "if (choice < 9)", "if (choice < 10)"),
    (
        "tests/schedules/ranks.cc",
        "before",
        "        case Kind::kBroadcast:\n          return team.",
        "        case Kind::kScan:\n"
        "          return team.scan(call->in.get(), call->out.get(), count, sum, options);\n",
    ),
    (
        "tests/schedules/ranks.cc",
        "before",
        "        case Kind::kBroadcast:\n          expected",
        """\
        case Kind::kScan:
          expected = 0;
          for (int k = 0; k <= me; ++k)
            expected += value_of(number, all[static_cast<size_t>(k)], 0, index);
          break;
""",
    ),
    (
        "tests/random/program.py",
        "instead",
        'REDUCING = ["all_reduce",',
        'REDUCING = ["scan", "all_reduce",',
    ),
    (
        "tests/random/program.py",
        "instead",
        'COUNT_COMPARED = ["all_reduce",',
        'COUNT_COMPARED = ["scan", "all_reduce",',
    ),
    (
        "tests/random/rank.py",
        "before",
        '        if kind == "inference_all_reduce":\n            tensor',
        """\
        if kind == "scan":
            backend = group._get_backend(torch.device("cpu"))
            tensor = self.in_place(self.source(0, reduced=True))
            return backend.scan(tensor, self.operator(), asynchronous)
""",
    ),
    (
        "tests/random/reference.py",
        "instead",
        'step["op"] if "reduce" in kind else ""',
        'step["op"] if "reduce" in kind or kind == "scan" else ""',
    ),
    (
        "tests/random/reference.py",
        "before",
        '    elif kind == "reduce":\n        own',
        """\
    elif kind == "scan":
        before = [(ids[who], who, 0) for who in ranks[: me + 1]]
        tensors = [reduction(dtype, op, count, before)]
""",
    ),
    (
        "docs/c10d.md",
        "after",
        "| `barrier` | |\n",
        "| `backend.scan(tensor, op, async_op)` | the reduction of the ranks up to this one |\n",
    ),
]

NOT_NEEDED = {
    "deepspeed_comm/bench/collectives.py": "torch.distributed has no scan",
}

TESTS = "ToyCollective.*:*EveryCollective*:CallTally.*:FlightRecord*"
