// StoreExchange with ranks as threads: decisions, first failures, and removal of keys.
#include "core/store/store_exchange.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "in_process.h"

namespace dscomm::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

ExchangeRequest request_of(int rank, int size) {
  ExchangeRequest request;
  request.prefix = "x/";
  request.rank = rank;
  request.size = size;
  request.name = [](int other) { return "rank " + std::to_string(other); };
  return request;
}

Result<std::string> joined(const std::vector<std::string>& said) {
  std::string all;
  for (const std::string& one : said) all += one;
  return all;
}

TEST(StoreExchange, AgreeReturnsOneDecisionAndLeavesNoKeys) {
  for (int size : {1, 2, 5}) {
    MemoryStore store;
    run_ranks(size, [&](int rank) {
      const Deadline deadline = Deadline::after(seconds(60));
      StoreExchange exchange(store, request_of(rank, size), deadline);
      std::string all;
      for (int other = 0; other < size; ++other) all += std::to_string(other);
      for (const char* step : {"one", "two", "three"})
        EXPECT_EQ(exchange.agree(step, std::to_string(rank), joined).value(), all);
      exchange.finish();
    });
    EXPECT_EQ(store.keys(), std::vector<std::string>());
  }
}

// The first key that is asked for arrives while the answer is in transit.
class LateStore final : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  Result<bool> has(const std::string& key) override {
    if (asked_.exchange(true)) return store_.has(key);
    std::this_thread::sleep_for(milliseconds(150));
    static_cast<void>(store_.set(key, "late"));
    return false;
  }

 private:
  std::atomic<bool> asked_{false};
};

TEST(StoreExchange, EntryAtTheDeadlineIsAccepted) {
  MemoryStore store;
  LateStore late(store);
  const Deadline deadline = Deadline::after(milliseconds(100));
  StoreExchange exchange(late, request_of(0, 2), deadline);
  const Result<std::string> agreed = exchange.agree("one", "0", joined);
  ASSERT_TRUE(agreed.ok()) << agreed.status().message();
  EXPECT_EQ(agreed.value(), "0late");
}

TEST(StoreExchange, FailureReachesAllRanks) {
  MemoryStore store;
  run_ranks(4, [&](int rank) {
    const Deadline deadline = Deadline::after(seconds(60));
    StoreExchange exchange(store, request_of(rank, 4), deadline);
    ASSERT_TRUE(exchange.agree("one", "", joined).ok());
    Status status;
    if (rank == 2)
      status = exchange.fail(Status(Code::kResource, "no thread is left"));
    else if (rank == 3)
      while (status.ok()) status = exchange.check();  // while it does other work
    else
      status = exchange.agree("two", "", joined).status();
    EXPECT_EQ(status.code(), Code::kResource);
    EXPECT_EQ(status.message(), "no thread is left");
    EXPECT_EQ(exchange.has_read_failure(), rank != 2);
  });
}

TEST(StoreExchange, RejectionByRankZeroReachesAllRanks) {
  MemoryStore store;
  run_ranks(3, [&](int rank) {
    const Deadline deadline = Deadline::after(seconds(60));
    StoreExchange exchange(store, request_of(rank, 3), deadline);
    const Status status =
        exchange
            .agree("one", "",
                   [](const auto&) { return Status(Code::kMismatch, "they do not fit"); })
            .status();
    EXPECT_EQ(status.code(), Code::kMismatch);
    EXPECT_EQ(status.message(), "they do not fit");
  });
}

// Concurrent failures: all ranks raise the same one.
TEST(StoreExchange, FirstFailureWins) {
  for (int round = 0; round < 50; ++round) {
    MemoryStore store;
    std::vector<std::string> raised(4);
    run_ranks(4, [&](int rank) {
      const Deadline deadline = Deadline::after(seconds(60));
      StoreExchange exchange(store, request_of(rank, 4), deadline);
      const Status status =
          rank == 0 ? exchange.agree("one", "", joined).status()
                    : exchange.fail(Status(Code::kInternal, "of " + std::to_string(rank)));
      raised[static_cast<size_t>(rank)] = status.message();
    });
    for (const std::string& text : raised) EXPECT_EQ(text, raised[0]);
  }
}

// A death reported while rank 0 decides fails the step on all ranks or on none.
TEST(StoreExchange, DeathDuringDecisionHasSameOutcomeOnAllRanks) {
  for (int round = 0; round < 200; ++round) {
    MemoryStore store;
    std::atomic<bool> is_dead{false};
    std::atomic<int> passed{0};
    run_ranks(4, [&](int rank) {
      const Deadline deadline = Deadline::after(seconds(60));
      ExchangeRequest request = request_of(rank, 4);
      request.check = [&is_dead] {
        return is_dead ? Status(Code::kPeerDied, "rank 9 died") : Status();
      };
      StoreExchange exchange(store, request, deadline);
      const Result<std::string> result = exchange.agree("one", "", [&](const auto& said) {
        is_dead = true;
        return joined(said);
      });
      if (result.ok())
        ++passed;
      else
        EXPECT_EQ(result.status().message(), "rank 9 died");
    });
    EXPECT_TRUE(passed == 0 || passed == 4) << passed;
  }
}

// A death after the decision does not fail the step.
TEST(StoreExchange, DecisionIsReadAfterRankZeroDied) {
  MemoryStore store;
  std::atomic<bool> is_dead{false};
  run_ranks(2, [&](int rank) {
    const Deadline deadline = Deadline::after(seconds(60));
    ExchangeRequest request = request_of(rank, 2);
    request.check = [&] {
      if (rank == 0) return Status();
      while (!is_dead) std::this_thread::yield();
      return Status(Code::kPeerDied, "rank 0 died");
    };
    StoreExchange exchange(store, request, deadline);
    EXPECT_TRUE(exchange.agree("one", "", joined).ok());
    if (rank == 0) is_dead = true;
  });
}

TEST(StoreExchange, TimeoutNamesTheMissingRank) {
  MemoryStore store;
  run_ranks(4, [&](int rank) {
    if (rank == 2) return;
    const Deadline deadline = Deadline::after(milliseconds(1000));
    ExchangeRequest request = request_of(rank, 4);
    request.timeout_hint = [] { return "; it snows"; };
    StoreExchange exchange(store, request, deadline);
    const Status status = exchange.agree("one", "", joined).status();
    EXPECT_EQ(status.code(), Code::kTimeout);
    EXPECT_EQ(status.message(), "timed out after 1 s waiting for rank 2; it snows");
  });
}

TEST(StoreExchange, TimeoutNamesMissingRankZero) {
  MemoryStore store;
  run_ranks(3, [&](int rank) {
    if (rank == 0) return;
    const Deadline deadline = Deadline::after(milliseconds(100));
    StoreExchange exchange(store, request_of(rank, 3), deadline);
    const Status status = exchange.agree("one", "", joined).status();
    EXPECT_EQ(status.code(), Code::kTimeout);
    EXPECT_NE(status.message().find("waiting for rank 0"), std::string::npos) << status.message();
  });
}

TEST(StoreExchange, RestartAllEndsTheStepOnAllRanks) {
  MemoryStore store;
  run_ranks(3, [&](int rank) {
    const Deadline deadline = Deadline::after(seconds(60));
    StoreExchange* mine = nullptr;
    ExchangeRequest request = request_of(rank, 3);
    request.check = [&] {
      if (rank == 0 && mine->awaited() == 2) mine->restart_all();
      return Status();
    };
    StoreExchange exchange(store, request, deadline);
    mine = &exchange;
    if (rank == 2)
      while (exchange.check().ok()) continue;
    else
      EXPECT_FALSE(exchange.agree("one", "", joined).ok());
    EXPECT_TRUE(exchange.is_restarted());
  });
}

TEST(StoreExchange, MalformedFailureIsReported) {
  MemoryStore store;
  const Deadline deadline = Deadline::after(seconds(60));
  StoreExchange exchange(store, request_of(1, 2), deadline);
  ASSERT_TRUE(exchange.publish("failed", "rubbish").ok());
  EXPECT_EQ(exchange.agree("one", "", joined).status().code(), Code::kInternal);
}

}  // namespace
}  // namespace dscomm::test
