// TensorPool: blocks are reused and merged, a shortage is an error, peers can read and not write.

#include "core/shm/memory/tensor_pool.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "core/shm/mailbox/layout.h"
#include "core/shm/memory/socket_directory.h"
#include "shm_ranks.h"

namespace dscomm::test {
namespace {

constexpr size_t kMiB = 1 << 20;

std::shared_ptr<TensorPool> make_pool(size_t bytes = 16 * kMiB) {
  return TensorPool::create(bytes).value();
}

// The exit status of a forked child. Children use _exit(): gtest's own exit would end the parent's
// tests a second time.
int status_of(pid_t child) {
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return status;
}

TEST(TensorPool, NewBlocksArePageAlignedAndZeroed) {
  std::shared_ptr<TensorPool> pool = make_pool();
  for (size_t bytes : {size_t{0}, size_t{1}, size_t{4095}, size_t{4096}, size_t{4097}, kMiB + 1}) {
    std::byte* block = pool->allocate(bytes).value();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(block) % kPageBytes, 0u);
    for (size_t i = 0; i < bytes; ++i) ASSERT_EQ(block[i], std::byte{0});
    if (bytes > 0) std::memset(block, 1, bytes);
  }
}

TEST(TensorPool, FindReturnsOffsetsOfPoolAddressesOnly) {
  std::shared_ptr<TensorPool> pool = make_pool();
  std::byte* first = pool->allocate(kPageBytes).value();
  std::byte* second = pool->allocate(kPageBytes).value();
  EXPECT_EQ(pool->find(first, kPageBytes), 0u);
  EXPECT_EQ(pool->find(second + 7, 100), kPageBytes + 7);
  const size_t size = pool->size();
  EXPECT_EQ(pool->find(first + size - 1, 1), size - 1);
  EXPECT_EQ(pool->find(first + size, 0), size);
  EXPECT_FALSE(pool->find(first + size - 1, 2).has_value());
  EXPECT_FALSE(pool->find(first - 1, 1).has_value());
  EXPECT_FALSE(pool->find(first, size + 1).has_value());
  EXPECT_FALSE(pool->find(first + 1, SIZE_MAX).has_value());
  int elsewhere = 0;
  EXPECT_FALSE(pool->find(&elsewhere, sizeof elsewhere).has_value());
}

TEST(TensorPool, AllocateTakesTheSmallestBlockThatFits) {
  std::shared_ptr<TensorPool> pool = make_pool();
  std::vector<std::byte*> blocks, walls;
  for (size_t pages : {8, 3, 5}) {
    blocks.push_back(pool->allocate(pages * kPageBytes).value());
    walls.push_back(pool->allocate(1).value());
  }
  for (std::byte* block : blocks) pool->release(block);
  EXPECT_EQ(pool->allocate(4 * kPageBytes).value(), blocks[2]);
  EXPECT_EQ(pool->allocate(3 * kPageBytes).value(), blocks[1]);
  EXPECT_EQ(pool->allocate(1).value(), blocks[2] + 4 * kPageBytes);  // the rest of a larger block
  EXPECT_EQ(pool->allocate(8 * kPageBytes).value(), blocks[0]);
}

TEST(TensorPool, ReleaseMergesFreeNeighbours) {
  for (std::vector<size_t> order : {std::vector<size_t>{0, 1, 2, 3}, {3, 2, 1, 0}, {0, 2, 3, 1}}) {
    std::shared_ptr<TensorPool> pool = make_pool(4 * kMiB);
    std::vector<std::byte*> blocks;
    for (int i = 0; i < 4; ++i) blocks.push_back(pool->allocate(kMiB).value());
    EXPECT_FALSE(pool->allocate(1).ok());
    for (size_t index : order) pool->release(blocks[index]);
    EXPECT_EQ(pool->allocate(4 * kMiB).value(), pool->data());
  }
}

TEST(TensorPool, GrowthReusesFreeMemoryAtTheEnd) {
  std::shared_ptr<TensorPool> pool = make_pool(8 * kMiB);
  std::byte* kept = pool->allocate(kMiB).value();
  pool->release(pool->allocate(kMiB).value());
  EXPECT_EQ(backed_bytes(pool->fd()), 2 * kMiB);
  // 7 MiB are left; the kernel already backs one of them.
  EXPECT_EQ(pool->allocate(7 * kMiB).value(), kept + kMiB);
  EXPECT_EQ(backed_bytes(pool->fd()), 8 * kMiB);
}

TEST(TensorPool, AllocateInFullPoolIsAResourceError) {
  std::shared_ptr<TensorPool> pool = make_pool(2 * kMiB);
  std::byte* block = pool->allocate(2 * kMiB).value();
  for (size_t bytes : {size_t{1}, 3 * kMiB, SIZE_MAX}) {
    Result<std::byte*> refused = pool->allocate(bytes);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.status().code(), Code::kResource);
    EXPECT_NE(refused.status().message().find("2097152"), std::string::npos)
        << refused.status().message();
  }
  pool->release(block);
  EXPECT_TRUE(pool->allocate(1).ok());
}

TEST(TensorPool, AllocateBeyondMachineMemoryIsRefused) {
  std::shared_ptr<TensorPool> pool = TensorPool::create(SIZE_MAX).value();
  Result<std::byte*> refused = pool->allocate(pool->size());
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), Code::kResource);
  EXPECT_EQ(backed_bytes(pool->fd()), 0u);
}

TEST(TensorPool, ConcurrentThreadsGetDistinctBlocks) {
  std::shared_ptr<TensorPool> pool = make_pool(8 * kMiB);
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed)
    threads.emplace_back([&pool, seed] {
      std::mt19937 random(seed);
      std::vector<std::pair<std::byte*, size_t>> mine;
      for (int i = 0; i < 2000; ++i) {
        if (mine.size() < 20 && random() % 2 == 0) {
          const size_t bytes = 1 + random() % (100 * 1024);
          Result<std::byte*> block = pool->allocate(bytes);
          if (!block.ok()) continue;  // full
          block.value()[0] = block.value()[bytes - 1] = std::byte(seed);
          mine.emplace_back(block.value(), bytes);
        } else if (!mine.empty()) {
          std::swap(mine[random() % mine.size()], mine.back());
          auto [block, bytes] = mine.back();
          mine.pop_back();
          ASSERT_EQ(block[0], std::byte(seed));  // no other thread has it
          ASSERT_EQ(block[bytes - 1], std::byte(seed));
          pool->release(block);
        }
      }
      for (auto [block, bytes] : mine) pool->release(block);
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(pool->allocate(pool->size()).value(), pool->data());
}

TEST(TensorPool, PoolIsReadOnlyAndSealedForPeers) {
  std::shared_ptr<TensorPool> pool = make_pool(2 * kMiB);
  std::byte* block = pool->allocate(kPageBytes).value();
  Mapping view = std::move(map_for_reading(pool->fd(), pool->size())).value();
  block[5] = std::byte{42};
  EXPECT_EQ(view.data()[5], std::byte{42});
  EXPECT_EQ(mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, pool->fd(), 0),
            MAP_FAILED);
  EXPECT_NE(mprotect(view.data(), kPageBytes, PROT_READ | PROT_WRITE), 0);
  EXPECT_EQ(pwrite(pool->fd(), "x", 1, 0), -1);
  EXPECT_NE(ftruncate(pool->fd(), 0), 0);
  EXPECT_NE(fallocate(pool->fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, kPageBytes), 0);
  EXPECT_EQ(view.data()[5], std::byte{42});
}

TEST(TensorPool, CreateUnderAddressSpaceLimitFails) {
  pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    rlimit limit{rlim_t{1} << 62, RLIM_INFINITY};  // a limit that never applies
    if (setrlimit(RLIMIT_AS, &limit) != 0) _exit(2);
    Result<std::shared_ptr<TensorPool>> pool = TensorPool::create(kMiB);
    _exit(!pool.ok() && pool.status().code() == Code::kResource ? 0 : 1);
  }
  EXPECT_EQ(status_of(child), 0);
}

// A child of fork() can read the blocks, and can neither allocate nor release.
TEST(TensorPool, ForkedChildReadsItsBlocksAndCannotChangeThePool) {
  std::shared_ptr<TensorPool> pool = make_pool(2 * kMiB);
  std::byte* block = pool->allocate(kPageBytes).value();
  std::memset(block, 1, kPageBytes);
  pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    pool->after_fork_in_child();
    bool right = block[0] == std::byte{1} && block[kPageBytes - 1] == std::byte{1};
    std::memset(block, 2, kPageBytes);
    right &= block[0] == std::byte{2};
    pool->release(block);
    right &= !pool->allocate(1).ok() && fcntl(pool->fd(), F_GETFD) == -1;
    _exit(right ? 0 : 1);
  }
  EXPECT_EQ(status_of(child), 0);
  for (size_t i = 0; i < kPageBytes; ++i) ASSERT_EQ(block[i], std::byte{1});
  EXPECT_NE(pool->allocate(1).value(), block);
}

// One process has a pool; the other one reads it, including blocks allocated after they met.
TEST(TensorPool, PeerReadsDataWrittenByOwner) {
  int sockets[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets), 0);
  struct Place {
    uint64_t offset, bytes;
  };
  pid_t child = fork();
  ASSERT_GE(child, 0);
  std::shared_ptr<Arena> arena = Arena::create(16 * kMiB).value();
  if (child == 0) {
    close(sockets[0]);  // so that this process ends with its parent
    std::shared_ptr<TensorPool> pool = make_pool();
    SocketDirectory directory;
    PeerAddress own = directory.publish(arena, pool, ArenaId{}).value();
    char met = 0;
    if (write(sockets[1], &own, sizeof own) != sizeof own || read(sockets[1], &met, 1) != 1)
      _exit(2);
    Place place{0, 3 * kMiB};
    pool->allocate(kMiB).value();
    std::byte* block = pool->allocate(place.bytes).value();
    place.offset = pool->find(block, place.bytes).value();
    for (size_t i = 0; i < place.bytes; ++i) block[i] = std::byte(i % 251);
    if (write(sockets[1], &place, sizeof place) != sizeof place || read(sockets[1], &met, 1) != 1)
      _exit(3);
    _exit(0);
  }
  close(sockets[1]);
  SocketDirectory directory;
  ASSERT_TRUE(directory.publish(arena, nullptr, ArenaId{}).ok());
  PeerAddress other;
  ASSERT_EQ(read(sockets[0], &other, sizeof other), static_cast<ssize_t>(sizeof other));
  Directory::Attached attached = directory.attach(other, Deadline::after(std::chrono::seconds(20)));
  ASSERT_NE(attached.peer, nullptr) << attached.why_not;
  EXPECT_FALSE(attached.peer->lacks_pool());
  const char met = 1;
  ASSERT_EQ(write(sockets[0], &met, 1), 1);
  Place place;
  ASSERT_EQ(read(sockets[0], &place, sizeof place), static_cast<ssize_t>(sizeof place));
  const std::byte* theirs = attached.peer->at_in_pool(place.offset, place.bytes);
  ASSERT_NE(theirs, nullptr);
  for (size_t i = 0; i < place.bytes; ++i) ASSERT_EQ(theirs[i], std::byte(i % 251));
  EXPECT_EQ(attached.peer->at_in_pool(place.offset, 16 * kMiB), nullptr);
  EXPECT_EQ(attached.peer->at_in_pool(17 * kMiB, 0), nullptr);
  EXPECT_EQ(attached.peer->at_in_pool(1, SIZE_MAX), nullptr);
  ASSERT_EQ(write(sockets[0], &met, 1), 1);
  EXPECT_EQ(status_of(child), 0);
  close(sockets[0]);
}

// If one rank cannot read another's pool, no rank's pool is used.
TEST(TensorPool, UnreadablePoolDisablesInPlaceReadsOnAllRanks) {
  for (bool hidden : {false, true}) {
    auto registry = std::make_shared<Registry>();
    MemoryStore store;
    run_ranks(3, [&](int rank) {
      RankParty party(registry, small_settings());
      party.directory->hides_pools = hidden && rank == 1;
      Result<Formation> formation = party.form(store, rank, 3);
      ASSERT_TRUE(formation.ok()) << formation.status().message();
      EXPECT_EQ(formation.value().reads_pools, !hidden);
    });
  }
}

// --- memory policy (linux/mempolicy.h)

enum PolicyMode { kDefault = 0, kPreferred = 1, kBind = 2, kInterleave = 3, kPreferredMany = 5 };
constexpr unsigned long kOfAddress = 2;  // MPOL_F_ADDR

int policy_of(const void* address) {
  int mode = -1;
  EXPECT_EQ(syscall(SYS_get_mempolicy, &mode, nullptr, 0, address, kOfAddress), 0);
  return mode & 0xff;
}

// Runs `body` in a thread with this memory policy, over the first node.
template <typename Body>
void with_policy(int mode, Body body) {
  bool is_set = false;
  std::thread thread([&] {
    const unsigned long nodes = 1;
    is_set = syscall(SYS_set_mempolicy, mode, mode == kDefault ? nullptr : &nodes,
                     mode == kDefault ? 0 : 8 * sizeof nodes) == 0;
    if (is_set) body();
  });
  thread.join();
  if (!is_set) GTEST_SKIP() << "set_mempolicy is not allowed here: " << std::strerror(errno);
}

// Whether one node was requested; hwloc decides which of the two policies does that.
void expect_placed(int policy) {
  EXPECT_TRUE(policy == kPreferred || policy == kPreferredMany) << policy;
}

TEST(MemoryPolicy, ArenaAndPoolPreferTheNodeOfABoundProcess) {
  std::unique_ptr<Topology> topology = std::move(Topology::load("")).value();
  // Only a process whose cores are all in one node has a node to prefer, and the test cannot bind
  // itself: the machine's nodes and the cores that it may use are given.
  if (topology->binding().numa < 0) GTEST_SKIP() << "this process is bound to no single NUMA node";
  for (int mode : {kDefault, kInterleave})
    with_policy(mode, [&] {
      std::shared_ptr<Arena> arena = Arena::create(4 * kMiB, topology.get()).value();
      std::shared_ptr<TensorPool> pool = TensorPool::create(4 * kMiB, topology.get()).value();
      std::byte* block = pool->allocate(kMiB).value();
      expect_placed(policy_of(arena->data()));
      expect_placed(policy_of(arena->data() + 2 * kMiB));
      expect_placed(policy_of(block));
      expect_placed(policy_of(pool->data() + 3 * kMiB));
    });
}

// The nodes of numactl --membind and --preferred are the user's choice.
TEST(MemoryPolicy, NodesChosenByTheUserAreKept) {
  std::unique_ptr<Topology> topology = std::move(Topology::load("")).value();
  with_policy(kBind, [&] {
    std::shared_ptr<Arena> arena = Arena::create(4 * kMiB, topology.get()).value();
    EXPECT_EQ(policy_of(arena->data()), kDefault);  // it has no policy, so the thread's applies
  });
}

TEST(MemoryPolicy, ArenaHasNoPolicyIfTopologyIsGivenAsText) {
  std::unique_ptr<Topology> topology =
      std::move(Topology::load("pack:1 [numa] core:2 pu:1")).value();
  with_policy(kInterleave, [&] {
    std::shared_ptr<Arena> arena = Arena::create(4 * kMiB, topology.get()).value();
    EXPECT_EQ(policy_of(arena->data()), kDefault);
  });
}

}  // namespace
}  // namespace dscomm::test
