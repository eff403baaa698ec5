#include "core/base/socket_sleep.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <thread>
#include <vector>

#include "core/base/deadline.h"
#include "socket_pair.h"

namespace dscomm {
namespace {

constexpr int64_t kShortNs = 1'000'000;
// Longer than a test waits.
constexpr int64_t kLongNs = 600'000'000'000;

class SocketSleepTest : public ::testing::Test {
 protected:
  // The first sleep reports that the socket is writable.
  void take_first_report() {
    list_.add(near_.get());
    EXPECT_TRUE(sleep_.sleep(kLongNs));
  }
  void fill() {
    const std::vector<char> data(1 << 16);
    while (write(near_.get(), data.data(), data.size()) > 0) {
    }
  }
  void drain() {
    std::vector<char> data(1 << 16);
    while (read(far_.get(), data.data(), data.size()) > 0) {
    }
  }

  SocketList list_;
  SocketSleep sleep_{list_};
  testing::SocketPair pair_;
  UniqueFd& near_ = pair_.near;
  UniqueFd& far_ = pair_.far;
};

TEST_F(SocketSleepTest, SleepWithoutSocketsReturnsFalse) { EXPECT_FALSE(sleep_.sleep(kLongNs)); }

TEST_F(SocketSleepTest, SleepWithListenerAloneReturnsFalse) {
  UniqueFd listener(socket(AF_INET, SOCK_STREAM, 0));
  list_.add(listener.get());
  ASSERT_EQ(listen(listener.get(), 1), 0);
  EXPECT_FALSE(sleep_.sleep(kLongNs));
}

TEST_F(SocketSleepTest, SleepWithIdleSocketLastsUntilLimit) {
  take_first_report();
  const int64_t began_ns = monotonic_ns();
  EXPECT_TRUE(sleep_.sleep(kShortNs));
  EXPECT_GE(monotonic_ns() - began_ns, kShortNs);
}

TEST_F(SocketSleepTest, SleepEndsIfDataArrives) {
  take_first_report();
  std::thread sender([&] {
    usleep(10'000);
    EXPECT_EQ(write(far_.get(), "x", 1), 1);
  });
  EXPECT_TRUE(sleep_.sleep(kLongNs));
  sender.join();
}

TEST_F(SocketSleepTest, RepeatedSleepsEndIfDataIsUnread) {
  take_first_report();
  EXPECT_EQ(write(far_.get(), "x", 1), 1);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(sleep_.sleep(kLongNs));
}

TEST_F(SocketSleepTest, SleepEventuallyLastsUntilLimitIfSocketIsLeftUnread) {
  constexpr int64_t kSleepNs = 50'000'000;
  take_first_report();
  EXPECT_EQ(write(far_.get(), "x", 1), 1);
  int64_t slept_ns = 0;
  for (int sleeps = 0; slept_ns < kSleepNs && sleeps < 1'000'000; ++sleeps) {
    const int64_t began_ns = monotonic_ns();
    EXPECT_TRUE(sleep_.sleep(kSleepNs));
    slept_ns = monotonic_ns() - began_ns;
  }
  EXPECT_GE(slept_ns, kSleepNs);
  EXPECT_TRUE(sleep_.sleep(kLongNs));
}

TEST_F(SocketSleepTest, SleepEndsIfOtherDescriptorHasData) {
  take_first_report();
  const testing::SocketPair other(SOCK_DGRAM);
  EXPECT_EQ(write(other.far.get(), "x", 1), 1);
  EXPECT_TRUE(sleep_.sleep(kLongNs, other.near.get()));
}

TEST_F(SocketSleepTest, SleepEndsInEveryThreadOnceSocketHasRoom) {
  list_.add(near_.get());
  fill();
  // Each sleeper has its own descriptors, which see the full socket.
  std::vector<std::thread> sleepers;
  for (int i = 0; i < 3; ++i)
    sleepers.emplace_back([&] {
      SocketSleep own(list_);
      EXPECT_TRUE(own.sleep(kLongNs));
    });
  usleep(10'000);
  drain();
  for (std::thread& sleeper : sleepers) sleeper.join();
}

TEST_F(SocketSleepTest, SleepEndsIfSocketAddedLaterHasData) {
  take_first_report();
  const testing::SocketPair second;
  EXPECT_EQ(write(second.far.get(), "x", 1), 1);
  list_.add(second.near.get());
  EXPECT_TRUE(sleep_.sleep(kLongNs));
}

TEST_F(SocketSleepTest, SleepFailsIfAnotherSocketHasReusedTheDescriptor) {
  list_.add(near_.get());
  const testing::SocketPair another;
  ASSERT_EQ(dup2(another.near.get(), near_.get()), near_.get());
  EXPECT_FALSE(sleep_.sleep(kLongNs));
}

TEST_F(SocketSleepTest, SleepWithClosedSocketLastsUntilLimit) {
  take_first_report();
  EXPECT_EQ(write(far_.get(), "x", 1), 1);
  near_.reset();
  const int64_t began_ns = monotonic_ns();
  EXPECT_TRUE(sleep_.sleep(kShortNs));
  EXPECT_GE(monotonic_ns() - began_ns, kShortNs);
}

}  // namespace
}  // namespace dscomm
