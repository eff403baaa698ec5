"""An all-reduce of 113 to 224 bytes: rank 0 reduces, and the others copy its result."""

SECTION = "An algorithm of a collective, on one host"

EDITS = [
    (
        "csrc/core/shm/shm_team.h",
        "before",
        "  Status all_reduce_one_shot(",
        "  Status all_reduce_by_root("
        "const void* in, void* out, size_t count, const Reduction& reduction);\n",
    ),
    (
        "csrc/core/shm/collectives/all_reduce.cc",
        "after",
        "//   tiny      the data travels in the slot, beside the sequence number: one hand-over;\n",
        "//   by root   rank 0 reduces all data and stages the result, which the others copy;\n",
    ),
    (
        "csrc/core/shm/collectives/all_reduce.cc",
        "after",
        "    return all_reduce_tiny(in, out, count, reduction);\n  }\n",
        "  if (bytes <= 2 * kTinyBytes) {\n"
        '    note(Collective::kAllReduce, "by root", bytes);\n'
        "    return all_reduce_by_root(in, out, count, reduction);\n"
        "  }\n",
    ),
    (
        "csrc/core/shm/collectives/all_reduce.cc",
        "before",
        "Status ShmTeam::all_reduce_one_shot(",
        """\
Status ShmTeam::all_reduce_by_root(const void* in, void* out, size_t count,
                                   const Reduction& reduction) {
  const size_t bytes = count * dtype_bytes(reduction.dtype);
  DSCOMM_RETURN_IF_ERROR(staging_->open({.bytes = bytes, .buffer_bytes = bytes, .rounds = 2}));
  if (rank() == 0) {
    mailboxes_->post(1);
    DSCOMM_RETURN_IF_ERROR(
        find_sources(in, 0, [&](int k) { return staging_->read(k, 0, 0, 0, bytes); }));
    DSCOMM_ASSIGN_OR_RETURN(auto* result, staging_->fill(1));
    dscomm::reduce(out, sources_.data(), size(), count, reduction, size());
    copy(result, out, bytes, stores());
    post_staged(2);
  } else {
    DSCOMM_ASSIGN_OR_RETURN(auto* buffer, staging_->fill(0));
    copy(buffer, in, bytes, stores());
    post_staged(1);
    DSCOMM_RETURN_IF_ERROR(mailboxes_->wait_posted(0, 2));
    DSCOMM_ASSIGN_OR_RETURN(auto* theirs, staging_->read(0, 1, 0, 0, bytes));
    copy(static_cast<std::byte*>(out), theirs, bytes, Stores::kOrdinary);
  }
  return staging_->end();
}

""",
    ),
    ("docs/design.md", "instead", "All-reduce has three forms.", "All-reduce has four forms."),
    (
        "docs/design.md",
        "before",
        "- **One-shot**, if a rank",
        "- **By root**, up to 224 bytes: rank 0 reduces, and the others copy its result.\n",
    ),
    (
        "docs/troubleshooting.md",
        "before",
        "`one shot`, every rank reads\n",
        "`by root`, rank 0\n  reduces it and the others copy the result; ",
    ),
]

NOT_NEEDED = {
    "tests/core/team_reference.h": "its checks run over every algorithm",
    "tests/spin": "its phases are those of a reduce and a broadcast, which have models",
    "csrc/mpi/mpi_team_*.cc": "it is for one host",
    "csrc/mpi/mpi_team.h": "likewise",
    "tests/mpi/mpi_team_test.cc": "likewise",
}

TESTS = "ToyAlgorithm.*:*ShmTeam*"
