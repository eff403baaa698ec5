// MemoryReservation: of several processes that reserve at once, as many succeed as the limit
// allows; a dead process gives its reservation back; no process is delayed for long.

#include "core/base/memory_reservation.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "core/base/deadline.h"

namespace dscomm::test {
namespace {

constexpr size_t kMebibyte = 1 << 20;

// A machine with plenty of memory and a process in cgroup /job/rank. Limits are files.
class MemoryReservationTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char folder[] = "/tmp/dscomm-test-limits-XXXXXX";
    root_ = mkdtemp(folder);
    write("proc/meminfo", "MemAvailable: 1048576 kB\n");
    write("proc/self/cgroup", "0::/job/rank\n");
    write("proc/self/ns/time", "");
    set_limit("job", 100 * kMebibyte, 0);
    std::filesystem::create_directories(root_ + "/cgroup/job/rank");
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  void write(const std::string& name, const std::string& text) {
    const std::filesystem::path path = root_ + "/" + name;
    std::filesystem::create_directories(path.parent_path());
    // Readers see either the old or the new file.
    std::ofstream(path.string() + ".new") << text;
    std::filesystem::rename(path.string() + ".new", path);
  }
  void set_limit(const std::string& cgroup, size_t most, size_t used) {
    write("cgroup/" + cgroup + "/memory.max", std::to_string(most) + "\n");
    write("cgroup/" + cgroup + "/memory.current", std::to_string(used) + "\n");
  }
  Result<MemoryReservation> make(size_t bytes) {
    return MemoryReservation::make(bytes, root_ + "/proc", root_ + "/cgroup");
  }

  std::string root_;
};

TEST_F(MemoryReservationTest, RefusalOfRequestBeyondLimitNamesTheLimit) {
  Result<MemoryReservation> refused = make(100 * kMebibyte);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), Code::kResource);
  EXPECT_EQ(refused.status().message(),
            "cgroup memory.max of /job leaves 104857600 bytes; 104857600 are needed, and 18415616 "
            "must stay free");
  EXPECT_TRUE(make(80 * kMebibyte).ok());
}

TEST_F(MemoryReservationTest, ReservationWaitsForMemoryReservedByOtherThread) {
  Result<MemoryReservation> first = make(50 * kMebibyte);
  ASSERT_TRUE(first.ok());
  std::atomic<bool> has_second{false};
  std::thread other([&] {
    Result<MemoryReservation> second = make(50 * kMebibyte);
    EXPECT_TRUE(second.ok()) << second.status().message();
    has_second = true;
  });
  // The second waits while the first takes what it has reserved.
  for (int step = 0; step < 12; ++step) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    EXPECT_FALSE(has_second);
    first.value().taken(kMebibyte);
  }
  {
    // Destroyed without taking the rest, for which nothing was charged.
    const MemoryReservation given_back = std::move(first).value();
  }
  other.join();
}

TEST_F(MemoryReservationTest, ChargedMemoryIsNotReservableAgain) {
  Result<MemoryReservation> first = make(50 * kMebibyte);
  ASSERT_TRUE(first.ok());
  set_limit("job", 100 * kMebibyte, 50 * kMebibyte);
  first.value().taken(50 * kMebibyte);
  EXPECT_FALSE(make(50 * kMebibyte).ok());
  EXPECT_TRUE(make(30 * kMebibyte).ok());
}

// Processes in two cgroups below the same limit.
TEST_F(MemoryReservationTest, ReservationsOfSiblingCgroupsShareTheLimit) {
  std::filesystem::create_directories(root_ + "/cgroup/job/other");
  int started[2], done[2];
  ASSERT_EQ(pipe(started), 0);
  ASSERT_EQ(pipe(done), 0);
  const pid_t child = fork();
  if (child == 0) {
    write("proc/self/cgroup", "0::/job/other\n");
    Result<MemoryReservation> taken = make(60 * kMebibyte);
    const char ok = taken.ok() ? 1 : 0;
    if (::write(started[1], &ok, 1) != 1) _exit(1);
    char end = 0;
    _exit(read(done[0], &end, 1) == 1 ? 0 : 1);
  }
  char ok = 0;
  ASSERT_EQ(read(started[0], &ok, 1), 1);
  EXPECT_EQ(ok, 1);
  write("proc/self/cgroup", "0::/job/rank\n");
  EXPECT_TRUE(make(20 * kMebibyte).ok());
  // Blocks until the child's death gives back its reservation.
  std::thread killer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    kill(child, SIGKILL);
  });
  Result<MemoryReservation> after = make(60 * kMebibyte);
  killer.join();
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(after.ok()) << after.status().message();
  for (int fd : {started[0], started[1], done[0], done[1]}) close(fd);
}

TEST_F(MemoryReservationTest, ConcurrentThreadsGetOnlyAvailableMemory) {
  for (int round = 0; round < 20; ++round) {
    constexpr int kThreads = 8;
    set_limit("job", 100 * kMebibyte, 0);
    std::atomic<int> ready{0}, granted{0};
    std::atomic<bool> charged{false};
    std::vector<std::thread> threads;
    for (int k = 0; k < kThreads; ++k)
      threads.emplace_back([&] {
        ++ready;
        while (ready < kThreads) std::this_thread::yield();
        Result<MemoryReservation> mine = make(40 * kMebibyte);
        if (!mine.ok()) return;
        // Like a kernel that charges: the second of two leaves nothing for the rest.
        if (++granted == 2) {
          set_limit("job", 100 * kMebibyte, 80 * kMebibyte);
          charged = true;
        }
        while (!charged) std::this_thread::yield();
      });
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(granted, 2);
  }
}

TEST_F(MemoryReservationTest, StuckLockDelaysReservationBriefly) {
  const int holder = open((root_ + "/cgroup/job").c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_EQ(flock(holder, LOCK_EX), 0);
  // A rank's peers wait while it waits here, and must hear of a death within a second.
  const int64_t began_ns = monotonic_ns();
  Result<MemoryReservation> first = make(40 * kMebibyte);
  EXPECT_TRUE(first.ok()) << first.status().message();
  // Announcements of other processes still count.
  Result<MemoryReservation> second = make(40 * kMebibyte);
  EXPECT_TRUE(second.ok()) << second.status().message();
  EXPECT_LT(monotonic_ns() - began_ns,
            std::chrono::nanoseconds(MemoryReservation::kStaleAfter).count());
  close(holder);
}

TEST_F(MemoryReservationTest, StaleReservationIsIgnored) {
  Result<MemoryReservation> stopped = make(80 * kMebibyte);
  ASSERT_TRUE(stopped.ok());
  Result<MemoryReservation> other = make(80 * kMebibyte);
  EXPECT_TRUE(other.ok()) << other.status().message();
}

// Locks the whole ledger, with one lock without an end and with thousands of small ones.
TEST_F(MemoryReservationTest, LockedLedgerDoesNotBlockReservation) {
  const int holder = open((root_ + "/cgroup/job").c_str(), O_RDONLY | O_CLOEXEC);
  for (int k = 0; k < 3000; ++k) {
    struct flock lock = {};
    lock.l_type = F_RDLCK;
    lock.l_start = 2 * k;
    lock.l_len = k == 2999 ? 0 : 1;
    ASSERT_EQ(fcntl(holder, F_OFD_SETLK, &lock), 0);
  }
  EXPECT_TRUE(make(40 * kMebibyte).ok());
  close(holder);
}

TEST_F(MemoryReservationTest, LimitsWithoutLockablePathAreStillEnforced) {
  std::filesystem::remove(root_ + "/proc/self/ns/time");
  write("proc/meminfo", "MemAvailable: 51200 kB\n");
  EXPECT_FALSE(make(60 * kMebibyte).ok());
  EXPECT_TRUE(make(30 * kMebibyte).ok());
}

TEST(MemoryReservation, ReservationOnThisMachineSucceeds) {
  Result<MemoryReservation> reservation = MemoryReservation::make(kMebibyte);
  ASSERT_TRUE(reservation.ok()) << reservation.status().message();
  reservation.value().taken(kMebibyte);
}

}  // namespace
}  // namespace dscomm::test
