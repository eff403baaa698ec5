// SelfTeam: the Team of one rank. Each collective is a copy, or nothing if it is in place; a
// reduction has one source. Nothing waits, so deadlines are ignored.
#pragma once

#include "core/team/first_cause.h"
#include "core/team/team.h"

namespace dscomm {

class SelfTeam final : public Team {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::string describe() const override { return "self, 1 rank"; }

  Status all_reduce(const void* in, void* out, size_t count, const Reduction& reduction,
                    const CallOptions& options) override;
  Status broadcast(void* buffer, size_t count, DType dtype, int root,
                   const CallOptions& options) override;
  Status reduce(const void* in, void* out, size_t count, const Reduction& reduction, int root,
                const CallOptions& options) override;
  Status all_gather(const void* in, size_t count, DType dtype, std::span<void* const> outs,
                    std::span<const size_t> out_counts, const CallOptions& options) override;
  Status reduce_scatter(std::span<const void* const> ins, std::span<const size_t> counts, void* out,
                        const Reduction& reduction, const CallOptions& options) override;
  Status gather(const void* in, size_t count, DType dtype, std::span<void* const> outs,
                std::span<const size_t> out_counts, int root, const CallOptions& options) override;
  Status scatter(std::span<const void* const> ins, std::span<const size_t> in_counts, void* out,
                 size_t count, DType dtype, int root, const CallOptions& options) override;
  Status all_to_all(std::span<const void* const> ins, std::span<const size_t> in_counts,
                    std::span<void* const> outs, std::span<const size_t> out_counts, DType dtype,
                    const CallOptions& options) override;
  Status barrier(const CallOptions& options) override;

  void abort(const Status& cause) override { static_cast<void>(cause_.keep(cause)); }
  Status failure() override { return cause_.get(); }

 private:
  FirstCause cause_;
};

}  // namespace dscomm
