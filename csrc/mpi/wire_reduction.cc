#include "mpi/wire_reduction.h"

#include "core/reduce/reduce.h"
#include "core/team/widen.h"

namespace dscomm {
namespace {

ReduceOp op_of_sums(ReduceOp op) {
  return op == ReduceOp::kAvg || op == ReduceOp::kPremulSum ? ReduceOp::kSum : op;
}

}  // namespace

WireReduction::WireReduction(const Reduction& whole, int ranks, bool halves_as_float32)
    : whole_(whole),
      ranks_(ranks),
      is_widened_(is_widened(whole, halves_as_float32)),
      dtype_(is_widened_ ? DType::kFloat32 : whole.dtype),
      op_(op_of_sums(whole.op)) {}

// With one source, reduce() only copies, except that it applies the factor and makes a bool 0 or 1.
void WireReduction::enter(std::byte* wire, const std::byte* values, size_t count) const {
  if (count == 0) return;
  const void* source = values;
  if (is_widened_) {
    widen(reinterpret_cast<float*>(wire), values, count, whole_.dtype);
    source = wire;
  }
  Reduction entering{dtype_, op_};
  if (whole_.op == ReduceOp::kPremulSum) entering = {dtype_, whole_.op, whole_.factor};
  reduce(wire, &source, 1, count, entering, ranks_);
}

void WireReduction::leave(std::byte* results, std::byte* wire, size_t count) const {
  if (count == 0) return;
  const void* source = wire;
  std::byte* settled = is_widened_ ? wire : results;
  reduce(settled, &source, 1, count, {dtype_, whole_.op == ReduceOp::kAvg ? whole_.op : op_},
         ranks_);
  if (is_widened_) narrow(results, reinterpret_cast<const float*>(wire), count, whole_.dtype);
}

}  // namespace dscomm
