// A world of threads whose interleaving a seed decides: deterministic, replayable, in virtual time.
//
// The code under test runs unmodified. It is compiled with -fsanitize=thread but linked without
// ThreadSanitizer: this runtime provides the functions that the compiler calls at every atomic
// operation and every memory access, and takes the place of the thread, mutex, clock, futex and
// poll calls of the C library. All threads of a world are contexts of one kernel thread, and a
// thread gives way only inside these functions:
//
// - at every atomic operation the seed decides whether another thread goes on;
// - an atomic load may return an older value, as far as the C++ memory model allows (coherence,
//   happens-before, and the order of sequentially consistent operations), so that a memory order
//   that is too weak shows on any processor;
// - a plain access to memory that processes share, which is not ordered by happens-before with
//   another one to the same place, is a data race and ends the world;
// - time is virtual: it passes with the steps, and jumps where all threads sleep;
// - a process (a tag that threads inherit) can be killed at any step: its threads stop, and the
//   robust mutexes that it holds say so, as the kernel does it;
// - memory can be made short, and time can be lost, as by a machine that was suspended.
//
// Relacy explores the same orders, but needs its own types in place of std::atomic, plain shared
// variables and threads, so it would check a copy of the core. This runtime finds all weakened
// orders of tests/mutation but those listed there as CHECKED_OTHERWISE.
//
// What it cannot see: accesses of code that was not compiled so (libraries, streaming stores), and
// reorderings of plain memory other than as races.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace dscomm::schedule {

struct Options {
  uint64_t seed = 1;
  uint32_t switch_per_mille = 100;  // of the atomic operations, those after which others go on
  uint32_t stale_per_mille = 100;   // of the loads that may return an older value, those that do
  int slow_process = -1;            // goes on in one of twenty of its turns
  uint64_t most_steps = 20'000'000;
};

struct Outcome {
  std::string failure;  // empty: all threads ended; else a deadlock, a data race, too many steps
  uint64_t steps = 0;
  uint64_t switches = 0;
};

// Runs `body` as the first thread of a world, and returns when all of its threads have ended, or
// can go on no more. A world that failed leaves its threads' memory behind: fork before, and end.
Outcome run(const Options& options, const std::function<void()>& body);

// The rest is called from inside a world.

// Below `bound`, from the seed: a choice of the program's own.
uint64_t random(uint64_t bound);
int64_t now_ns();
// The process of the calling thread, and of those that it starts from now on.
void set_process(int process);
// The process dies at its next step at which it holds no mutex that it may share with another one.
void kill(int process);
// The same, some steps of that process later.
void kill_after(int process, uint64_t steps);
bool is_dead(int process);
// The clock goes on by so much while nothing runs.
void lose_time(int64_t ns);
// Shared memory that can still be taken; further requests are refused.
void limit_memory(int64_t bytes);
// Ends the world with this failure.
[[noreturn]] void fail(const std::string& what);

}  // namespace dscomm::schedule
