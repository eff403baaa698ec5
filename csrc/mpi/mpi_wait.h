// The one wait for MPI: until non-blocking operations are complete.
//
// MPI moves data only inside its calls, so a wait polls: at once for a while, then between yields,
// then between sleeps that end when one of MPI's connections has something to do (see SocketSleep)
// or, where MPI uses others, between naps that stay a small part of the time waited. Meanwhile it
// asks its MpiWatch whether waiting still makes sense. Who ends a wait: MPI, once the other ranks
// have done their part; the watch, when it hears of a death or an abort; or the deadline.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "core/base/deadline.h"
#include "core/base/status.h"

namespace dscomm {

// How long each stage of a wait lasts.
struct MpiWaitPolicy {
  // A poll that finds nothing is some 0.2 to 1 us, so this is about the round trip of a fast wire.
  int spin_polls = 100;
  // Longer is a little faster where every rank has a core, and much slower where it has not: then a
  // yield hands the core to whoever computes, for a whole time slice (8 bytes, 2 ranks beside 2
  // busy processes on 2 cores: 20 ms of yields 25 ms, 0.2 ms of them 7 ms).
  int64_t yield_ns = 1'000'000;
  // All awaited data comes over TCP.
  bool by_sockets = false;
  // This host has more ranks than cores: then such a wait sleeps instead of yielding.
  bool is_crowded = false;
  // A nap is a two-hundredth of the time waited: it delays by half a percent and frees the core.
  int64_t nap_divisor = 200;
  int64_t longest_nap_ns = 1'000'000;
};

class MpiWatch {
 public:
  // Asked all the time, so it must be cheap. Not OK: the wait ends with that. waited_ns is 0
  // while the wait spins.
  virtual Status look(int64_t waited_ns) = 0;
  // The deadline has passed: what to say about it.
  virtual Status timed_out() = 0;

 protected:
  ~MpiWatch() = default;
};

// Until `poll`, which asks MPI once, returns true or fails.
Status wait_until(const std::function<Result<bool>()>& poll, const MpiWaitPolicy& policy,
                  const Deadline& deadline, MpiWatch& watch);

// OK: all operations are complete and *requests is empty. Otherwise some may still be pending, and
// then MPI uses their memory for good: a request cannot be taken back.
Status wait_for(std::vector<MPI_Request>* requests, const MpiWaitPolicy& policy,
                const Deadline& deadline, MpiWatch& watch);

}  // namespace dscomm
