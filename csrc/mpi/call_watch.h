// Call watch: takes threads out of MPI calls that do not return.
//
// A rank waits for others by polling MPI with calls that return at once. When a connection breaks,
// such a call can hang: in Open MPI 4.1.4's TCP code (2 of some 700 runs in which all ranks of a
// host were killed during large sums, 1 of 3 runs in which a connection was reset); in MPICH, a
// message to a rank that has left retries its connection for ever.
//
// A watch thread checks running calls. A call counts as hanging if it has run for at least 800 ms,
// and has slept for the last 800 ms or used 400 ms of CPU time. Once its deadline has passed, a
// signal makes its thread leave it: the thread jumps back to guarded(). The deadline does not count
// if a death is known, if MPI has given up, or if MPICH has connected all ranks.
#pragma once

#include <pthread.h>
#include <setjmp.h>
#include <sys/types.h>

#include <atomic>
#include <cstdint>

#include "core/base/deadline.h"

namespace dscomm {

// Starts to watch calls: the thread of a hanging call jumps back to guarded() once the call's
// deadline has passed or, if it has none, after 5 s in the call. Thread-safe; does not block.
void watch_calls();
// Like watch_calls(), but a thread leaves a hanging call at once, whatever the call's deadline.
void watch_calls_closely();

// Records that MPI has given up in this process (guarded.h). Safe in a signal handler.
void note_mpi_gave_up();

namespace guard {

// The MPI calls of one thread.
struct Calls {
  // Incremented when a watched call begins and ends: odd while a call runs. Relaxed: the watch only
  // compares it with the number of the previous tick, and may see a change one tick late.
  std::atomic<uint64_t> number{0};
  // The number of the call to leave, and where the signal may interrupt it: anywhere; only outside
  // the C library, whose locks the call may hold; or outside it and, inside it, just after a system
  // call. The watch's release stores, before it sends the signal, pair with the signal handler's
  // acquire loads.
  std::atomic<uint64_t> to_leave{0};
  enum Where { kAnywhere, kOutsideLibc, kAlsoAfterSystemCalls };
  std::atomic<Where> from{kAnywhere};
  // Deadline of the running call, as a time of monotonic_ns(); 0: unknown. Relaxed, as `number`.
  std::atomic<int64_t> deadline_ns{0};
  int depth = 0;       // nested guarded() calls
  sigjmp_buf way_out;  // of the outermost guarded()
  pthread_t thread;
  pid_t thread_id = 0;

  void count_up() {
    number.store(number.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
};
Calls& calls_of_thread();

// While this object lives, the MPI calls of its thread have the constructor's deadline.
class CallDeadline {
 public:
  explicit CallDeadline(const Deadline& deadline)
      : calls_(calls_of_thread()), before_ns_(calls_.deadline_ns.load(std::memory_order_relaxed)) {
    const int64_t left_ns = deadline.remaining_ns();
    calls_.deadline_ns.store(monotonic_ns() + left_ns, std::memory_order_relaxed);
  }
  ~CallDeadline() { calls_.deadline_ns.store(before_ns_, std::memory_order_relaxed); }
  CallDeadline(const CallDeadline&) = delete;
  CallDeadline& operator=(const CallDeadline&) = delete;

 private:
  Calls& calls_;
  const int64_t before_ns_;
};

}  // namespace guard
}  // namespace dscomm
