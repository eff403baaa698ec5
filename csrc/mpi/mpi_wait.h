// Waits until non-blocking MPI operations are complete.
//
// MPI moves data only inside its calls, so a wait polls: first without pauses, then between yields,
// then between sleeps. A sleep ends when one of MPI's sockets is ready (SocketSleep). If MPI uses
// other connections, a sleep is a nap that is short compared with the time waited. Between polls
// the wait asks its MpiWaitMonitor whether to go on. A wait ends when MPI has finished, when the
// monitor learns of a death or an abort, or at the deadline.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "core/base/deadline.h"
#include "core/base/socket_sleep.h"
#include "core/base/status.h"

namespace dscomm {

// How long each stage of a wait lasts.
struct MpiWaitPolicy {
  // A poll takes 0.2 to 1 us, so these polls take about one round trip of a fast network.
  int spin_polls = 100;
  // Longer yielding is a little faster if every rank has a core, and much slower otherwise: a yield
  // then gives a busy process the core for a whole time slice (8 bytes, 2 ranks beside 2 busy
  // processes on 2 cores: 25 ms with 20 ms of yields, 7 ms with 0.2 ms).
  int64_t yield_ns = 1'000'000;
  // All awaited data comes over TCP, so a wait can sleep on MPI's sockets.
  bool by_sockets = false;
  // The host has more ranks than cores: a wait on sockets then sleeps instead of yielding.
  bool is_crowded = false;
  // A nap is a two-hundredth of the time waited: half a percent of delay, and it frees the core.
  int64_t nap_divisor = 200;
  int64_t longest_nap_ns = 1'000'000;
};

class MpiWaitMonitor {
 public:
  // Called between polls, so it must be cheap. A failure ends the wait. waited_ns is 0 while the
  // wait spins.
  virtual Status check(int64_t waited_ns) = 0;
  // Returns the status for a wait that has reached its deadline.
  virtual Status timed_out() = 0;

 protected:
  ~MpiWaitMonitor() = default;
};

// The known sockets of MPI's connections: a wait can sleep until one of them has data.
SocketList& mpi_sockets();

// Asks MPI once whether the first `count` of `requests` are complete.
Result<bool> test_all(std::vector<MPI_Request>* requests, size_t count);

// Waits until `poll`, which asks MPI once, returns true or fails.
Status wait_until(const std::function<Result<bool>()>& poll, const MpiWaitPolicy& policy,
                  const Deadline& deadline, MpiWaitMonitor& monitor);

// OK: all operations are complete and *requests is empty. Otherwise some may still be pending, and
// MPI may use their memory for ever, because it cannot reliably cancel a request.
Status wait_for(std::vector<MPI_Request>* requests, const MpiWaitPolicy& policy,
                const Deadline& deadline, MpiWaitMonitor& monitor);

}  // namespace dscomm
