// Call watch: MPI calls that do not return are left once a rank has died or their deadline has
// passed. Runs without MPI. Each test needs its own process, since MPI has given up afterwards.

#include "mpi/call_watch.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include "mpi/abandonable.h"
#include "mpi/guarded.h"
#include "mpi/mpi_error.h"

namespace dscomm {
namespace {

using std::chrono::milliseconds;

std::atomic<uint64_t> rounds{0};

// Functions that hang as an MPI function might: sleeping and computing.
int sleep_for_ever() {
  static pthread_mutex_t held = PTHREAD_MUTEX_INITIALIZER;
  pthread_mutex_lock(&held);
  pthread_mutex_lock(&held);
  return MPI_SUCCESS;
}
int turn_for_ever() {
  while (true) rounds.fetch_add(1, std::memory_order_relaxed);
}
int print_for_ever() {
  char text[64];
  while (true) rounds.fetch_add(static_cast<uint64_t>(std::snprintf(text, 64, "%f", 0.1)));
}
int write_for_ever() {
  const int file = open("/dev/shm", O_TMPFILE | O_RDWR, 0600);
  static const std::string page(1 << 20, 'x');
  while (true) rounds.fetch_add(static_cast<uint64_t>(pwrite(file, page.data(), page.size(), 0)));
}

void expect_left(int (*call)()) {
  watch_calls_closely();
  EXPECT_EQ(guarded([&] { return guarded([&] { return call(); }); }), MPI_ERR_OTHER);
  EXPECT_TRUE(mpi_gave_up());
  EXPECT_EQ(guarded([] { return MPI_SUCCESS; }), MPI_ERR_OTHER);
}

TEST(CallWatch, SleepingCallIsInterrupted) { expect_left(&sleep_for_ever); }
TEST(CallWatch, LoopingCallIsInterrupted) { expect_left(&turn_for_ever); }
TEST(CallWatch, CallLoopingThroughLibcIsInterruptedOutsideLibc) { expect_left(&print_for_ever); }
// Nearly always inside the system call, so it is left in the C library, after kPatientTicks.
TEST(CallWatch, CallSpendingNearlyAllTimeInWriteIsInterruptedWithinThreeSeconds) {
  const auto begin = std::chrono::steady_clock::now();
  expect_left(&write_for_ever);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(3000));
}

// The library's threads block all signals.
TEST(CallWatch, CallOfThreadThatBlocksSignalsIsInterrupted) {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  std::thread(expect_left, &sleep_for_ever).join();
}

// The failure notice may come after MPI's error.
TEST(CallWatch, MpiErrorNamesTheFirstDeath) {
  note_mpi_gave_up();
  const Status early = mpi_error("MPI_Test", MPI_ERR_OTHER);
  EXPECT_FALSE(early.message().ends_with("rank 3 died"));
  note_first_death(Status(Code::kPeerDied, "rank 3 died"));
  note_first_death(Status(Code::kPeerDied, "rank 4 died"));
  const Deadline deadline = Deadline::after(milliseconds(1));
  for (const Status& status :
       {mpi_error("MPI_Test", MPI_ERR_OTHER), reason_or(early, deadline, [] { return Status(); })})
    EXPECT_TRUE(status.message().ends_with("several hosts; rank 3 died")) << status.message();
}

TEST(CallWatch, ReturningAndBlockingCallsAreNotInterrupted) {
  watch_calls_closely();
  const auto end = std::chrono::steady_clock::now() + milliseconds(2000);
  std::thread blocks([] {
    EXPECT_EQ(guarded_blocking([] {
                usleep(2'000'000);
                return MPI_SUCCESS;
              }),
              MPI_SUCCESS);
  });
  while (std::chrono::steady_clock::now() < end) {
    EXPECT_EQ(guarded([] {
                usleep(20'000);
                return MPI_SUCCESS;
              }),
              MPI_SUCCESS);
  }
  blocks.join();
  EXPECT_FALSE(mpi_gave_up());
}

// An MPI call that sleeps for 2 s and returns.
int slow_call() {
  return guarded([] {
    usleep(2'000'000);
    return MPI_SUCCESS;
  });
}

TEST(CallWatch, SlowCallBeforeItsDeadlineIsNotInterrupted) {
  watch_calls();
  EXPECT_EQ(slow_call(), MPI_SUCCESS);  // without a deadline
  const Deadline deadline = Deadline::after(milliseconds(60'000));
  const guard::CallDeadline calls_end(deadline);
  EXPECT_EQ(slow_call(), MPI_SUCCESS);
  EXPECT_FALSE(mpi_gave_up());
}

TEST(CallWatch, CallAfterItsDeadlineIsInterrupted) {
  watch_calls();
  const Deadline deadline = Deadline::after(milliseconds(1000));
  const guard::CallDeadline calls_end(deadline);
  EXPECT_EQ(guarded([] { return turn_for_ever(); }), MPI_ERR_OTHER);
  EXPECT_TRUE(deadline.expired());
  EXPECT_TRUE(mpi_gave_up());
}

// The watch sees it awake first.
int compute_then_sleep_for_ever() {
  const auto end = std::chrono::steady_clock::now() + milliseconds(200);
  while (std::chrono::steady_clock::now() < end) rounds.fetch_add(1, std::memory_order_relaxed);
  return sleep_for_ever();
}
TEST(CallWatch, CallThatSleepsAfterComputingIsInterrupted) {
  expect_left(&compute_then_sleep_for_ever);
}

TEST(CallWatch, CallIsInterruptedAfterMpiFailedInAnotherThread) {
  watch_calls();
  std::thread other([] {
    const Deadline deadline = Deadline::after(milliseconds(600'000));
    const guard::CallDeadline calls_end(deadline);
    EXPECT_EQ(guarded([] { return sleep_for_ever(); }), MPI_ERR_OTHER);
  });
  usleep(100'000);
  EXPECT_EQ(guarded([]() -> int { guard::give_up("held a lock"); }), MPI_ERR_OTHER);
  other.join();
}

TEST(CallWatch, CallWithoutDeadlineIsInterruptedAfterFiveSeconds) {
  watch_calls();
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(guarded([] { return sleep_for_ever(); }), MPI_ERR_OTHER);
  EXPECT_GT(std::chrono::steady_clock::now() - begin, milliseconds(4500));
  EXPECT_TRUE(mpi_gave_up());
}

}  // namespace
}  // namespace dscomm
