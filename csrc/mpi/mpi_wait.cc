#include "mpi/mpi_wait.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "mpi/guarded.h"
#include "mpi/mpi_error.h"

namespace dscomm {
namespace {

// A yield this long ran another process. From then on sleeping on the sockets is better.
constexpr int64_t kYieldToOthersNs = 20'000;

// A sleep on sockets lasts at most the time waited divided by this, or kShortestSleepNs if longer:
// it does not end early if another thread reads the data from the socket.
constexpr int64_t kSleepDivisor = 20;
constexpr int64_t kShortestSleepNs = 50'000;

// The pause between two polls of a wait.
class Pauses {
 public:
  Pauses(const MpiWaitPolicy& policy, const Deadline& deadline)
      : policy_(policy), deadline_(deadline) {}

  int polls_before() const { return is_by_sockets_ ? SocketSleep::kPollsBefore : 1; }

  void pause(int64_t waited_ns, int64_t left_ns) {
    const int64_t began_ns = monotonic_ns();
    int64_t asked_ns = 0;
    if (waited_ns < policy_.yield_ns && !(is_by_sockets_ && shares_core_)) {
      sched_yield();
      shares_core_ |= monotonic_ns() - began_ns > kYieldToOthersNs;
    } else {
      asked_ns = std::min({waited_ns / policy_.nap_divisor, policy_.longest_nap_ns, left_ns});
      if (!sleep(waited_ns, left_ns, &asked_ns))
        std::this_thread::sleep_for(std::chrono::nanoseconds(asked_ns));
    }
    deadline_.note_slice(began_ns, asked_ns);
  }

 private:
  bool sleep(int64_t waited_ns, int64_t left_ns, int64_t* asked_ns) {
    if (!is_by_sockets_) return false;
    thread_local SocketSleep sockets(mpi_sockets());
    const int64_t most_ns = std::min(
        {std::max(waited_ns / kSleepDivisor, kShortestSleepNs), policy_.longest_nap_ns, left_ns});
    is_by_sockets_ = sockets.sleep(most_ns);
    if (is_by_sockets_) *asked_ns = most_ns;
    return is_by_sockets_;
  }

  const MpiWaitPolicy& policy_;
  const Deadline& deadline_;
  bool is_by_sockets_ = policy_.by_sockets;
  bool shares_core_ = policy_.is_crowded;  // or a yield has run another process
};

}  // namespace

SocketList& mpi_sockets() {
  // Never destroyed: until the process ends, MPI calls functions that add to this list.
  static auto* const sockets = new SocketList;
  return *sockets;
}

Result<bool> test_all(std::vector<MPI_Request>* requests, size_t count) {
  int done = 0;
  const int code = guarded([&] {
    return MPI_Testall(static_cast<int>(count), requests->data(), &done, MPI_STATUSES_IGNORE);
  });
  if (code != MPI_SUCCESS) return mpi_error("MPI_Testall", code);
  return done != 0;
}

Status wait_until(const std::function<Result<bool>()>& poll, const MpiWaitPolicy& policy,
                  const Deadline& deadline, MpiWaitMonitor& monitor) {
  const guard::CallDeadline calls_end(deadline);
  for (int i = 0; i < policy.spin_polls; ++i) {
    DSCOMM_ASSIGN_OR_RETURN(bool done, poll());
    if (done) return {};
    DSCOMM_RETURN_IF_ERROR(monitor.check(0));
  }
  const int64_t left_at_first = deadline.remaining_ns();
  TimeLeft time_left(deadline);
  Pauses pauses(policy, deadline);
  while (true) {
    for (int i = 0; i < pauses.polls_before(); ++i) {
      DSCOMM_ASSIGN_OR_RETURN(bool done, poll());
      if (done) return {};
    }
    const int64_t waited = left_at_first - deadline.remaining_ns();
    const int64_t left = time_left.ns();
    DSCOMM_RETURN_IF_ERROR(monitor.check(waited));
    if (left <= 0) return monitor.timed_out();
    pauses.pause(waited, left);
  }
}

Status wait_for(std::vector<MPI_Request>* requests, const MpiWaitPolicy& policy,
                const Deadline& deadline, MpiWaitMonitor& monitor) {
  const auto poll = [requests] { return test_all(requests, requests->size()); };
  DSCOMM_RETURN_IF_ERROR(wait_until(poll, policy, deadline, monitor));
  requests->clear();
  return {};
}

}  // namespace dscomm
