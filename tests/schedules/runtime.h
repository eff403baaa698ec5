// Runs a world of threads whose interleaving a seed decides: replayable, in virtual time.
//
// The code under test is unmodified. It is compiled with -fsanitize=thread but linked without
// ThreadSanitizer: this runtime provides the functions that the compiler calls at every atomic
// operation and memory access, and replaces the thread, mutex, clock, futex and poll calls of the C
// library. All threads of a world are contexts of one kernel thread, and switch only inside these
// functions:
//
// - At every atomic operation the seed decides whether another thread continues.
// - An atomic load may return an older value, as far as the C++ memory model allows (coherence,
//   happens-before, and the order of sequentially consistent operations). So a memory order that is
//   too weak shows on any processor.
// - A plain access to memory shared between processes that is not ordered by happens-before with
//   another access to the same place is a data race and ends the world.
// - Time is virtual: it advances with the steps, and jumps when all threads sleep.
// - A process (a tag that threads inherit) can be killed at any step: its threads stop, and its
//   robust mutexes report it, as the kernel does.
// - Memory can be limited, and time can be lost, as on a machine that was suspended.
//
// Relacy explores the same orders, but needs its own types for std::atomic, plain shared variables
// and threads, so it would check a copy of the core. This runtime finds all weakened orders of
// tests/mutation except those listed there as CHECKED_OTHERWISE.
//
// It does not see accesses of code that is compiled otherwise (libraries, streaming stores), nor
// reorderings of plain memory other than as races.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace dscomm::schedule {

struct Options {
  uint64_t seed = 1;
  uint32_t switch_per_mille = 100;  // atomic operations after which another thread continues
  uint32_t stale_per_mille = 100;   // loads that return an older value, of those that may
  int slow_process = -1;            // continues in only one of twenty turns
  uint64_t most_steps = 20'000'000;
};

struct Outcome {
  std::string failure;  // empty: all threads ended; else a deadlock, a data race, too many steps
  uint64_t steps = 0;
  uint64_t switches = 0;
};

// Runs `body` as the first thread of a world; returns when all of its threads have ended or none
// can continue. A failed world leaks its threads' memory: fork before, and exit after.
Outcome run(const Options& options, const std::function<void()>& body);

// The functions below are called from inside a world.

// A random number below `bound`, from the seed.
uint64_t random(uint64_t bound);
int64_t now_ns();
// Sets the process of the calling thread, and of threads that it starts from now on.
void set_process(int process);
// Kills the process at its next step at which it holds no mutex shared between processes.
void kill(int process);
// The same, after `steps` more steps of that process.
void kill_after(int process, uint64_t steps);
bool is_dead(int process);
// Advances the clock while nothing runs.
void lose_time(int64_t ns);
// Sets how much more shared memory can be allocated; further requests fail.
void limit_memory(int64_t bytes);
// Ends the world with this failure.
[[noreturn]] void fail(const std::string& what);

}  // namespace dscomm::schedule
