// The collectives of DscommBackend: their arguments, their checks and their bodies.
//
// Messages name an argument as torch.distributed's function does, since the user wrote that name.
#include <algorithm>
#include <span>

#include "core/team/call_record.h"
#include "torch/backend.h"
#include "torch/sparse.h"
#include "torch/submit.h"
#include "torch/tensors.h"

namespace dscomm {
namespace {

using c10d::OpType;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

constexpr OpType kReduceScatterTensorCoalesced = reduce_scatter_tensor_coalesced<OpType>();

// c10d passes a list with one tensor per device; a rank of this backend has one device.
template <typename Item>
Item& single_item(std::vector<Item>& items, const char* argument) {
  if (items.size() != 1)
    raise_value_error("{}: got a list of {} entries, expected one: pass one entry per call",
                      argument, items.size());
  return items[0];
}

void check_list_length(const char* argument, size_t got, size_t expected,
                       const char* expected_what) {
  if (got != expected)
    raise_value_error("{}: got a list of {} entries, expected {} ({})", argument, got, expected,
                      expected_what);
}

void check_count(const Buffer& buffer, size_t expected, const std::string& expected_what) {
  if (buffer.count() != expected)
    raise_value_error("{}: got {} elements, expected {} ({})", buffer.argument().text(),
                      buffer.count(), expected, expected_what);
}

void check_root_tensor(int64_t root_tensor) {
  if (root_tensor != 0)
    raise_value_error("root_tensor: got {}, expected 0: a rank has one tensor", root_tensor);
}

void describe_reduction(CallInfo& call, const Reduction& reduction) {
  call.info.has_op = true;
  call.info.op = reduction.op;
}

// `data` is the call's body or this rank's buffer.
template <typename Data>
void describe_data(CallInfo& call, const Data& data) {
  call.info.dtype = data.dtype();
  call.info.count = static_cast<int64_t>(data.count());
  if constexpr (requires { data.reduction; }) describe_reduction(call, data.reduction);
}

template <typename Options, typename Data>
CallInfo make_call(OpType type, const char* title, const Options& options, const Data& data) {
  CallInfo call(type, title, is_asynchronous(options), call_timeout(options));
  describe_data(call, data);
  return call;
}

// The body of a coalesced call: its parts in order. Each part reads the values that its tensors
// held when the call began, even if an earlier part has written them. Where outputs of two parts
// overlap, the later part wins. gloo does the same.
//
// All parts share one deadline. Its clock starts before the parts copy it, so they share the clock.
template <typename Part>
struct CoalescedBody {
  std::vector<Part> parts;

  explicit CoalescedBody(std::vector<Part> all) : parts(std::move(all)) {
    std::vector<PartBuffers> buffers;
    for (Part& part : parts) buffers.push_back({part.reads(), part.writes()});
    if (!stage_shared_buffers(buffers)) return;
    for (Part& part : parts) part.collect_pointers();
  }

  DType dtype() const { return parts[0].dtype(); }
  size_t count() const {
    size_t sum = 0;
    for (const Part& part : parts) sum += part.count();
    return sum;
  }

  Status operator()(Team& team, const CallOptions& options) {
    (void)options.deadline.remaining_ns();
    for (Part& part : parts) load_all(part.reads());
    Status first_mistake;
    for (size_t k = 0; k < parts.size(); ++k) {
      CallOptions part_options = options;
      part_options.part = static_cast<uint32_t>(k);
      part_options.part_count = static_cast<uint32_t>(parts.size());
      Status status = parts[k].run(team, part_options);
      // Go on after this rank's own mistake, found when it stored its result: the other ranks know
      // nothing of the mistake and wait for this rank in the remaining parts.
      if (!status.ok() && status.code() != Code::kInvalidArgument) return status;
      if (!status.ok() && first_mistake.ok()) first_mistake = status;
    }
    return first_mistake;
  }
};

// make(k, index) returns part k; `index` is k in the type of Argument::index.
template <typename Make>
auto make_coalesced(size_t parts, Make make) {
  std::vector<decltype(make(0, 0))> all;
  for (size_t k = 0; k < parts; ++k) all.push_back(make(k, static_cast<int64_t>(k)));
  return CoalescedBody(std::move(all));
}

// Increments the tensor's version as torch's in-place operators do, for calls that bypass c10d: a
// backward pass that needs the old value then raises. (c10d's operators never do this.)
void bump_version_of(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

// Pointers to consecutive parts of one buffer; part k has counts[k] elements.
template <typename Pointer>
std::vector<Pointer> slices_of(const Buffer& buffer, const std::vector<size_t>& counts) {
  std::vector<Pointer> slices(counts.size());
  size_t offset_bytes = 0;
  for (size_t k = 0; k < counts.size(); ++k) {
    slices[k] = buffer.bytes() + offset_bytes;
    offset_bytes += counts[k] * dtype_bytes(buffer.dtype());
  }
  return slices;
}

bool overlaps_any(const Buffer& buffer, const std::vector<Buffer>& others) {
  return std::any_of(others.begin(), others.end(),
                     [&](const Buffer& other) { return buffer.overlaps(other); });
}

// Stages `one` if it overlaps a buffer of the list. If it begins at its own slot in the list, it is
// in place, which a Team accepts.
void stage_if_overlapping(Buffer& one, const void* its_place, const std::vector<Buffer>& others) {
  if (one.data() != its_place && overlaps_any(one, others)) one.stage();
}

// Checks this rank's buffer against its slot in the list, then calls stage_if_overlapping().
void check_slot(Buffer& one, const std::vector<Buffer>& list, int rank,
                const char* expected_count) {
  const Buffer& its_place = list[static_cast<size_t>(rank)];
  check_same_dtype(one, list[0]);
  check_count(its_place, one.count(), expected_count);
  stage_if_overlapping(one, its_place.data(), list);
}

// Returns the root's list, a tensor for each rank, or {} on other ranks; raises if those pass one.
Tensors list_of_root(std::vector<Tensors>& lists, bool is_root, size_t ranks, const char* argument,
                     const char* root_argument) {
  if (is_root) {
    check_list_length(argument, single_item(lists, argument).size(), ranks,
                      "one for each rank of the group");
    return lists[0];
  }
  if (!lists.empty() && !lists[0].empty())
    raise_value_error("{}: got {} tensors, expected none on a rank that is not {}", argument,
                      lists[0].size(), root_argument);
  return {};
}

// Checks the lists of a coalesced call whose parts have one input and one output each.
void check_pairs(const Tensors& outputs, const Tensors& inputs) {
  if (inputs.empty()) raise_value_error("inputs: got an empty list, expected at least one tensor");
  check_list_length("outputs", outputs.size(), inputs.size(), "as many as there are inputs");
}

struct AllReduceBody {
  Buffer buffer;
  Reduction reduction;

  AllReduceBody(const at::Tensor& tensor, const c10d::ReduceOp& op, const Argument& argument)
      : buffer(tensor, Use::kReadWrite, argument), reduction(to_reduction(op, buffer.dtype())) {}

  DType dtype() const { return buffer.dtype(); }
  size_t count() const { return buffer.count(); }
  std::span<Buffer> reads() { return {&buffer, 1}; }
  std::span<Buffer> writes() { return {&buffer, 1}; }
  void collect_pointers() {}  // run() reads the pointer from the buffer

  Status operator()(Team& team, const CallOptions& options) const {
    buffer.load();
    return run(team, options);
  }

  Status run(Team& team, const CallOptions& options) const {
    DSCOMM_RETURN_IF_ERROR(
        team.all_reduce(buffer.data(), buffer.data(), buffer.count(), reduction, options));
    return store_all({&buffer, 1});
  }
};

struct PlannedAllReduceBody {
  AllReduceBody all_reduce;
  std::shared_ptr<const DscommBackend::AllReducePlan> plan;

  Status operator()(Team& team, const CallOptions& options) const {
    CallOptions planned = options;
    planned.plan = plan->hash;
    Status status = all_reduce(team, planned);
    if (status.code() != Code::kMismatch) return status;
    return make_status(
        status.code(),
        "{}; this rank passed match_id '{}': pass the same match_id and shape on all ranks",
        status.message(), plan->match_id);
  }
};

// All-gather into a list of tensors or into slices of one tensor.
struct AllGatherBody {
  Buffer in;
  std::vector<Buffer> outs;
  std::vector<void*> pointers;
  std::vector<size_t> counts;

  static AllGatherBody into_list(Tensors& outputs, const at::Tensor& input,
                                 const Argument& input_argument, const char* outputs_argument,
                                 int rank, size_t ranks) {
    check_list_length(outputs_argument, outputs.size(), ranks, "one for each rank of the group");
    AllGatherBody body;
    body.in = Buffer(input, Use::kRead, input_argument);
    body.outs = make_buffers(outputs, Use::kWrite, outputs_argument);
    check_outputs(body.outs);
    body.pointers = write_pointers(body.outs);
    body.counts = counts_of(body.outs);
    check_slot(body.in, body.outs, rank, "as many as this rank's input");
    return body;
  }

  static AllGatherBody into_one(const at::Tensor& output, const at::Tensor& input,
                                const Argument& output_argument, const Argument& input_argument,
                                int rank, size_t ranks) {
    AllGatherBody body;
    body.in = Buffer(input, Use::kRead, input_argument);
    body.outs.emplace_back(output, Use::kWrite, output_argument);
    check_same_dtype(body.in, body.outs[0]);
    check_count(body.outs[0], body.in.count() * ranks,
                "the size of the group times the elements of the input");
    body.counts.assign(ranks, body.in.count());
    body.pointers = slices_of<void*>(body.outs[0], body.counts);
    stage_if_overlapping(body.in, body.pointers[static_cast<size_t>(rank)], body.outs);
    return body;
  }

  DType dtype() const { return in.dtype(); }
  size_t count() const { return in.count(); }
  std::span<Buffer> reads() { return {&in, 1}; }
  std::span<Buffer> writes() { return outs; }
  void collect_pointers() {}  // outputs' pointers do not change; run() reads the input's

  Status operator()(Team& team, const CallOptions& options) const {
    in.load();
    return run(team, options);
  }

  Status run(Team& team, const CallOptions& options) const {
    DSCOMM_RETURN_IF_ERROR(
        team.all_gather(in.data(), in.count(), in.dtype(), pointers, counts, options));
    return store_all(outs);
  }
};

struct ReduceScatterBody {
  std::vector<Buffer> ins;
  std::vector<const void*> pointers;
  std::vector<size_t> counts;
  Buffer out;
  Reduction reduction;

  static ReduceScatterBody from_list(const at::Tensor& output, Tensors& inputs,
                                     const c10d::ReduceOp& op, int rank, size_t ranks) {
    check_list_length("input_list", inputs.size(), ranks, "one for each rank of the group");
    ReduceScatterBody body;
    body.out = Buffer(output, Use::kWrite, {"output"});
    body.ins = make_buffers(inputs, Use::kRead, "input_list");
    body.pointers = read_pointers(body.ins);
    body.counts = counts_of(body.ins);
    check_count(body.out, body.counts[static_cast<size_t>(rank)],
                "as many as input_list has for this rank");
    body.finish(op, rank);
    return body;
  }

  static ReduceScatterBody from_one(const at::Tensor& output, const at::Tensor& input,
                                    const c10d::ReduceOp& op, const Argument& output_argument,
                                    const Argument& input_argument, int rank, size_t ranks) {
    ReduceScatterBody body;
    body.out = Buffer(output, Use::kWrite, output_argument);
    body.ins.emplace_back(input, Use::kRead, input_argument);
    check_count(body.ins[0], body.out.count() * ranks,
                "the size of the group times the elements of the output");
    body.counts.assign(ranks, body.out.count());
    body.pointers = slices_of<const void*>(body.ins[0], body.counts);
    body.finish(op, rank);
    return body;
  }

  void finish(const c10d::ReduceOp& op, int rank) {
    check_same_dtype(ins[0], out);
    reduction = to_reduction(op, out.dtype());
    // A Team accepts the output in this rank's own input slot, and in no other.
    const auto mine = static_cast<size_t>(rank);
    const bool in_place = out.data() == pointers[mine];
    bool elsewhere = false;
    for (size_t k = 0; k < ins.size(); ++k) {
      const bool is_its_place = in_place && (ins.size() == 1 || k == mine);
      elsewhere |= !is_its_place && out.overlaps(ins[k]);
    }
    if (elsewhere) out.stage();
  }

  DType dtype() const { return out.dtype(); }
  size_t count() const { return Team::total_count(counts); }
  std::span<Buffer> reads() { return ins; }
  std::span<Buffer> writes() { return {&out, 1}; }
  void collect_pointers() {
    pointers =
        ins.size() == counts.size() ? read_pointers(ins) : slices_of<const void*>(ins[0], counts);
  }

  Status operator()(Team& team, const CallOptions& options) const {
    load_all(ins);
    return run(team, options);
  }

  Status run(Team& team, const CallOptions& options) const {
    DSCOMM_RETURN_IF_ERROR(team.reduce_scatter(pointers, counts, out.data(), reduction, options));
    return store_all({&out, 1});
  }
};

struct AllToAllBody {
  std::vector<Buffer> ins, outs;
  std::vector<const void*> in_pointers;
  std::vector<void*> out_pointers;
  std::vector<size_t> in_counts, out_counts;

  DType dtype() const { return ins[0].dtype(); }
  size_t count() const { return Team::total_count(in_counts); }

  Status operator()(Team& team, const CallOptions& options) const {
    load_all(ins);
    DSCOMM_RETURN_IF_ERROR(team.all_to_all(in_pointers, in_counts, out_pointers, out_counts,
                                           outs[0].dtype(), options));
    return store_all(outs);
  }
};

// The elements for each rank, from `splits` of dimension 0; equal shares if there are no splits.
std::vector<size_t> split_counts(const Buffer& buffer, const std::vector<int64_t>& splits,
                                 const char* argument, size_t ranks) {
  const at::Tensor& tensor = buffer.tensor();
  const std::string name = buffer.argument().text();
  if (tensor.dim() == 0)
    raise_value_error(name +
                      ": got a tensor without dimensions, expected at least one to split along");
  const int64_t rows = tensor.size(0);
  if (splits.empty()) {
    if (rows % static_cast<int64_t>(ranks) != 0)
      raise_value_error(
          "{}: dimension 0 has size {}, expected a multiple of {}, the size of the "
          "group (or pass {})",
          name, rows, ranks, argument);
    return std::vector<size_t>(ranks, buffer.count() / ranks);
  }
  check_list_length(argument, splits.size(), ranks, "one for each rank of the group");
  for (int64_t split : splits)
    if (split < 0) raise_value_error("{}: got {}, expected no negative split", argument, split);
  int64_t sum = 0;
  for (int64_t split : splits)
    if (__builtin_add_overflow(sum, split, &sum))
      raise_value_error("{}: the splits add up to more than {}, the size of dimension 0 of {}",
                        argument, rows, name);
  if (sum != rows)
    raise_value_error("{}: the splits add up to {}, expected {}, the size of dimension 0 of {}",
                      argument, sum, rows, name);
  const size_t row_elements = rows == 0 ? 0 : buffer.count() / static_cast<size_t>(rows);
  std::vector<size_t> counts;
  for (int64_t split : splits) counts.push_back(static_cast<size_t>(split) * row_elements);
  return counts;
}

}  // namespace

WorkPtr DscommBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const CoalescingGuard on_error(*this);
  const int root = check_rank(options.rootRank, "broadcast", "src");
  check_root_tensor(options.rootTensor);
  const bool is_root = root == getRank();
  Buffer buffer(single_item(tensors, "tensor"), is_root ? Use::kRead : Use::kWrite, {"tensor"});
  CallInfo call = make_call(OpType::BROADCAST, "dscomm:broadcast", options, buffer);
  call.info.peer = root;
  auto body = [buffer, root](Team& team, const CallOptions& call_options) -> Status {
    buffer.load();
    DSCOMM_RETURN_IF_ERROR(
        team.broadcast(buffer.data(), buffer.count(), buffer.dtype(), root, call_options));
    return store_all({&buffer, 1});
  };
  return submit(call, std::move(body), tensors, tensors);
}

WorkPtr DscommBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const CoalescingGuard on_error(*this);
  if (const std::string* match_id = WithMatchId::of(*this))
    return submit_planned(single_item(tensors, "tensor"),
                          std::make_shared<const AllReducePlan>(*match_id, options.reduceOp),
                          is_asynchronous(options), call_timeout(options));
  return all_reduce_tensor(single_item(tensors, "tensor"), options.reduceOp,
                           is_asynchronous(options), call_timeout(options));
}

WorkPtr DscommBackend::all_reduce(const at::Tensor& tensor, const c10d::ReduceOp& op,
                                  bool asynchronous) {
  const CoalescingGuard on_error(*this);
  auto work = all_reduce_tensor(tensor, op, asynchronous, std::chrono::milliseconds(0));
  bump_version_of(tensor);
  return work;
}

WorkPtr DscommBackend::all_reduce_tensor(const at::Tensor& tensor, const c10d::ReduceOp& op,
                                         bool asynchronous, std::chrono::milliseconds timeout) {
  CallInfo call(OpType::ALLREDUCE, "dscomm:all_reduce", asynchronous, timeout);
  if (tensor.defined() && tensor.layout() == at::kSparse) {
    SparseAllReduceBody body(tensor, op);
    describe_data(call, body);
    return submit(call, std::move(body), tensor, tensor);
  }
  AllReduceBody body(tensor, op, {"tensor"});
  describe_data(call, body);
  return submit(call, std::move(body), tensor, tensor);
}

DscommBackend::AllReducePlan::AllReducePlan(std::string id, c10d::ReduceOp reduce_op)
    : match_id(std::move(id)), op(std::move(reduce_op)), hash(hash_text(match_id)) {}

WorkPtr DscommBackend::all_reduce_caching(const at::Tensor& tensor,
                                          std::shared_ptr<const AllReducePlan> plan,
                                          bool asynchronous) {
  const CoalescingGuard on_error(*this);
  auto work = submit_planned(tensor, std::move(plan), asynchronous, std::chrono::milliseconds(0));
  bump_version_of(tensor);
  return work;
}

namespace {
thread_local const DscommBackend::WithMatchId* current_match_id = nullptr;
}  // namespace

DscommBackend::WithMatchId::WithMatchId(const DscommBackend& backend, std::string match_id)
    : backend_(backend), match_id_(std::move(match_id)), outer_(current_match_id) {
  current_match_id = this;
}

DscommBackend::WithMatchId::~WithMatchId() { current_match_id = outer_; }

const std::string* DscommBackend::WithMatchId::of(const DscommBackend& backend) {
  if (current_match_id == nullptr || &current_match_id->backend_ != &backend) return nullptr;
  return &current_match_id->match_id_;
}

WorkPtr DscommBackend::submit_planned(const at::Tensor& tensor,
                                      std::shared_ptr<const AllReducePlan> plan, bool asynchronous,
                                      std::chrono::milliseconds timeout) {
  CallInfo call(OpType::ALLREDUCE, "dscomm:all_reduce_caching", asynchronous, timeout);
  AllReduceBody all_reduce(tensor, plan->op, {"tensor"});
  describe_data(call, all_reduce);
  return submit(call, PlannedAllReduceBody{std::move(all_reduce), std::move(plan)}, tensor, tensor);
}

WorkPtr DscommBackend::allreduce_coalesced(Tensors& tensors,
                                           const c10d::AllreduceCoalescedOptions& options) {
  const CoalescingGuard on_error(*this);
  if (tensors.empty())
    raise_value_error("tensors: got an empty list, expected at least one tensor");
  auto body = make_coalesced(tensors.size(), [&](size_t k, int64_t index) {
    return AllReduceBody(tensors[k], options.reduceOp, {"tensors", index});
  });
  CallInfo call =
      make_call(OpType::ALLREDUCE_COALESCED, "dscomm:all_reduce_coalesced", options, body);
  describe_reduction(call, body.parts[0].reduction);
  return submit(call, std::move(body), tensors, tensors);
}

WorkPtr DscommBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const CoalescingGuard on_error(*this);
  const int root = check_rank(options.rootRank, "reduce", "dst");
  check_root_tensor(options.rootTensor);
  const bool is_root = root == getRank();
  Buffer buffer(single_item(tensors, "tensor"), is_root ? Use::kReadWrite : Use::kRead, {"tensor"});
  const Reduction reduction = to_reduction(options.reduceOp, buffer.dtype());
  CallInfo call = make_call(OpType::REDUCE, "dscomm:reduce", options, buffer);
  describe_reduction(call, reduction);
  call.info.peer = root;
  auto body = [buffer, reduction, root, is_root](Team& team,
                                                 const CallOptions& call_options) -> Status {
    buffer.load();
    DSCOMM_RETURN_IF_ERROR(team.reduce(buffer.data(), is_root ? buffer.data() : nullptr,
                                       buffer.count(), reduction, root, call_options));
    return store_all({&buffer, 1});
  };
  return submit(call, std::move(body), tensors, tensors);
}

WorkPtr DscommBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                 const c10d::AllgatherOptions& options) {
  const CoalescingGuard on_error(*this);
  Tensors& output_list = single_item(outputs, "tensor_list");
  auto body = AllGatherBody::into_list(output_list, single_item(inputs, "tensor"), {"tensor"},
                                       "tensor_list", getRank(), group_size());
  const CallInfo call = make_call(OpType::ALLGATHER, "dscomm:all_gather", options, body);
  return submit(call, std::move(body), inputs, output_list);
}

WorkPtr DscommBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                       const c10d::AllgatherOptions& options) {
  const CoalescingGuard on_error(*this);
  auto body = AllGatherBody::into_one(output, input, {"output_tensor"}, {"input_tensor"}, getRank(),
                                      group_size());
  const CallInfo call =
      make_call(OpType::_ALLGATHER_BASE, "dscomm:all_gather_into_tensor", options, body);
  return submit(call, std::move(body), {input}, {output});
}

WorkPtr DscommBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                           const c10d::AllgatherOptions& options) {
  const CoalescingGuard on_error(*this);
  if (inputs.empty())
    raise_value_error("input_tensor_list: got an empty list, expected at least one tensor");
  check_list_length("output_tensor_lists", outputs.size(), group_size(),
                    "one for each rank of the group");
  Tensors flat_outputs;
  for (Tensors& of_rank : outputs) {
    check_list_length("one of output_tensor_lists", of_rank.size(), inputs.size(),
                      "as many as there are inputs");
    flat_outputs.insert(flat_outputs.end(), of_rank.begin(), of_rank.end());
  }
  auto body = make_coalesced(inputs.size(), [&](size_t k, int64_t index) {
    Tensors of_part;  // part k of every rank
    for (Tensors& of_rank : outputs) of_part.push_back(of_rank[k]);
    return AllGatherBody::into_list(of_part, inputs[k], {"input_tensor_list", index},
                                    "output_tensor_lists", getRank(), group_size());
  });
  const CallInfo call =
      make_call(OpType::ALLGATHER_COALESCED, "dscomm:all_gather_coalesced", options, body);
  return submit(call, std::move(body), inputs, flat_outputs);
}

WorkPtr DscommBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                       const c10d::AllgatherOptions& options) {
  const CoalescingGuard on_error(*this);
  check_pairs(outputs, inputs);
  auto body = make_coalesced(inputs.size(), [&](size_t k, int64_t index) {
    return AllGatherBody::into_one(outputs[k], inputs[k], {"outputs", index}, {"inputs", index},
                                   getRank(), group_size());
  });
  const CallInfo call = make_call(OpType::ALLGATHER_COALESCED,
                                  "dscomm:all_gather_into_tensor_coalesced", options, body);
  return submit(call, std::move(body), inputs, outputs);
}

WorkPtr DscommBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::GatherOptions& options) {
  const CoalescingGuard on_error(*this);
  const int root = check_rank(options.rootRank, "gather", "dst");
  const bool is_root = root == getRank();
  Buffer in(single_item(inputs, "tensor"), Use::kRead, {"tensor"});
  const Tensors output_list = list_of_root(outputs, is_root, group_size(), "gather_list", "dst");
  std::vector<Buffer> outs = make_buffers(output_list, Use::kWrite, "gather_list");
  check_outputs(outs);
  if (is_root) check_slot(in, outs, root, "as many as this rank's tensor");
  CallInfo call = make_call(OpType::GATHER, "dscomm:gather", options, in);
  call.info.peer = root;
  auto body = [in, outs, pointers = write_pointers(outs), counts = counts_of(outs), root](
                  Team& team, const CallOptions& call_options) -> Status {
    in.load();
    DSCOMM_RETURN_IF_ERROR(
        team.gather(in.data(), in.count(), in.dtype(), pointers, counts, root, call_options));
    return store_all(outs);
  };
  return submit(call, std::move(body), inputs, output_list);
}

WorkPtr DscommBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                               const c10d::ScatterOptions& options) {
  const CoalescingGuard on_error(*this);
  const int root = check_rank(options.rootRank, "scatter", "src");
  const bool is_root = root == getRank();
  Buffer out(single_item(outputs, "tensor"), Use::kWrite, {"tensor"});
  const Tensors input_list = list_of_root(inputs, is_root, group_size(), "scatter_list", "src");
  std::vector<Buffer> ins = make_buffers(input_list, Use::kRead, "scatter_list");
  if (is_root) check_slot(out, ins, root, "as many as this rank's tensor");
  CallInfo call = make_call(OpType::SCATTER, "dscomm:scatter", options, out);
  call.info.peer = root;
  auto body = [out, ins, pointers = read_pointers(ins), counts = counts_of(ins), root](
                  Team& team, const CallOptions& call_options) -> Status {
    load_all(ins);
    DSCOMM_RETURN_IF_ERROR(
        team.scatter(pointers, counts, out.data(), out.count(), out.dtype(), root, call_options));
    return store_all({&out, 1});
  };
  return submit(call, std::move(body), input_list, outputs);
}

WorkPtr DscommBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                      const c10d::ReduceScatterOptions& options) {
  const CoalescingGuard on_error(*this);
  Tensors& input_list = single_item(inputs, "input_list");
  auto body = ReduceScatterBody::from_list(single_item(outputs, "output"), input_list,
                                           options.reduceOp, getRank(), group_size());
  CallInfo call = make_call(OpType::REDUCE_SCATTER, "dscomm:reduce_scatter", options, body);
  return submit(call, std::move(body), input_list, outputs);
}

WorkPtr DscommBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                            const c10d::ReduceScatterOptions& options) {
  const CoalescingGuard on_error(*this);
  auto body = ReduceScatterBody::from_one(output, input, options.reduceOp, {"output"}, {"input"},
                                          getRank(), group_size());
  CallInfo call =
      make_call(OpType::_REDUCE_SCATTER_BASE, "dscomm:reduce_scatter_tensor", options, body);
  return submit(call, std::move(body), {input}, {output});
}

WorkPtr DscommBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                       const c10d::ReduceScatterOptions& options) {
  const CoalescingGuard on_error(*this);
  check_pairs(outputs, inputs);
  auto body = make_coalesced(inputs.size(), [&](size_t k, int64_t index) {
    return ReduceScatterBody::from_one(outputs[k], inputs[k], options.reduceOp, {"outputs", index},
                                       {"inputs", index}, getRank(), group_size());
  });
  CallInfo call = make_call(kReduceScatterTensorCoalesced, "dscomm:reduce_scatter_tensor_coalesced",
                            options, body);
  describe_reduction(call, body.parts[0].reduction);
  return submit(call, std::move(body), inputs, outputs);
}

WorkPtr DscommBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                const c10d::AllToAllOptions& options) {
  const CoalescingGuard on_error(*this);
  check_list_length("input_tensor_list", inputs.size(), group_size(),
                    "one for each rank of the group");
  check_list_length("output_tensor_list", outputs.size(), group_size(),
                    "one for each rank of the group");
  AllToAllBody body;
  body.ins = make_buffers(inputs, Use::kRead, "input_tensor_list");
  body.outs = make_buffers(outputs, Use::kWrite, "output_tensor_list");
  check_same_dtype(body.ins[0], body.outs[0]);
  check_outputs(body.outs);
  const auto mine = static_cast<size_t>(getRank());
  check_count(body.outs[mine], body.ins[mine].count(), "as many as this rank sends to itself");
  for (Buffer& in : body.ins)
    if (overlaps_any(in, body.outs)) in.stage();
  body.in_pointers = read_pointers(body.ins);
  body.out_pointers = write_pointers(body.outs);
  body.in_counts = counts_of(body.ins);
  body.out_counts = counts_of(body.outs);
  const CallInfo call = make_call(OpType::ALLTOALL, "dscomm:all_to_all", options, body);
  return submit(call, std::move(body), inputs, outputs);
}

WorkPtr DscommBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                     std::vector<int64_t>& output_splits,
                                     std::vector<int64_t>& input_splits,
                                     const c10d::AllToAllOptions& options) {
  const CoalescingGuard on_error(*this);
  AllToAllBody body;
  body.ins.emplace_back(input, Use::kRead, Argument{"input"});
  body.outs.emplace_back(output, Use::kWrite, Argument{"output"});
  check_same_dtype(body.ins[0], body.outs[0]);
  body.in_counts = split_counts(body.ins[0], input_splits, "input_split_sizes", group_size());
  body.out_counts = split_counts(body.outs[0], output_splits, "output_split_sizes", group_size());
  const auto mine = static_cast<size_t>(getRank());
  if (body.in_counts[mine] != body.out_counts[mine])
    raise_value_error(
        "{}: this rank sends {} elements to itself and expects {}; make input_split_sizes[{}] and "
        "output_split_sizes[{}] equal (without split sizes: the lengths of input and output), and "
        "the rows of both equally long",
        describe_call("all_to_all_single", *group_), body.in_counts[mine], body.out_counts[mine],
        mine, mine);
  if (body.ins[0].overlaps(body.outs[0])) body.ins[0].stage();
  body.in_pointers = slices_of<const void*>(body.ins[0], body.in_counts);
  body.out_pointers = slices_of<void*>(body.outs[0], body.out_counts);
  const CallInfo call = make_call(OpType::ALLTOALL_BASE, "dscomm:all_to_all_single", options, body);
  return submit(call, std::move(body), {input}, {output});
}

WorkPtr DscommBackend::barrier(const c10d::BarrierOptions& options) {
  const CoalescingGuard on_error(*this);
  CallInfo call(OpType::BARRIER, "dscomm:barrier", is_asynchronous(options), call_timeout(options));
  auto body = [](Team& team, const CallOptions& call_options) {
    return team.barrier(call_options);
  };
  return submit(call, std::move(body), {}, {});
}

}  // namespace dscomm
