// The collectives of Team: argument checks and the record of the call, the same for all Teams.
#include "core/team/team.h"

#include "core/team/call_record.h"

namespace dscomm {
namespace {

std::byte* bytes(void* data) { return static_cast<std::byte*>(data); }
const std::byte* bytes(const void* data) { return static_cast<const std::byte*>(data); }

Status check_root(const char* collective, int root, int size) {
  if (root >= 0 && root < size) return {};
  return make_status(Code::kInvalidArgument, "{}: root is {}, expected 0 to {}", collective, root,
                     size - 1);
}

// A list of buffers and its list of counts have `expected` entries each: one for each rank, or none
// on ranks other than the root.
Status check_lists(const char* collective, size_t buffer_count, size_t count_count,
                   size_t expected) {
  if (buffer_count == expected && count_count == expected) return {};
  return make_status(Code::kInvalidArgument,
                     "{}: got {} buffers and {} counts, expected {} of each", collective,
                     buffer_count, count_count, expected);
}

// For lists with one entry for each rank. This rank's count must be `own_count`.
Status check_lists(const char* collective, size_t buffer_count, Team::Counts counts,
                   size_t own_count, int rank, int size) {
  DSCOMM_RETURN_IF_ERROR(
      check_lists(collective, buffer_count, counts.size(), static_cast<size_t>(size)));
  if (own_count == counts[rank]) return {};
  return make_status(Code::kInvalidArgument,
                     "{}: this rank's own count is {}, but its list says {} for rank {}",
                     collective, own_count, counts[rank], rank);
}

}  // namespace

Status Team::all_reduce(const void* in, void* out, size_t count, const Reduction& reduction,
                        const CallOptions& options) {
  DSCOMM_RETURN_IF_ERROR(check_reduction(reduction));
  Call call{make_record(Collective::kAllReduce, reduction, count, options), &options};
  DSCOMM_RETURN_IF_ERROR(begin_call(call));
  return end_call(run_all_reduce(bytes(in), bytes(out), count, reduction, *call.options));
}

Status Team::broadcast(void* buffer, size_t count, DType dtype, int root,
                       const CallOptions& options) {
  DSCOMM_RETURN_IF_ERROR(check_root("broadcast", root, size()));
  Call call{make_record(Collective::kBroadcast, dtype, count, options, root), &options};
  DSCOMM_RETURN_IF_ERROR(begin_call(call));
  return end_call(run_broadcast(bytes(buffer), count, dtype, root, *call.options));
}

Status Team::reduce(const void* in, void* out, size_t count, const Reduction& reduction, int root,
                    const CallOptions& options) {
  DSCOMM_RETURN_IF_ERROR(check_reduction(reduction));
  DSCOMM_RETURN_IF_ERROR(check_root("reduce", root, size()));
  Call call{make_record(Collective::kReduce, reduction, count, options, root), &options};
  DSCOMM_RETURN_IF_ERROR(begin_call(call));
  return end_call(run_reduce(bytes(in), bytes(out), count, reduction, root, *call.options));
}

Status Team::all_gather(const void* in, size_t count, DType dtype, Outputs outs, Counts out_counts,
                        const CallOptions& options) {
  DSCOMM_RETURN_IF_ERROR(check_lists("all_gather", outs.size(), out_counts, count, rank(), size()));
  Call call{make_record(Collective::kAllGather, dtype, 0, options), &options, out_counts};
  call.record.own_count = count;
  DSCOMM_RETURN_IF_ERROR(begin_call(call));
  return end_call(run_all_gather(bytes(in), count, dtype, outs, out_counts, *call.options));
}

Status Team::reduce_scatter(Inputs ins, Counts counts, void* out, const Reduction& reduction,
                            const CallOptions& options) {
  DSCOMM_RETURN_IF_ERROR(check_reduction(reduction));
  DSCOMM_RETURN_IF_ERROR(check_lists("reduce_scatter", ins.size(), counts.size(), size()));
  const size_t total = total_count(counts);
  Call call{make_record(Collective::kReduceScatter, reduction, total, options), &options};
  call.record.digest = hash_counts(counts);
  DSCOMM_RETURN_IF_ERROR(begin_call(call));
  return end_call(run_reduce_scatter(ins, counts, bytes(out), reduction, *call.options));
}

Status Team::gather(const void* in, size_t count, DType dtype, Outputs outs, Counts out_counts,
                    int root, const CallOptions& options) {
  DSCOMM_RETURN_IF_ERROR(check_root("gather", root, size()));
  DSCOMM_RETURN_IF_ERROR(rank() == root
                             ? check_lists("gather", outs.size(), out_counts, count, root, size())
                             : check_lists("gather", outs.size(), out_counts.size(), 0));
  Call call{make_record(Collective::kGather, dtype, 0, options, root), &options};
  call.record.own_count = count;
  DSCOMM_RETURN_IF_ERROR(begin_call(call));
  return end_call(run_gather(bytes(in), count, dtype, outs, out_counts, root, *call.options));
}

Status Team::scatter(Inputs ins, Counts in_counts, void* out, size_t count, DType dtype, int root,
                     const CallOptions& options) {
  DSCOMM_RETURN_IF_ERROR(check_root("scatter", root, size()));
  DSCOMM_RETURN_IF_ERROR(rank() == root
                             ? check_lists("scatter", ins.size(), in_counts, count, root, size())
                             : check_lists("scatter", ins.size(), in_counts.size(), 0));
  Call call{make_record(Collective::kScatter, dtype, 0, options, root), &options};
  call.record.own_count = count;
  DSCOMM_RETURN_IF_ERROR(begin_call(call));
  return end_call(run_scatter(ins, in_counts, bytes(out), count, dtype, root, *call.options));
}

Status Team::all_to_all(Inputs ins, Counts in_counts, Outputs outs, Counts out_counts, DType dtype,
                        const CallOptions& options) {
  DSCOMM_RETURN_IF_ERROR(check_lists("all_to_all", ins.size(), in_counts.size(), size()));
  DSCOMM_RETURN_IF_ERROR(
      check_lists("all_to_all", outs.size(), out_counts, in_counts[rank()], rank(), size()));
  Call call{make_record(Collective::kAllToAll, dtype, 0, options), &options};
  call.record.own_count = total_count(in_counts);
  DSCOMM_RETURN_IF_ERROR(begin_call(call));
  return end_call(run_all_to_all(ins, in_counts, outs, out_counts, dtype, *call.options));
}

Status Team::barrier(const CallOptions& options) {
  Call call{make_record(Collective::kBarrier, DType::kUInt8, 0, options), &options};
  DSCOMM_RETURN_IF_ERROR(begin_call(call));
  return end_call(run_barrier(*call.options));
}

}  // namespace dscomm
