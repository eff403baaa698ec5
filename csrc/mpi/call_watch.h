// Call watch: takes threads out of calls of MPI that do not return.
//
// A rank waits for others by calls that return at once, again and again. When a rank of another
// host dies, such a call can stay (Open MPI 4.1.4's TCP code, 2 of some 700 times that all ranks of
// a host were killed with large sums under way), and in MPICH a message to a rank that has left
// tries to connect for ever. So once a death is known, and with MPICH always, a thread looks at the
// calls under way. One that has slept since its first look for 800 ms, or computed for half of
// that, is left: a signal takes its thread back to where the call was made.
#pragma once

#include <pthread.h>
#include <setjmp.h>
#include <sys/types.h>

#include <atomic>
#include <cstdint>

namespace dscomm {

// From now on calls are watched. Any thread; does not block.
void watch_calls();

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
  int depth = 0;       // of guarded() inside guarded()
  sigjmp_buf way_out;  // of the outermost
  pthread_t thread;
  pid_t thread_id = 0;

  void count_up() {
    number.store(number.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
};
Calls& calls_of_thread();

}  // namespace guard
}  // namespace dscomm
