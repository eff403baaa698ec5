#include "core/team/self_team.h"

#include <cstring>

#include "core/reduce/reduce.h"
#include "core/team/arguments.h"

namespace dscomm {
namespace {

void copy(void* out, const void* in, size_t count, DType dtype) {
  if (count > 0 && out != in) std::memcpy(out, in, count * dtype_bytes(dtype));
}

Status reduce_one(const void* in, void* out, size_t count, const Reduction& reduction) {
  DSCOMM_RETURN_IF_ERROR(check_reduction(reduction));
  if (count > 0) dscomm::reduce(out, &in, 1, count, reduction, 1);
  return {};
}

}  // namespace

Status SelfTeam::all_reduce(const void* in, void* out, size_t count, const Reduction& reduction,
                            const CallOptions&) {
  DSCOMM_RETURN_IF_ERROR(failure());
  return reduce_one(in, out, count, reduction);
}

Status SelfTeam::broadcast(void*, size_t, DType, int root, const CallOptions&) {
  DSCOMM_RETURN_IF_ERROR(failure());
  return check_root("broadcast", root, 1);
}

Status SelfTeam::reduce(const void* in, void* out, size_t count, const Reduction& reduction,
                        int root, const CallOptions&) {
  DSCOMM_RETURN_IF_ERROR(failure());
  DSCOMM_RETURN_IF_ERROR(check_root("reduce", root, 1));
  return reduce_one(in, out, count, reduction);
}

Status SelfTeam::all_gather(const void* in, size_t count, DType dtype, std::span<void* const> outs,
                            std::span<const size_t> out_counts, const CallOptions&) {
  DSCOMM_RETURN_IF_ERROR(failure());
  DSCOMM_RETURN_IF_ERROR(check_lists("all_gather", outs.size(), out_counts, count, 0, 1));
  copy(outs[0], in, count, dtype);
  return {};
}

Status SelfTeam::reduce_scatter(std::span<const void* const> ins, std::span<const size_t> counts,
                                void* out, const Reduction& reduction, const CallOptions&) {
  DSCOMM_RETURN_IF_ERROR(failure());
  DSCOMM_RETURN_IF_ERROR(check_lists("reduce_scatter", ins.size(), counts.size(), 1));
  return reduce_one(ins[0], out, counts[0], reduction);
}

Status SelfTeam::gather(const void* in, size_t count, DType dtype, std::span<void* const> outs,
                        std::span<const size_t> out_counts, int root, const CallOptions&) {
  DSCOMM_RETURN_IF_ERROR(failure());
  DSCOMM_RETURN_IF_ERROR(check_root("gather", root, 1));
  DSCOMM_RETURN_IF_ERROR(check_lists("gather", outs.size(), out_counts, count, 0, 1));
  copy(outs[0], in, count, dtype);
  return {};
}

Status SelfTeam::scatter(std::span<const void* const> ins, std::span<const size_t> in_counts,
                         void* out, size_t count, DType dtype, int root, const CallOptions&) {
  DSCOMM_RETURN_IF_ERROR(failure());
  DSCOMM_RETURN_IF_ERROR(check_root("scatter", root, 1));
  DSCOMM_RETURN_IF_ERROR(check_lists("scatter", ins.size(), in_counts, count, 0, 1));
  copy(out, ins[0], count, dtype);
  return {};
}

Status SelfTeam::all_to_all(std::span<const void* const> ins, std::span<const size_t> in_counts,
                            std::span<void* const> outs, std::span<const size_t> out_counts,
                            DType dtype, const CallOptions&) {
  DSCOMM_RETURN_IF_ERROR(failure());
  DSCOMM_RETURN_IF_ERROR(check_lists("all_to_all", ins.size(), in_counts.size(), 1));
  DSCOMM_RETURN_IF_ERROR(check_lists("all_to_all", outs.size(), out_counts, in_counts[0], 0, 1));
  copy(outs[0], ins[0], in_counts[0], dtype);
  return {};
}

Status SelfTeam::barrier(const CallOptions&) { return failure(); }

}  // namespace dscomm
