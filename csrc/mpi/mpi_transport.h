// MpiTransport: the Transport over MPI. It starts MPI, runs the failure detector beside it, and
// makes the communicators of Teams.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/detector/tcp_failure_detector.h"
#include "core/transport/transport.h"
#include "mpi/bring_up.h"
#include "mpi/mpi_channel.h"
#include "mpi/mpi_wait.h"

namespace dscomm {

class MpiTransport final : public Transport, public std::enable_shared_from_this<MpiTransport> {
 public:
  // Collective over the members. `folder` contains dscomm-pmix.
  static Result<std::shared_ptr<Transport>> make(const TransportRequest& request,
                                                 std::shared_ptr<Store> store,
                                                 const Deadline& deadline,
                                                 const std::string& folder);

  int rank_of(const ArenaId& id) const override;
  Result<std::unique_ptr<Team>> make_team(const TransportTeam& team,
                                          const Deadline& deadline) override;
  std::shared_ptr<PeerProcess> peer_process(int rank) override;
  FailureDetector& detector() override { return *detector_; }
  void tolerate_silence(std::chrono::milliseconds timeout) override;
  void leave(bool has_failed) override;
  void close_descriptors() override;

 private:
  class MpiPeerProcess;

  explicit MpiTransport(const TransportRequest& request);
  Status bring_up_all(std::shared_ptr<Store> store, const Deadline& deadline,
                      const std::string& folder);
  GiveUpCheck missing_member_check(std::vector<int> ranks) const;
  void flush();

  const TransportRequest request_;
  std::map<ArenaId, int> ranks_;
  std::unique_ptr<TcpFailureDetector> detector_;
  std::unique_ptr<MpiWorld> world_;
  std::shared_ptr<MpiArrivals> arrivals_;  // on the communicator of all members
  std::atomic<bool> flushed_{false};
  std::atomic<int64_t> longest_timeout_ms_{0};  // of the groups so far; guards no data
  MpiWaitPolicy wait_policy_;
};

}  // namespace dscomm
