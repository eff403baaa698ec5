// Call watch: takes threads out of calls of MPI that do not return.
//
// A rank waits for others by calls that return at once, again and again. When a connection breaks,
// such a call can stay: in Open MPI 4.1.4's TCP code (2 of some 700 times that all ranks of a host
// were killed with large sums under way, 1 of 3 times that a connection was reset). In MPICH a
// message to a rank that has left tries to connect for ever. So a thread looks at the calls under
// way. One that has slept for 800 ms, or computed for half of that since the first look, is left if
// its deadline has passed; once a death is known or MPI has given up, and with MPICH always, also
// before. A signal takes its thread back to where the call was made.
#pragma once

#include <pthread.h>
#include <setjmp.h>
#include <sys/types.h>

#include <atomic>
#include <cstdint>

#include "core/base/deadline.h"

namespace dscomm {

// From now on calls are watched: those that do not return are left once their deadline has passed,
// and those without one after 5 s. Any thread; does not block.
void watch_calls();
// The same, and they are left whatever their deadline.
void watch_calls_closely();

// MPI has given up in this process: see guarded.h. Safe in a signal handler.
void note_mpi_gave_up();

namespace guard {

// The calls that one thread makes.
struct Calls {
  // Grows by one as a watched call begins and as it ends: odd while one is under way. Relaxed: the
  // watch compares it with what it saw before, and what it finds too late it finds at the next
  // look.
  std::atomic<uint64_t> number{0};
  // The number of the call that is to be left, and from where: not from within the C library, whose
  // locks it may hold, or only where it has made a system call. Release stores of the watch, before
  // the signal; acquire loads of its handler.
  std::atomic<uint64_t> to_leave{0};
  enum Where { kAnywhere, kOutsideLibc, kAlsoAfterSystemCalls };
  std::atomic<Where> from{kAnywhere};
  // Of the wait that the calls are made in, in monotonic_ns(); 0: none is known. Relaxed, like
  // `number`.
  std::atomic<int64_t> deadline_ns{0};
  int depth = 0;       // of guarded() inside guarded()
  sigjmp_buf way_out;  // of the outermost
  pthread_t thread;
  pid_t thread_id = 0;

  void count_up() {
    number.store(number.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
};
Calls& calls_of_thread();

// While it lives, that is the deadline of the thread's calls.
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
