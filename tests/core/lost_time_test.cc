// LostTime, and Deadlines that exclude it.

#include "core/base/lost_time.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "core/base/deadline.h"
#include "core/shm/mailbox/wait.h"

namespace dscomm {
namespace {

constexpr int64_t kSecond = 1'000'000'000;

TEST(LostTime, StopSeenBySeveralThreadsCountsOnce) {
  LostTime lost;
  EXPECT_EQ(lost.since(0), 0);
  lost.note(10 * kSecond, 30 * kSecond);
  lost.note(11 * kSecond, 31 * kSecond);
  lost.note(9 * kSecond, 30 * kSecond);
  EXPECT_EQ(lost.since(5 * kSecond), 22 * kSecond);
  // A wait that began during the lost time excludes the rest of it; one that began later, nothing.
  EXPECT_EQ(lost.since(30 * kSecond), kSecond);
  EXPECT_EQ(lost.since(31 * kSecond), 0);
}

TEST(LostTime, SeveralStopsAddUp) {
  LostTime lost;
  for (int64_t i = 1; i <= 10; ++i) lost.note(10 * i * kSecond, (10 * i + 2) * kSecond);
  EXPECT_EQ(lost.since(1), 20 * kSecond);
  EXPECT_EQ(lost.since(55 * kSecond), 10 * kSecond);
}

TEST(LostTime, DelayBelowMinimumIsNotLostTime) {
  LostTime lost;
  lost.note(10 * kSecond, 10 * kSecond + LostTime::kLeastNs - 1);
  EXPECT_EQ(lost.since(0), 0);
}

TEST(LostTime, DeadlineExcludesLostTime) {
  const Deadline deadline = Deadline::after(std::chrono::seconds(100));
  const int64_t began_ns = monotonic_ns();
  const int64_t left_ns = deadline.remaining_ns();
  const int64_t stopped_ns = monotonic_ns();
  std::this_thread::sleep_for(std::chrono::nanoseconds(LostTime::kLeastNs));
  const int64_t continued_ns = monotonic_ns();
  Deadline::after(std::chrono::seconds(1)).note_slice(stopped_ns, 0);  // another wait sees the same
                                                                       // stop
  const int64_t charged_ns = left_ns - deadline.remaining_ns();
  EXPECT_LE(charged_ns, monotonic_ns() - began_ns - (continued_ns - stopped_ns));
}

TEST(LostTime, LongTimeBetweenWaitsIsExcludedOnce) {
  const Deadline deadline = Deadline::after(std::chrono::seconds(100));
  deadline.leave_out_time_since_last_look();  // not begun: nothing to exclude
  const int64_t left_ns = deadline.remaining_ns();
  const int64_t stopped_ns = monotonic_ns();
  std::this_thread::sleep_for(std::chrono::nanoseconds(LostTime::kLeastNs));
  const int64_t continued_ns = monotonic_ns();
  deadline.leave_out_time_since_last_look();
  Deadline::after(std::chrono::seconds(1)).note_slice(stopped_ns, 0);  // another wait sees the same
                                                                       // stop
  const int64_t now_left_ns = deadline.remaining_ns();
  EXPECT_GE(now_left_ns, left_ns - (monotonic_ns() - continued_ns));
  EXPECT_LE(now_left_ns, left_ns);
  // A slice ends unseen time, and short slices are charged.
  for (int slice = 0; slice < 6; ++slice) {
    const int64_t began_ns = monotonic_ns();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    deadline.note_slice(began_ns, 200'000'000);
    deadline.leave_out_time_since_last_look();
  }
  EXPECT_LE(deadline.remaining_ns(), now_left_ns - 600'000'000);
}

// The parts of a composed call have copies of the deadline; one copy waits after the other.
TEST(LostTime, WaitWithOneDeadlineCopyReducesTimeLeftInOthers) {
  const Deadline whole = Deadline::after(std::chrono::seconds(100));
  const int64_t left_ns = whole.remaining_ns();
  const Deadline first = whole;
  for (int slice = 0; slice < 6; ++slice) {
    const int64_t began_ns = monotonic_ns();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    first.note_slice(began_ns, 200'000'000);
  }
  const Deadline second = whole;
  Deadline third = Deadline::after(std::chrono::seconds(1));
  third = whole;
  for (const Deadline* each : {&second, static_cast<const Deadline*>(&third)}) {
    each->leave_out_time_since_last_look();
    EXPECT_LE(each->remaining_ns(), left_ns - 600'000'000);
  }
}

void sleep_ms(int64_t ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

TEST(TimeLeft, CheckHalfASecondAfterDeadlineLeavesOneSecondOnce) {
  const Deadline deadline = Deadline::after(std::chrono::milliseconds(10));
  TimeLeft time_left(deadline);
  sleep_ms(20 + LostTime::kLeastNs / 1'000'000);
  const int64_t left_ns = time_left.ns();
  EXPECT_GT(left_ns, 0);
  EXPECT_LE(left_ns, kSecond);
  sleep_ms(1 + kSecond / 1'000'000);
  EXPECT_TRUE(time_left.is_over());
  EXPECT_TRUE(time_left.is_over());
}

TEST(TimeLeft, DeadlinePassedBeforeTheWaitLeavesOneSecond) {
  const Deadline deadline = Deadline::after(std::chrono::milliseconds(0));
  EXPECT_TRUE(deadline.expired());
  EXPECT_FALSE(TimeLeft(deadline).is_over());
}

TEST(TimeLeft, DeadlinePassedBetweenTwoChecksEndsTheWait) {
  for (int trial = 0; trial < 100; ++trial) {  // a busy machine may let this thread sleep too long
    const Deadline deadline = Deadline::after(std::chrono::milliseconds(2));
    TimeLeft time_left(deadline);
    EXPECT_GT(time_left.ns(), 0);
    sleep_ms(3);
    if (time_left.is_over()) return;
  }
  ADD_FAILURE() << "it never ended";
}

class CheckNothing final : public WaitMonitor {
 public:
  Status check() override { return {}; }
  Status timed_out() override { return Status(Code::kTimeout, "timed out"); }
};

// If a rank is stopped between two waits of a call, no slice of a sleep notes it.
TEST(TimeLeft, TimeSinceLastQueryIsLeftOutWhenWaitStarts) {
  const Deadline deadline = Deadline::after(std::chrono::milliseconds(1500));
  (void)deadline.remaining_ns();
  sleep_ms(1300);
  std::atomic<uint64_t> word{0};
  std::thread peer([&] {
    sleep_ms(600);
    word.store(1, std::memory_order_release);  // pairs with the acquire load in wait_slowly()
  });
  std::atomic<uint32_t> sleepers{0};
  CheckNothing monitor;
  const Status status = wait_slowly(word, 1, sleepers, WaitPolicy(), deadline, monitor);
  peer.join();
  EXPECT_TRUE(status.ok()) << status.message();
}

TEST(Overtime, OvertimeThatBeganInTheWaitCountsAtOnce) {
  const Deadline past = Deadline::after(std::chrono::milliseconds(1)).later(60'000'000'000);
  sleep_ms(10);
  Overtime overtime;
  EXPECT_FALSE(overtime.counts(Deadline::after(std::chrono::hours(1))));  // as it was before
  EXPECT_TRUE(overtime.counts(past));
}

TEST(Overtime, OvertimeThatBeganBeforeTheWaitCountsASecondLater) {
  const Deadline deadline = Deadline::after(std::chrono::milliseconds(1)).later(60'000'000'000);
  sleep_ms(10);
  Overtime overtime;
  const int64_t began_ns = monotonic_ns();
  while (!overtime.counts(deadline)) sleep_ms(1);
  EXPECT_GE(monotonic_ns() - began_ns, 1'000'000'000);
}

}  // namespace
}  // namespace dscomm
