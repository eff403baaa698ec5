// Point-to-point with ranks as threads of this process, over real arenas, rings and doorbells.
//
// A board that all ranks see replaces a Team's mailboxes: it records a group's failure and the
// ranks that have left. Most worlds sleep without slices, so that a lost wake-up makes a test time
// out.
#include "core/messages/point_to_point.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <numeric>
#include <random>
#include <thread>

#include "in_process.h"

namespace dscomm::test {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLong{60'000};

Settings no_slices() {
  Settings settings;
  settings.arena_bytes = 32 << 20;
  settings.sleep_slice_ms = 0;
  return settings;
}

Settings with_slices() {
  Settings settings = no_slices();
  settings.sleep_slice_ms = 5;
  return settings;
}

// Shared state of the members of a group.
class Board {
 public:
  explicit Board(int ranks) : left_(static_cast<size_t>(ranks)) {}

  Status failure() const {
    std::lock_guard lock(mutex_);
    return failure_;
  }
  void abort(const Status& cause) {
    std::lock_guard lock(mutex_);
    if (failure_.ok()) failure_ = cause;
  }
  bool has_left(int rank) const { return left_[static_cast<size_t>(rank)].load(); }
  void leave(int rank) { left_[static_cast<size_t>(rank)].store(true); }

 private:
  mutable std::mutex mutex_;
  Status failure_;
  std::vector<std::atomic<bool>> left_;
};

struct Rank {
  std::shared_ptr<Arena> arena;
  std::unique_ptr<InProcessDirectory> directory;
  PeerAddress address;
  std::unique_ptr<PointToPoint> engine;
};

using GroupPtr = std::shared_ptr<PointToPointGroup>;

class World {
 public:
  explicit World(int ranks, const Settings& settings = no_slices())
      : ranks_(static_cast<size_t>(ranks)) {
    auto registry = std::make_shared<Registry>();
    for (Rank& rank : ranks_) {
      rank.arena = Arena::create(static_cast<size_t>(settings.arena_bytes)).value();
      ArenaId token;
      std::unique_ptr<Doorbell> doorbell = Doorbell::create(&token).value();
      rank.engine = std::make_unique<PointToPoint>(rank.arena, settings, std::move(doorbell));
      rank.directory = std::make_unique<InProcessDirectory>(registry);
      rank.address = rank.directory->publish(rank.arena, nullptr, token).value();
    }
  }

  int size() const { return static_cast<int>(ranks_.size()); }
  Rank& rank(int rank) { return ranks_[static_cast<size_t>(rank)]; }
  PointToPoint& engine(int rank) { return *this->rank(rank).engine; }

  std::shared_ptr<Board> board(uint64_t id) {
    std::lock_guard lock(mutex_);
    std::shared_ptr<Board>& board = boards_[id];
    if (board == nullptr) board = std::make_shared<Board>(size());
    return board;
  }

  // A rank's view of the group of all ranks with this id.
  GroupPtr group(int rank, uint64_t id = 1) {
    auto group = std::make_shared<PointToPointGroup>();
    std::shared_ptr<Board> known = board(id);
    group->id = id;
    group->name = "g" + std::to_string(id);
    group->rank = rank;
    group->ports = ports(id);
    for (Rank& other : ranks_)
      group->peers.push_back(std::make_shared<HostPeerProcess>(
          std::make_shared<Peer>(other.address, other.arena, nullptr)));
    group->failure = [known] { return known->failure(); };
    group->abort = [known](const Status& cause) { known->abort(cause); };
    group->has_left = [known](int member) { return known->has_left(member); };
    group->name_member = [](int member) { return "rank " + std::to_string(member); };
    group->wait.spin_pauses = 20;
    engine(rank).join(group);
    return group;
  }

 private:
  // The ports of all ranks in a group, as formation would assign them.
  std::vector<uint32_t> ports(uint64_t id) {
    std::lock_guard lock(mutex_);
    std::vector<uint32_t>& ports = ports_[id];
    if (ports.empty())
      for (Rank& rank : ranks_) ports.push_back(rank.engine->open_port());
    return ports;
  }

  std::vector<Rank> ranks_;
  std::mutex mutex_;
  std::map<uint64_t, std::shared_ptr<Board>> boards_;
  std::map<uint64_t, std::vector<uint32_t>> ports_;
};

// One rank's end of a group, with the calls that tests make.
struct End {
  End(World& world, int rank, uint64_t id = 1)
      : engine(world.engine(rank)), group(world.group(rank, id)) {}

  OperationPtr send(const std::vector<uint8_t>& data, int dst, int tag = 0,
                    milliseconds timeout = kLong) {
    return engine.send(group, data.data(), data.size(), DType::kUInt8, dst, tag, nullptr, timeout);
  }
  OperationPtr receive(std::vector<uint8_t>& data, int src, int tag = 0,
                       milliseconds timeout = kLong) {
    return engine.receive(group, data.data(), data.size(), DType::kUInt8, src, tag, nullptr,
                          timeout);
  }
  OperationPtr send_number(const int64_t& number, int dst, int tag = 0,
                           milliseconds timeout = kLong) {
    return engine.send(group, &number, 1, DType::kInt64, dst, tag, nullptr, timeout);
  }
  OperationPtr receive_number(int64_t* number, int src, int tag = 0, milliseconds timeout = kLong) {
    return engine.receive(group, number, 1, DType::kInt64, src, tag, nullptr, timeout);
  }
  void leave(World& world) {
    world.board(group->id)->leave(group->rank);
    close();
  }

  void close() { engine.close_port(group->ports[static_cast<size_t>(group->rank)]); }

  PointToPoint& engine;
  GroupPtr group;
};

std::vector<uint8_t> pattern(size_t bytes, uint64_t seed) {
  std::vector<uint8_t> data(bytes);
  uint64_t x = seed * 0x9e3779b97f4a7c15ull + 1;
  for (uint8_t& byte : data) {
    x = x * 6364136223846793005ull + 1442695040888963407ull;
    byte = static_cast<uint8_t>(x >> 56);
  }
  return data;
}

#define EXPECT_OK(operation)                        \
  do {                                              \
    Status status_ = (operation)->wait();           \
    EXPECT_TRUE(status_.ok()) << status_.message(); \
  } while (0)

void expect_failure(const Status& status, Code code, std::initializer_list<const char*> parts) {
  EXPECT_EQ(status.code(), code) << status.message();
  for (const char* part : parts)
    EXPECT_NE(status.message().find(part), std::string::npos)
        << "no '" << part << "' in: " << status.message();
}

void expect_numbers_pass(World& world, int from, int to, uint64_t group) {
  std::thread sender([&] {
    End end(world, from, group);
    for (int64_t n = 0; n < 20; ++n) EXPECT_OK(end.send_number(n, to));
  });
  End end(world, to, group);
  for (int64_t n = 0; n < 20; ++n) {
    int64_t number = -1;
    EXPECT_OK(end.receive_number(&number, from));
    EXPECT_EQ(number, n);
  }
  sender.join();
}

TEST(PointToPoint, MessagesOfEverySizeArriveInBothDirections) {
  // Without a ring of pieces, with the shortest one, and with one that a message does not fill.
  for (int64_t channel_bytes : {4096, 17 * 8192, 4194304}) {
    Settings settings = no_slices();
    settings.channel_bytes = channel_bytes;
    World world(2, settings);
    const std::vector<size_t> sizes = {0,    1,    7,     447,   448,    449,     4095,
                                       4096, 4097, 32704, 32705, 262144, 1 << 20, (5 << 20) + 3};
    run_ranks(2, [&](int rank) {
      End end(world, rank);
      for (size_t bytes : sizes) {
        std::vector<uint8_t> out = pattern(bytes, bytes), in(bytes);
        if (rank == 0) EXPECT_OK(end.send(out, 1, 3));
        OperationPtr receive = end.receive(in, 1 - rank, 3);
        EXPECT_OK(receive);
        EXPECT_EQ(receive->source(), 1 - rank);
        EXPECT_TRUE(in == out) << bytes;
        if (rank == 1) EXPECT_OK(end.send(in, 0, 3));
      }
    });
  }
}

TEST(PointToPoint, ManyRoundsLoseNoWakeUp) {
  World world(2);
  run_ranks(2, [&](int rank) {
    End end(world, rank);
    end.group->wait.spin_pauses = 0;
    end.group->wait.yield_ns = 0;  // sleeps at once
    for (int64_t n = 0; n < 20000; ++n) {
      int64_t number = n;
      if (rank == 0) EXPECT_OK(end.send_number(number, 1));
      EXPECT_OK(end.receive_number(&number, 1 - rank));
      EXPECT_EQ(number, n);
      if (rank == 1) EXPECT_OK(end.send_number(number, 0));
    }
  });
}

TEST(PointToPoint, MessagesOfOneTagArriveInOrderIfTagsAreReceivedOutOfOrder) {
  World world(2);
  run_ranks(2, [&](int rank) {
    End end(world, rank);
    if (rank == 0) {
      for (int64_t n = 0; n < 60; ++n) EXPECT_OK(end.send_number(n, 1, static_cast<int>(n % 3)));
    } else {
      for (int tag : {2, 0, 1})
        for (int64_t n = tag; n < 60; n += 3) {
          int64_t number = -1;
          EXPECT_OK(end.receive_number(&number, 0, tag));
          EXPECT_EQ(number, n);
        }
    }
  });
}

TEST(PointToPoint, ReceiveOfPartlyArrivedLargeMessageCompletes) {
  World world(2);
  run_ranks(2, [&](int rank) {
    End end(world, rank);
    std::vector<uint8_t> large = pattern(3 << 20, 5);
    int64_t number = 7;
    if (rank == 0) {
      OperationPtr first = end.send(large, 1, 1);
      OperationPtr second = end.send_number(number, 1, 2);
      EXPECT_OK(second);
      EXPECT_OK(first);
    } else {
      std::vector<uint8_t> in(large.size());
      number = 0;
      OperationPtr later = end.receive_number(&number, 0, 2);
      std::this_thread::sleep_for(milliseconds(5));
      EXPECT_OK(end.receive(in, 0, 1));
      EXPECT_OK(later);
      EXPECT_TRUE(in == large);
      EXPECT_EQ(number, 7);
    }
  });
}

TEST(PointToPoint, AnySourceReceivesMessagesOfAllRanks) {
  constexpr int kRanks = 4, kEach = 50;
  World world(kRanks);
  run_ranks(kRanks, [&](int rank) {
    End end(world, rank);
    if (rank != 0) {
      for (int64_t n = 0; n < kEach; ++n) EXPECT_OK(end.send_number(n * kRanks + rank, 0));
      return;
    }
    std::vector<int64_t> next(kRanks, 0);
    for (int k = 0; k < (kRanks - 1) * kEach; ++k) {
      int64_t number = -1;
      OperationPtr receive = end.receive_number(&number, -1);
      EXPECT_OK(receive);
      ASSERT_GE(receive->source(), 1);  // -1 if the receive failed
      ASSERT_EQ(number % kRanks, receive->source());
      EXPECT_EQ(number / kRanks, next[static_cast<size_t>(receive->source())]++);
    }
  });
}

TEST(PointToPoint, AnySourceReceivesTheEarliestArrival) {
  World world(3);
  End zero(world, 0);
  for (int sender : {2, 1}) {
    End end(world, sender);
    int64_t number = sender, read = 0;
    EXPECT_OK(end.send_number(number, 0, 0));
    EXPECT_OK(end.send_number(number, 0, 1));
    EXPECT_OK(zero.receive_number(&read, sender, 1));  // so the message before it has arrived
  }
  for (int sender : {2, 1}) {
    int64_t read = 0;
    OperationPtr receive = zero.receive_number(&read, -1, 0);
    EXPECT_OK(receive);
    EXPECT_EQ(read, sender);
    EXPECT_EQ(receive->source(), sender);
  }
}

TEST(PointToPoint, NamedSourceAndAnySourceReceivesMatchInPostingOrder) {
  World world(2);
  End zero(world, 0), one(world, 1);
  for (bool any_first : {true, false}) {
    int64_t first = 0, second = 0, a = 1, b = 2;
    OperationPtr receive_first = zero.receive_number(&first, any_first ? -1 : 1);
    OperationPtr receive_second = zero.receive_number(&second, any_first ? 1 : -1);
    EXPECT_OK(one.send_number(a, 0));
    EXPECT_OK(one.send_number(b, 0));
    EXPECT_OK(receive_second);
    EXPECT_OK(receive_first);
    EXPECT_EQ(first, 1);
    EXPECT_EQ(second, 2);
  }
}

TEST(PointToPoint, BlockingSendsInARingOfRanksDoNotDeadlock) {
  for (int ranks : {2, 3}) {
    World world(ranks);
    run_ranks(ranks, [&](int rank) {
      End end(world, rank);
      int next = (rank + 1) % ranks, before = (rank + ranks - 1) % ranks;
      std::vector<uint8_t> in(8 << 20);
      EXPECT_OK(end.send(pattern(in.size(), static_cast<uint64_t>(rank)), next));
      EXPECT_OK(end.receive(in, before));
      EXPECT_TRUE(in == pattern(in.size(), static_cast<uint64_t>(before)));
    });
  }
}

TEST(PointToPoint, ManySendsBetweenAllPairsArrive) {
  constexpr int kRanks = 4, kEach = 300;
  Settings settings = no_slices();
  settings.channel_bytes = 4096;
  World world(kRanks, settings);
  run_ranks(kRanks, [&](int rank) {
    End end(world, rank);
    std::vector<std::vector<uint8_t>> out, in;
    std::vector<OperationPtr> operations;
    auto size_of = [](int from, int to, int n) {
      return static_cast<size_t>(from * 131 + to * 17 + n * 7) % 1500;
    };
    auto seed_of = [](int from, int to, int n) {
      return static_cast<uint64_t>((from * kRanks + to) * kEach + n);
    };
    for (int n = 0; n < kEach; ++n)
      for (int peer = 0; peer < kRanks; ++peer) {
        if (peer == rank) continue;
        out.push_back(pattern(size_of(rank, peer, n), seed_of(rank, peer, n)));
        in.push_back(std::vector<uint8_t>(size_of(peer, rank, n)));
      }
    size_t next = 0;
    for (int n = 0; n < kEach; ++n)
      for (int peer = 0; peer < kRanks; ++peer)
        if (peer != rank) operations.push_back(end.send(out[next++], peer, n % 5));
    next = 0;
    for (int n = 0; n < kEach; ++n)
      for (int peer = 0; peer < kRanks; ++peer)
        if (peer != rank) operations.push_back(end.receive(in[next++], peer, n % 5));
    for (size_t k = operations.size(); k-- > 0;) EXPECT_OK(operations[k]);
    next = 0;
    for (int n = 0; n < kEach; ++n)
      for (int peer = 0; peer < kRanks; ++peer)
        if (peer != rank) {
          EXPECT_TRUE(in[next++] == pattern(size_of(peer, rank, n), seed_of(peer, rank, n)));
        }
  });
}

// Every rank draws the same list of messages and does its part in its own order.
TEST(PointToPoint, RandomMessagesArriveIntact) {
  constexpr int kRanks = 3, kMessages = 200;
  struct Plan {
    int from, to, tag;
    uint64_t group;
    size_t bytes;
  };
  for (unsigned seed : {1u, 2u, 3u}) {
    Settings settings = no_slices();
    settings.channel_bytes = 8192;
    World world(kRanks, settings);
    std::mt19937 random(seed);
    std::vector<Plan> plans;
    for (int k = 0; k < kMessages; ++k) {
      int from = static_cast<int>(random() % kRanks),
          to = (from + 1 + static_cast<int>(random() % 2)) % kRanks;
      size_t bytes = random() % (random() % 8 == 0 ? 200000 : 600);
      plans.push_back({from, to, static_cast<int>(random() % 4), 1 + random() % 3, bytes});
    }
    run_ranks(kRanks, [&](int rank) {
      std::mt19937 own(seed * 100 + static_cast<unsigned>(rank));
      std::vector<std::vector<uint8_t>> data(kMessages);
      std::vector<OperationPtr> operations(kMessages);
      for (size_t k = 0; k < kMessages; ++k) {
        const Plan& plan = plans[k];
        End end(world, rank, plan.group);
        if (plan.from == rank) {
          data[k] = pattern(plan.bytes, k);
          operations[k] = end.send(data[k], plan.to, plan.tag);
        } else if (plan.to == rank) {
          data[k].resize(plan.bytes);
          operations[k] = end.receive(data[k], plan.from, plan.tag);
        }
        if (operations[k] && own() % 16 == 0 && plan.from == rank) EXPECT_OK(operations[k]);
      }
      for (size_t k = 0; k < kMessages; ++k) {
        if (operations[k] == nullptr) continue;
        EXPECT_OK(operations[k]);
        EXPECT_TRUE(data[k] == pattern(plans[k].bytes, k));
      }
    });
  }
}

TEST(PointToPoint, MessagesOfGroupsOnOneChannelDoNotMix) {
  constexpr uint64_t kGroups = 60;
  World world(2);
  run_ranks(2, [&](int rank) {
    std::vector<End> ends;
    for (uint64_t id = 1; id <= kGroups; ++id) ends.emplace_back(world, rank, id);
    std::vector<int64_t> in(kGroups, -1), out(kGroups);
    std::iota(out.begin(), out.end(), 1000 * rank);
    std::vector<OperationPtr> sends, receives;
    for (size_t k = 0; k < kGroups; ++k) sends.push_back(ends[k].send_number(out[k], 1 - rank));
    for (size_t k = kGroups; k-- > 0;) receives.push_back(ends[k].receive_number(&in[k], 1 - rank));
    for (const OperationPtr& operation : receives) EXPECT_OK(operation);
    for (const OperationPtr& operation : sends) EXPECT_OK(operation);
    for (size_t k = 0; k < kGroups; ++k)
      EXPECT_EQ(in[k], 1000 * (1 - rank) + static_cast<int64_t>(k));
  });
}

TEST(PointToPoint, ThreadsOfOneRankWaitConcurrently) {
  constexpr int kThreads = 3;
  World world(2);
  run_ranks(2 * kThreads, [&](int index) {
    int rank = index / kThreads, tag = index % kThreads;
    End end(world, rank, tag == 0 ? 1 : 2);
    end.group->wait.spin_pauses = tag * 10;
    end.group->wait.yield_ns = 0;
    for (int64_t n = 0; n < 300; ++n) {
      int64_t number = n * kThreads + tag, read = -1;
      if (rank == 0) EXPECT_OK(end.send_number(number, 1, tag));
      EXPECT_OK(end.receive_number(&read, 1 - rank, tag));
      EXPECT_EQ(read, number);
      if (rank == 1) EXPECT_OK(end.send_number(read, 0, tag));
    }
  });
}

TEST(PointToPoint, WorkerFinishesOperationsWithoutWaiters) {
  World world(2);
  End zero(world, 0), one(world, 1);
  std::vector<uint8_t> in(1 << 20), out = pattern(in.size(), 9);
  std::promise<Status> received, sent;
  zero.receive(in, 1)->when_done([&](const Status& status) { received.set_value(status); });
  std::this_thread::sleep_for(milliseconds(20));  // its worker sleeps on the doorbell by now
  one.send(out, 0)->when_done([&](const Status& status) { sent.set_value(status); });
  EXPECT_TRUE(sent.get_future().get().ok());
  EXPECT_TRUE(received.get_future().get().ok());
  EXPECT_TRUE(in == out);
  // Again after the worker has parked, with a callback that makes the next call.
  std::this_thread::sleep_for(milliseconds(40));
  std::promise<Status> second;
  int64_t number = 0, answer = 0, question = 42;
  zero.receive_number(&number, 1)->when_done([&](const Status&) {
    zero.send_number(number, 1)->when_done([&](const Status& status) { second.set_value(status); });
  });
  EXPECT_OK(one.send_number(question, 0));
  EXPECT_OK(one.receive_number(&answer, 0));
  EXPECT_TRUE(second.get_future().get().ok());
  EXPECT_EQ(answer, 42);
}

// Both messages arrive in one poll; the first one's callback waits for the second one.
TEST(PointToPoint, CallbackMayWaitForOtherOperationOfSameBatch) {
  World world(2);
  End zero(world, 0), one(world, 1);
  int64_t first = 0, second = 0, eight = 8, nine = 9;
  OperationPtr one_of_two = zero.receive_number(&first, 1, 1);
  OperationPtr other = zero.receive_number(&second, 1, 2);
  std::promise<Status> heard;
  one_of_two->when_done([&](const Status&) { heard.set_value(other->wait()); });
  std::promise<Status> heard_too;
  other->when_done([&](const Status&) { heard_too.set_value(one_of_two->wait()); });
  EXPECT_OK(one.send_number(eight, 0, 1));
  EXPECT_OK(one.send_number(nine, 0, 2));
  EXPECT_OK(one_of_two);
  EXPECT_TRUE(heard.get_future().get().ok());
  EXPECT_TRUE(heard_too.get_future().get().ok());
  EXPECT_EQ(first + second, 17);
}

TEST(PointToPoint, OperationContinuesAfterTimedOutWait) {
  World world(2);
  End zero(world, 0), one(world, 1);
  int64_t number = 0, seven = 7;
  OperationPtr receive = zero.receive_number(&number, 1);
  expect_failure(
      receive->wait(milliseconds(20)), Code::kTimeout,
      {"timed out after 20 ms, the limit passed to wait(); the call goes on: wait again, "
       "or pass wait() a longer timeout"});
  EXPECT_FALSE(receive->done());
  EXPECT_OK(one.send_number(seven, 0));
  EXPECT_OK(receive);
  EXPECT_EQ(number, 7);
}

TEST(PointToPoint, CompletedSendReleasesItsBuffer) {
  World world(2);
  End zero(world, 0), one(world, 1);
  auto keep = std::make_shared<std::vector<uint8_t>>(pattern(100, 1));
  std::weak_ptr<std::vector<uint8_t>> watched = keep;
  OperationPtr send =
      one.engine.send(one.group, keep->data(), 100, DType::kUInt8, 0, 0, keep, kLong);
  keep.reset();
  EXPECT_OK(send);
  EXPECT_TRUE(watched.expired());
  std::vector<uint8_t> in(100);
  EXPECT_OK(zero.receive(in, 1));
  EXPECT_TRUE(in == pattern(100, 1));
}

TEST(PointToPoint, DifferentCountOrDtypeFailsBothRanks) {
  struct Case {
    size_t sent, received;
    DType sent_as, received_as;
    const char* sent_text;
    const char* received_text;
  };
  const Case cases[] = {{10, 5, DType::kFloat32, DType::kFloat32, "send of float32[10] tag 3",
                         "receive of float32[5] tag 3"},
                        {5, 10, DType::kFloat32, DType::kFloat32, "send of float32[5] tag 3",
                         "receive of float32[10] tag 3"},
                        {4, 4, DType::kFloat32, DType::kInt32, "send of float32[4] tag 3",
                         "receive of int32[4] tag 3"},
                        {0, 1, DType::kFloat32, DType::kFloat32, "send of float32[0] tag 3",
                         "receive of float32[1] tag 3"}};
  for (const Case& c : cases)
    for (bool posted_first : {true, false}) {
      World world(2, with_slices());
      End zero(world, 0), one(world, 1);
      std::vector<float> out(16, 1.0f), in(16, -1.0f);
      int64_t other = 0;
      OperationPtr pending = one.receive_number(&other, 0, 8);  // through it the sender learns of
                                                                // the failure
      auto receive_it = [&] {
        return zero.engine.receive(zero.group, in.data(), c.received, c.received_as, 1, 3, nullptr,
                                   kLong);
      };
      OperationPtr receive;
      if (posted_first) receive = receive_it();
      EXPECT_OK(one.engine.send(one.group, out.data(), c.sent, c.sent_as, 0, 3, nullptr, kLong));
      if (!posted_first) {
        int64_t marker = 1;
        EXPECT_OK(one.send_number(marker, 0, 4));
        EXPECT_OK(zero.receive_number(&marker, 1, 4));
        receive = receive_it();
      }
      for (const Status& status :
           {receive->wait(), pending->wait(), one.send_number(other, 0)->wait()})
        expect_failure(
            status, Code::kMismatch,
            {"send and receive differ: rank 1 made a ", "rank 0", c.sent_text, c.received_text});
      EXPECT_EQ(in, std::vector<float>(16, -1.0f));
    }
}

TEST(PointToPoint, ReceiveWithoutMessageTimesOut) {
  World world(3, with_slices());
  End zero(world, 0);
  int64_t number = 5;
  auto keep = std::make_shared<int>(1);
  std::weak_ptr<int> watched = keep;
  OperationPtr receive = zero.engine.receive(zero.group, &number, 1, DType::kInt64, 1, 2,
                                             std::move(keep), milliseconds(50));
  OperationPtr other = zero.receive_number(&number, 2, 7);
  expect_failure(receive->wait(), Code::kTimeout,
                 {"receive of int64[1] tag 2 timed out after 50 ms: no send with tag 2 has arrived "
                  "at rank 0 from rank 1",
                  ", which is in this process; if rank 1 is only slow"});
  EXPECT_TRUE(watched.expired());
  expect_failure(other->wait(), Code::kTimeout,
                 {"tag 2"});  // a timeout ends the group; later calls see the first cause
  // Later messages are not written, and other groups go on.
  expect_failure(End(world, 1).send_number(number, 0, 2)->wait(), Code::kTimeout, {"tag 2"});
  expect_numbers_pass(world, 1, 0, 2);
  EXPECT_EQ(number, 5);
}

TEST(PointToPoint, WorkerEnforcesTheDeadline) {
  World world(2);
  End zero(world, 0);
  int64_t number = 0;
  std::promise<Status> end;
  OperationPtr patient = zero.receive_number(&number, 1, 1);
  std::this_thread::sleep_for(milliseconds(20));  // the worker sleeps until kLong has passed
  zero.receive_number(&number, 1, 2, milliseconds(30))->when_done([&](const Status& s) {
    end.set_value(s);
  });
  expect_failure(end.get_future().get(), Code::kTimeout, {"tag 2"});
  EXPECT_EQ(patient->wait().code(), Code::kTimeout);
}

TEST(PointToPoint, SendWithoutBufferRoomWaitsForItsReceive) {
  Settings settings = no_slices();
  settings.unexpected_bytes = 0;
  settings.channel_bytes = 4096;
  World world(2, settings);
  End zero(world, 0), one(world, 1);
  std::vector<uint8_t> out = pattern(100'000, 3), in(out.size());
  OperationPtr send = one.send(out, 0);
  int64_t never = 0;
  EXPECT_EQ(zero.receive_number(&never, 1, 9)->wait(milliseconds(30)).code(), Code::kTimeout);
  EXPECT_FALSE(send->done());
  EXPECT_OK(zero.receive(in, 1));
  EXPECT_OK(send);
  EXPECT_TRUE(in == out);
}

TEST(PointToPoint, UnexpectedMessagesAreBoundedAndReleased) {
  Settings settings = with_slices();
  settings.unexpected_bytes = 3000;
  settings.channel_bytes = 4096;
  World world(2, settings);
  run_ranks(2, [&](int rank) {
    End end(world, rank);
    for (int round = 0; round < 20; ++round) {
      // Two messages of 1000 bytes are buffered while a third is awaited; a fourth would not fit.
      std::vector<uint8_t> data(1000);
      if (rank == 0)
        for (int tag : {0, 1, 2})
          EXPECT_OK(end.send(pattern(1000, static_cast<uint64_t>(tag)), 1, tag));
      else
        for (int tag : {2, 0, 1}) {
          EXPECT_OK(end.receive(data, 0, tag));
          EXPECT_TRUE(data == pattern(1000, static_cast<uint64_t>(tag)));
        }
    }
  });
  End zero(world, 0), one(world, 1);
  std::vector<uint8_t> data(1000), late(1000);
  std::vector<OperationPtr> sends;
  for (int tag : {0, 1, 2, 3}) sends.push_back(zero.send(data, 1, tag));
  expect_failure(one.receive(late, 0, 3, milliseconds(60))->wait(), Code::kTimeout,
                 {"tag 3", "DSCOMM_UNEXPECTED_BYTES"});
}

TEST(PointToPoint, ReceiveFromDeadPeerGetsItsLastMessageThenFails) {
  World world(3, with_slices());
  End zero(world, 0), one(world, 1);
  int64_t number = 11, read = 0, never = 0;
  EXPECT_OK(one.send_number(number, 0, 1));
  OperationPtr waiting = zero.receive_number(&never, 2, 5);
  std::this_thread::sleep_for(milliseconds(10));
  EXPECT_FALSE(waiting->done());
  world.rank(1).directory->die();
  EXPECT_OK(zero.receive_number(&read, 1, 1));
  EXPECT_EQ(read, 11);
  expect_failure(zero.receive_number(&never, 1, 1)->wait(), Code::kPeerDied,
                 {"receive of int64[1] tag 1: rank 1 died"});
  EXPECT_EQ(waiting->wait().code(), Code::kPeerDied);
  expect_failure(zero.send_number(number, 1)->wait(), Code::kPeerDied, {"rank 1"});
  // A new group: a send fails at once, and any-source fails once no possible sender is left.
  End later(world, 0, 2);
  expect_failure(later.send_number(number, 1)->wait(), Code::kPeerDied,
                 {"send of int64[1] tag 0: rank 1 died"});
  End last(world, 0, 3);
  OperationPtr any = last.receive_number(&never, -1);
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_FALSE(any->done());  // rank 2 is still there
  End(world, 2, 3).leave(world);
  expect_failure(
      any->wait(), Code::kPeerDied,
      {"rank 1 died", "rank 2 left", "receive of int64[1] tag 0: no other rank is left"});
}

TEST(PointToPoint, SendToDyingPeerFails) {
  Settings settings = with_slices();
  settings.unexpected_bytes = 0;
  World world(2, settings);
  End zero(world, 0);
  std::vector<uint8_t> out(1 << 20);
  OperationPtr send = zero.send(out, 1);
  EXPECT_EQ(send->wait(milliseconds(10)).code(), Code::kTimeout);
  world.rank(1).directory->die();
  expect_failure(send->wait(), Code::kPeerDied, {"send of uint8[1048576]", "rank 1"});
}

TEST(PointToPoint, DepartureOfPeerFailsOnlyOperationsThatNeedPeer) {
  World world(3, with_slices());
  End zero(world, 0), one(world, 1), two(world, 2);
  int64_t number = 21, read = 0;
  EXPECT_OK(one.send_number(number, 0));
  one.leave(world);
  OperationPtr any = zero.receive_number(&read, -1, 4);
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_FALSE(any->done());  // rank 2 is still there
  EXPECT_OK(two.send_number(number, 0, 4));
  EXPECT_OK(any);
  EXPECT_EQ(any->source(), 2);
  read = 0;
  EXPECT_OK(zero.receive_number(&read, 1));
  EXPECT_EQ(read, 21);
  two.leave(world);
  expect_failure(zero.receive_number(&read, -1)->wait(), Code::kPeerLeft,
                 {"receive of int64[1] tag 0: no other rank is left",
                  "rank 1 left the group, rank 2 left the group"});
  expect_failure(zero.receive_number(&read, 1)->wait(), Code::kPeerLeft, {"no other rank is left"});

  End again(world, 0, 2), gone(world, 1, 2);
  gone.leave(world);
  expect_failure(again.receive_number(&read, 1)->wait(), Code::kPeerLeft,
                 {"rank 1", "left the group"});
  End sender(world, 0, 3);
  End(world, 1, 3).leave(world);
  expect_failure(sender.send_number(read, 1)->wait(), Code::kPeerLeft,
                 {"rank 1", "left the group"});
}

// A rank leaves and ends between two checks of it.
TEST(PointToPoint, RankThatLeavesAndExitsDuringCheckCountsAsLeft) {
  World world(2, with_slices());
  End zero(world, 0);
  std::atomic<bool> gone{false};
  zero.group->has_left = [&](int) {
    if (gone.exchange(true)) return true;
    world.rank(1).directory->die();  // after it has left, which this check came too early to see
    return false;
  };
  int64_t number = 0;
  expect_failure(zero.receive_number(&number, 1)->wait(), Code::kPeerLeft,
                 {"rank 1", "left the group"});
}

TEST(PointToPoint, AbortFailsPendingAndLaterOperations) {
  World world(2, with_slices());
  End zero(world, 0);
  int64_t number = 0;
  OperationPtr receive = zero.receive_number(&number, 1);
  std::thread other([&] {
    std::this_thread::sleep_for(milliseconds(20));
    world.board(1)->abort(Status(Code::kAborted, "the user said so"));
  });
  expect_failure(receive->wait(), Code::kAborted, {"the user said so"});
  other.join();
  expect_failure(zero.send_number(number, 1)->wait(), Code::kAborted, {"the user said so"});
}

TEST(PointToPoint, ClosedGroupFailsItsOperationsAndFreesTheChannel) {
  Settings settings = no_slices();
  settings.unexpected_bytes = 100'000;
  settings.channel_bytes = 4096;
  World world(2, settings);
  End zero(world, 0), one(world, 1);
  std::vector<uint8_t> half(50'000), blocked(200'000), in(200'000);
  int64_t number = 0;
  OperationPtr receive = zero.receive_number(&number, 1, 1);
  OperationPtr send = one.send(half, 0, 2);
  EXPECT_EQ(receive->wait(milliseconds(30)).code(), Code::kTimeout);  // takes the first message in
  EXPECT_OK(send);
  OperationPtr stuck = one.send(blocked, 0, 3);  // too long to be buffered: it fills the ring
  EXPECT_EQ(stuck->wait(milliseconds(30)).code(), Code::kTimeout);
  one.close();
  expect_failure(stuck->wait(), Code::kAborted, {"group 'g1'"});
  EXPECT_FALSE(receive->done());
  zero.close();
  expect_failure(receive->wait(), Code::kAborted, {"group 'g1'"});
  expect_failure(zero.receive_number(&number, 1)->wait(), Code::kAborted,
                 {"group 'g1'", "destroyed"});
  // The partly sent message is removed, buffered ones are dropped, and the channel serves others.
  expect_numbers_pass(world, 1, 0, 2);
  expect_numbers_pass(world, 0, 1, 2);
  End again(world, 0, 2), sender(world, 1, 2);
  OperationPtr large = sender.send(blocked, 0);
  EXPECT_OK(again.receive(in, 1));
  EXPECT_OK(large);
}

TEST(PointToPoint, ClosedGroupWakesWaitingThreads) {
  World world(2);
  End zero(world, 0);
  int64_t numbers[2] = {};
  OperationPtr receives[2] = {zero.receive_number(&numbers[0], 1, 0),
                              zero.receive_number(&numbers[1], 1, 1)};
  // One of them sleeps on the doorbell, the other until the first has made progress.
  std::thread waiting[2];
  for (int k : {0, 1})
    waiting[k] = std::thread([&, k] {
      expect_failure(receives[k]->wait(), Code::kAborted, {"group 'g1'", "destroyed"});
    });
  std::this_thread::sleep_for(milliseconds(20));
  zero.close();
  for (std::thread& thread : waiting) thread.join();
}

TEST(PointToPoint, CloseDuringSendHasSameOutcomeOnBothRanks) {
  Settings settings = with_slices();
  settings.channel_bytes = 4096;
  World world(2, settings);
  End zero(world, 0), one(world, 1);
  std::vector<uint8_t> out(1 << 20), in(out.size());
  OperationPtr receive = zero.receive(in, 1);
  OperationPtr send = one.send(out, 0);
  // The worker may or may not have moved all of it by now: both outcomes are right.
  one.close();
  Status sent = send->wait(), received = receive->wait();
  EXPECT_EQ(sent.ok(), received.ok()) << sent.message() << received.message();
  if (!received.ok()) expect_failure(received, Code::kAborted, {"rank 1", "half-way"});
}

TEST(PointToPoint, CloseDropsMessagesOfGroupUnusedOnThisRank) {
  Settings settings = no_slices();
  settings.unexpected_bytes = 4000;
  World world(2, settings);
  for (uint64_t id = 10; id < 30; ++id) {
    End one(world, 1, id), other(world, 1, 2), zero(world, 0, 2);
    EXPECT_OK(one.send(pattern(3000, id), 0));
    int64_t number = 1, read = 0;
    EXPECT_OK(other.send_number(number, 0));
    EXPECT_OK(zero.receive_number(&read, 1));
    End(world, 0, id).close();
  }
}

TEST(PointToPoint, ChannelOfDeadPeerIsFreed) {
  Settings settings = no_slices();
  settings.channel_bytes = 1 << 20;
  World world(3, settings);
  constexpr size_t kBuffers = kRingCells * kPageBytes, kOfChannel = kBuffers + (1 << 20);
  size_t before = world.rank(0).arena->used_bytes();
  expect_numbers_pass(world, 0, 1, 1);
  expect_numbers_pass(world, 0, 2, 1);
  const size_t small = world.rank(0).arena->used_bytes() - before;
  EXPECT_LT(small, kBuffers);  // buffers are allocated for the first message that needs them
  for (int peer : {1, 2}) {
    End zero(world, 0, 3), other(world, peer, 3);
    for (size_t bytes : {size_t{1000}, kPageBytes + 1}) {
      std::vector<uint8_t> out(bytes), in(bytes);
      EXPECT_OK(zero.send(out, peer));
      EXPECT_OK(other.receive(in, 0));
    }
  }
  size_t with_two = world.rank(0).arena->used_bytes();
  EXPECT_EQ(with_two - before - small, 2 * kOfChannel);
  End(world, 0, 3).close();
  world.rank(1).directory->die();
  End(world, 0, 2).close();
  EXPECT_EQ(world.rank(0).arena->used_bytes(), with_two);  // group 1 uses it too
  End(world, 0, 1).close();
  size_t with_one = world.rank(0).arena->used_bytes();
  EXPECT_EQ(with_two - with_one, kOfChannel + kPageBytes);  // the cells are half a page
  world.rank(2).directory->die();
  End(world, 0, 4).close();  // also frees rank 2's channel
  EXPECT_LT(world.rank(0).arena->used_bytes(), with_one);
}

TEST(PointToPoint, CorruptPeerMemoryIsAnInternalError) {
  auto corrupt = [](const std::function<void(ChannelEntry*, Cell*)>& change, const char* part,
                    size_t bytes = 8) {
    World world(2, with_slices());
    End zero(world, 0), one(world, 1);
    const std::vector<uint8_t> out(bytes, 1);
    std::vector<uint8_t> in(bytes, 0);
    EXPECT_OK(one.send(out, 0));
    Peer peer(world.rank(1).address, world.rank(1).arena, nullptr);
    auto* entry = const_cast<ChannelEntry*>(find_channel_entry(peer, world.rank(0).arena->id()));
    ASSERT_NE(entry, nullptr);
    change(entry, reinterpret_cast<Cell*>(world.rank(1).arena->data() + entry->cells_offset));
    expect_failure(zero.receive(in, 1)->wait(), Code::kInternal, {part});
    EXPECT_EQ(in, std::vector<uint8_t>(bytes, 0));
  };
  corrupt([](ChannelEntry*, Cell* cell) { cell->number.store(1000); }, "counts cells");
  corrupt([](ChannelEntry* entry, Cell*) { entry->cells_offset = uint64_t{1} << 62; },
          "outside its memory");
  corrupt([](ChannelEntry* entry, Cell*) { entry->buffers_offset = uint64_t{1} << 62; },
          "outside its memory", 1000);
  corrupt([](ChannelEntry* entry, Cell*) { entry->pieces_offset = uint64_t{1} << 62; },
          "outside its memory", 10000);
  corrupt([](ChannelEntry* entry, Cell*) { entry->pieces_bytes = uint64_t{1} << 62; },
          "outside its memory", 10000);
  corrupt([](ChannelEntry*, Cell* cell) { cell->header.cell_bytes = 1 << 30; }, "overflows", 10000);
  corrupt([](ChannelEntry*, Cell* cell) { cell->header.cell_bytes = 16; }, "does not fit");
  corrupt([](ChannelEntry*, Cell* cell) { cell->header.sequence = 5; }, "out of order");
  corrupt([](ChannelEntry*, Cell* cell) { cell->header.port = 1000; }, "never opened");
  corrupt([](ChannelEntry*, Cell* cell) { cell->header.group = 1000; }, "another group");
  corrupt([](ChannelEntry*, Cell* cell) { cell->header.source = 0; },
          "says that it is from rank 0");
}

TEST(PointToPoint, InvalidArgumentsAreRefusedWithoutHarm) {
  World world(2);
  End zero(world, 0);
  int64_t number = 0;
  expect_failure(zero.send_number(number, 0)->status(), Code::kInvalidArgument,
                 {"send", "this rank itself"});
  expect_failure(zero.send_number(number, 2)->status(), Code::kInvalidArgument,
                 {"destination 2", "which has 2"});
  expect_failure(zero.send_number(number, -1)->status(), Code::kInvalidArgument,
                 {"destination -1"});
  expect_failure(zero.receive_number(&number, -2)->status(), Code::kInvalidArgument, {"source -2"});
  expect_failure(zero.receive_number(nullptr, 1)->status(), Code::kInvalidArgument, {"null"});
  OperationPtr huge =
      zero.engine.send(zero.group, &number, SIZE_MAX / 4, DType::kInt64, 1, 0, nullptr, kLong);
  expect_failure(huge->status(), Code::kInvalidArgument, {"more than memory holds"});
  OperationPtr unknown =
      zero.engine.send(zero.group, &number, 1, static_cast<DType>(77), 1, 0, nullptr, kLong);
  expect_failure(unknown->status(), Code::kInvalidArgument, {"unknown(77)"});
  expect_numbers_pass(world, 0, 1, 1);
}

// Two processes, each with a read-only mapping of the other's arena.
TEST(PointToPoint, MessagesBetweenProcessesArriveUntilOneDies) {
  int sockets[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets), 0);
  constexpr int64_t kRounds = 500;
  pid_t child = fork();
  ASSERT_GE(child, 0);
  const int rank = child == 0 ? 1 : 0;
  close(sockets[1 - rank]);

  Settings settings = child == 0 ? no_slices() : with_slices();
  std::shared_ptr<Arena> arena = Arena::create(static_cast<size_t>(settings.arena_bytes)).value();
  ArenaId token;
  auto doorbell = Doorbell::create(&token).value();
  PointToPoint engine(arena, settings, std::move(doorbell));
  SocketDirectory directory;
  PeerAddress own = directory.publish(arena, nullptr, token).value(), other;
  bool met = write(sockets[rank], &own, sizeof own) == sizeof own &&
             read(sockets[rank], &other, sizeof other) == sizeof other;
  Directory::Attached attached = directory.attach(other, Deadline::after(kLong));
  met &= attached.peer != nullptr;
  char ready = 1;
  met &= write(sockets[rank], &ready, 1) == 1 && read(sockets[rank], &ready, 1) == 1;

  if (!met && child == 0) _exit(2);
  ASSERT_TRUE(met) << attached.why_not;

  Board board(2);
  auto group = std::make_shared<PointToPointGroup>();
  group->id = 1;
  group->name = "g1";
  group->rank = rank;
  group->ports = {engine.open_port(), engine.open_port()};  // the same in both processes
  group->peers = {std::make_shared<HostPeerProcess>(std::make_shared<Peer>(own, arena, nullptr)),
                  std::make_shared<HostPeerProcess>(attached.peer)};
  if (rank == 1) std::swap(group->peers[0], group->peers[1]);
  group->failure = [&] { return board.failure(); };
  group->abort = [&](const Status& cause) { board.abort(cause); };
  group->has_left = [](int) { return false; };
  group->name_member = [&](int member) {
    return group->peers[static_cast<size_t>(member)]->describe();
  };
  engine.join(group);
  std::vector<uint8_t> large = pattern(1 << 20, 4);
  auto number_call = [&](int64_t* number, bool sending) {
    OperationPtr call =
        sending ? engine.send(group, number, 1, DType::kInt64, 1 - rank, 0, nullptr, kLong)
                : engine.receive(group, number, 1, DType::kInt64, 1 - rank, 0, nullptr, kLong);
    return call->wait().ok();
  };
  bool good = true;
  for (int64_t n = 0; good && n < kRounds; ++n) {
    int64_t number = n;
    if (n % 50 == 0)
      std::this_thread::sleep_for(milliseconds(rank));  // so that the other one
                                                        // sleeps
    good = number_call(&number, rank == 0) && number_call(&number, rank == 1);
    good &= number == n;
  }
  if (child == 0) {
    good &= engine.send(group, large.data(), large.size(), DType::kUInt8, 0, 1, nullptr, kLong)
                ->wait()
                .ok();
    _exit(good ? 0 : 1);  // without leaving the group
  }
  EXPECT_TRUE(good);
  std::vector<uint8_t> in(large.size());
  auto receive = [&] {
    return engine.receive(group, in.data(), in.size(), DType::kUInt8, 1, 1, nullptr, kLong)->wait();
  };
  EXPECT_TRUE(receive().ok());
  EXPECT_TRUE(in == large);
  expect_failure(receive(), Code::kPeerDied, {("pid " + std::to_string(child)).c_str(), "died"});
  int ended = 0;
  ASSERT_EQ(waitpid(child, &ended, 0), child);
  EXPECT_EQ(ended, 0);
  close(sockets[rank]);
}

TEST(PointToPoint, FullArenaIsAResourceError) {
  Settings settings = with_slices();
  settings.arena_bytes = 1 << 20;
  World world(24, settings);
  End zero(world, 0);
  Status status;
  for (int peer = 1; peer < world.size() && status.ok(); ++peer)
    status = zero.send(pattern(5000, 1), peer)->wait();
  expect_failure(status, Code::kResource, {"DSCOMM_ARENA_BYTES"});
}

TEST(PointToPoint, ShortRingIsUsedIfLongRingDoesNotFit) {
  Settings settings = no_slices();
  settings.arena_bytes = 2 << 20;
  settings.channel_bytes = 4 << 20;
  World world(2, settings);
  run_ranks(2, [&](int rank) {
    End end(world, rank);
    const std::vector<uint8_t> out = pattern(1 << 20, 1);
    std::vector<uint8_t> in(out.size());
    if (rank == 0) {
      EXPECT_OK(end.send(out, 1));
    } else {
      EXPECT_OK(end.receive(in, 0));
      EXPECT_TRUE(in == out);
    }
  });
}

// Collectives need room in the arena too: random program 1795450404012 failed because three rings
// of full length had filled it.
TEST(PointToPoint, RingsLeaveRoomInTheArena) {
  constexpr int kRanks = 6;
  Settings settings = no_slices();
  settings.arena_bytes = 16 << 20;
  settings.channel_bytes = 4 << 20;
  World world(kRanks, settings);
  run_ranks(kRanks, [&](int rank) {
    End end(world, rank);
    const std::vector<uint8_t> out = pattern(1 << 20, 1);
    if (rank == 0) {
      for (int peer = 1; peer < kRanks; ++peer) EXPECT_OK(end.send(out, peer));
      return;
    }
    std::vector<uint8_t> in(out.size());
    EXPECT_OK(end.receive(in, 0));
    EXPECT_TRUE(in == out);
  });
  Arena& arena = *world.rank(0).arena;
  EXPECT_LE(arena.used_bytes(), arena.size() * 3 / 4);
  EXPECT_TRUE(arena.lend(1 << 20, {}).ok());
}

}  // namespace
}  // namespace dscomm::test
