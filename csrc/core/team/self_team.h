// SelfTeam: the Team of one rank. Each collective is a copy, or nothing if it is in place; a
// reduction has one source. Nothing waits, so deadlines are ignored.
#pragma once

#include <cstring>

#include "core/reduce/reduce.h"
#include "core/team/first_cause.h"
#include "core/team/team.h"

namespace dscomm {

class SelfTeam final : public Team {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::string describe() const override { return "self, 1 rank"; }

  void abort(const Status& cause) override { static_cast<void>(cause_.keep(cause)); }
  Status failure() override { return cause_.get(); }

 private:
  static Status copy(void* out, const void* in, size_t count, DType dtype) {
    if (count > 0 && out != in) std::memcpy(out, in, count * dtype_bytes(dtype));
    return {};
  }
  static Status reduce_one(const void* in, void* out, size_t count, const Reduction& reduction) {
    if (count > 0) dscomm::reduce(out, &in, 1, count, reduction, 1);
    return {};
  }

  Status begin_call(Call&) override { return failure(); }
  Status run_all_reduce(const std::byte* in, std::byte* out, size_t count,
                        const Reduction& reduction, const CallOptions&) override {
    return reduce_one(in, out, count, reduction);
  }
  Status run_broadcast(std::byte*, size_t, DType, int, const CallOptions&) override { return {}; }
  Status run_reduce(const std::byte* in, std::byte* out, size_t count, const Reduction& reduction,
                    int, const CallOptions&) override {
    return reduce_one(in, out, count, reduction);
  }
  Status run_all_gather(const std::byte* in, size_t count, DType dtype, Outputs outs, Counts,
                        const CallOptions&) override {
    return copy(outs[0], in, count, dtype);
  }
  Status run_reduce_scatter(Inputs ins, Counts counts, std::byte* out, const Reduction& reduction,
                            const CallOptions&) override {
    return reduce_one(ins[0], out, counts[0], reduction);
  }
  Status run_gather(const std::byte* in, size_t count, DType dtype, Outputs outs, Counts, int,
                    const CallOptions&) override {
    return copy(outs[0], in, count, dtype);
  }
  Status run_scatter(Inputs ins, Counts, std::byte* out, size_t count, DType dtype, int,
                     const CallOptions&) override {
    return copy(out, ins[0], count, dtype);
  }
  Status run_all_to_all(Inputs ins, Counts in_counts, Outputs outs, Counts, DType dtype,
                        const CallOptions&) override {
    return copy(outs[0], ins[0], in_counts[0], dtype);
  }
  Status run_barrier(const CallOptions&) override { return {}; }

  FirstCause cause_;
};

}  // namespace dscomm
