// SocketTeam: a Team over one TCP connection to each other rank. In every call, each rank sends one
// message to each other rank and awaits one from each. That is slow, but short.
#pragma once

#include <atomic>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "core/base/owned.h"
#include "core/detector/failure_detector.h"
#include "core/team/call_record.h"
#include "core/team/first_cause.h"
#include "core/team/team.h"

namespace dscomm {

struct SocketTeamMember {
  int transport_rank = 0;
  std::string name;  // "rank 3 (pid 7 on host b)"
  UniqueFd socket;   // connected to it; none for this rank
};

class SocketTeam final : public Team {
 public:
  SocketTeam(FailureDetector& detector, uint64_t id, std::string group, int rank,
             std::vector<SocketTeamMember> members);

  int rank() const override { return static_cast<int>(rank_); }
  int size() const override { return static_cast<int>(members_.size()); }
  std::string describe() const override { return "sockets, " + std::to_string(size()) + " ranks"; }

  void abort(const Status& cause) override;
  Status failure() override;
  Status failure_in(uint64_t call) override;
  Status death() override;
  void set_parent(const Team* parent) override { counts_calls_ = parent; }
  uint64_t finished_calls() const override { return finished_calls_.load(); }

 private:
  using Block = std::span<const std::byte>;
  using Bytes = std::vector<std::byte>;
  struct Message;

  Status begin_call(Call& call) override;
  Status run_all_reduce(const std::byte* in, std::byte* out, size_t count,
                        const Reduction& reduction, const CallOptions& options) override;
  Status run_broadcast(std::byte* buffer, size_t count, DType dtype, int root,
                       const CallOptions& options) override;
  Status run_reduce(const std::byte* in, std::byte* out, size_t count, const Reduction& reduction,
                    int root, const CallOptions& options) override;
  Status run_all_gather(const std::byte* in, size_t count, DType dtype, Outputs outs,
                        Counts out_counts, const CallOptions& options) override;
  Status run_reduce_scatter(Inputs ins, Counts counts, std::byte* out, const Reduction& reduction,
                            const CallOptions& options) override;
  Status run_gather(const std::byte* in, size_t count, DType dtype, Outputs outs, Counts out_counts,
                    int root, const CallOptions& options) override;
  Status run_scatter(Inputs ins, Counts in_counts, std::byte* out, size_t count, DType dtype,
                     int root, const CallOptions& options) override;
  Status run_all_to_all(Inputs ins, Counts in_counts, Outputs outs, Counts out_counts, DType dtype,
                        const CallOptions& options) override;
  Status run_barrier(const CallOptions& options) override;

  // Sends sent[k] to each rank k, and returns the data of each rank k, expected[k] bytes. Nothing
  // is returned if the ranks' calls or lengths differ. The data of this rank is a copy.
  Result<std::vector<Bytes>> exchange(const std::vector<Block>& sent,
                                      const std::vector<size_t>& expected,
                                      const CallOptions& options);
  Status advance(Message& message, const CallOptions& options);
  // Why the call cannot be completed, as far as is known; OK while it may be.
  Status check_for_end(const CallOptions& options);
  // The connection is closed: waits for the reason.
  Status lost(const SocketTeamMember& member, const CallOptions& options);
  Status fail(Code code, const std::string& cause);
  void reduce_all(const std::vector<Bytes>& blocks, void* out, size_t count,
                  const Reduction& reduction) const;

  FailureDetector& detector_;
  const uint64_t id_;
  const std::string group_;
  const size_t rank_;
  const std::vector<SocketTeamMember> members_;
  CallRecord call_;  // the last one
  uint64_t sequence_ = 0;
  AbortMonitor ends_, parents_ends_;    // of that call
  const Team* counts_calls_ = nullptr;  // null: this Team
  std::atomic<uint64_t> finished_calls_{0};
  FirstCause cause_;
};

}  // namespace dscomm
