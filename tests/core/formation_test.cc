// Formation with ranks as threads: missing ranks, disagreement on the members, and stale keys of
// earlier processes.
#include "core/formation/formation.h"

#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <future>
#include <latch>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/base/memory_limit.h"
#include "in_process.h"
#include "shm_ranks.h"

namespace dscomm::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// Ranks that do not know their hosts; two ranks per host; the same with relayed member tables.
struct RanksPerHost {
  int count;
  bool relays;
};
class FormationOf : public ::testing::TestWithParam<RanksPerHost> {
 protected:
  FormationOf() {
    RankParty::default_per_host = GetParam().count;
    RankParty::default_relays = GetParam().relays;
  }
  ~FormationOf() override {
    RankParty::default_per_host = 1;
    RankParty::default_relays = false;
  }
};
INSTANTIATE_TEST_SUITE_P(RanksPerHost, FormationOf,
                         ::testing::Values(RanksPerHost{1, false}, RanksPerHost{2, false},
                                           RanksPerHost{2, true}),
                         [](const auto& info) {
                           return std::to_string(info.param.count) +
                                  (info.param.relays ? "Relay" : "");
                         });

TEST_P(FormationOf, MemoryCheckCountsRanksOfThisHost) {
  for (bool same_host : {false, true}) {
    auto registry = std::make_shared<Registry>();
    MemoryStore store;
    Settings settings = small_settings();
    // Room for one rank's staging, not for four.
    settings.staging_bytes = memory_limit().available_bytes / 3 / 4096 * 4096;
    settings.arena_bytes = 4 * settings.staging_bytes + (1 << 20);
    run_ranks(4, [&](int rank) {
      RankParty party(registry, settings);
      party.host_identity = same_host ? "one" : "host" + std::to_string(rank);
      Result<Formation> formation = party.form(store, rank, 4);
      EXPECT_EQ(formation.ok(), !same_host) << (formation.ok() ? "" : formation.status().message());
      if (formation.ok()) return;
      EXPECT_EQ(formation.status().code(), Code::kResource);
      EXPECT_NE(formation.status().message().find("4 ranks on this host need"), std::string::npos)
          << formation.status().message();
    });
  }
}

TEST_P(FormationOf, TimeoutNamesTheMissingRank) {
  auto registry = std::make_shared<Registry>();
  MemoryStore store;
  run_ranks(3, [&](int rank) {
    if (rank == 1) return;
    RankParty party(registry, small_settings());
    Result<Formation> formation = party.form(store, rank, 3, "test", milliseconds(200));
    ASSERT_FALSE(formation.ok());
    EXPECT_EQ(formation.status().code(), Code::kTimeout);
    EXPECT_NE(formation.status().message().find("rank 1"), std::string::npos)
        << formation.status().message();
  });
}

// A store whose first answer takes this long, as if the process were stopped meanwhile.
class SlowFirstReadStore final : public ForwardingStore {
 public:
  SlowFirstReadStore(Store& store, milliseconds pause) : ForwardingStore(store), pause_(pause) {}

  Result<bool> has(const std::string& key) override {
    Result<bool> there = store_.has(key);
    if (!was_slow_) {
      was_slow_ = true;
      std::this_thread::sleep_for(pause_);
      answered.set_value();
    }
    return there;
  }
  std::promise<void> answered;

 private:
  const milliseconds pause_;
  bool was_slow_ = false;
};

TEST_P(FormationOf, DeadlinePassedDuringStoreCallLeavesOneSecondForOtherRanks) {
  auto registry = std::make_shared<Registry>();
  MemoryStore store;
  SlowFirstReadStore slow(store, milliseconds(1600));
  run_ranks(2, [&](int rank) {
    RankParty party(registry, small_settings());
    if (rank == 1) slow.answered.get_future().wait();
    // Rank 0 reads after 100 ms, or a few hundred later on a busy machine.
    Result<Formation> formation =
        rank == 0 ? party.form(slow, 0, 2, "test", milliseconds(1000)) : party.form(store, 1, 2);
    EXPECT_TRUE(formation.ok()) << formation.status().message();
  });
}

// Global rank 0 passes [0, 1] and global rank 1 passes [1, 2]: both are rank 0 of one group.
TEST_P(FormationOf, DifferentMemberListsFailAtOnce) {
  auto registry = std::make_shared<Registry>();
  MemoryStore store;
  run_ranks(2, [&](int rank) {
    RankParty party(registry, small_settings());
    Result<Formation> formation =
        party.form(store, 0, 2, "test", std::chrono::seconds(60), {rank, rank + 1});
    ASSERT_FALSE(formation.ok());
    EXPECT_EQ(formation.status().code(), Code::kMismatch);
    EXPECT_NE(formation.status().message().find("0, 1"), std::string::npos)
        << formation.status().message();
    EXPECT_NE(formation.status().message().find("1, 2"), std::string::npos)
        << formation.status().message();
  });
}

// Also if their entries look like those of an earlier attempt.
class RanksThatCannotShareMemory : public ::testing::TestWithParam<int64_t> {};

TEST_P(RanksThatCannotShareMemory, AreRefusedOnAllRanks) {
  auto here = std::make_shared<Registry>(), elsewhere = std::make_shared<Registry>();
  MemoryStore store;
  run_ranks(3, [&](int rank) {
    RankParty party(rank == 2 ? elsewhere : here, small_settings());
    if (GetParam() != 0) party.began_ns = GetParam();
    Result<Formation> formation = party.form(store, rank, 3);
    ASSERT_FALSE(formation.ok());
    EXPECT_EQ(formation.status().code(), Code::kUnsupported);
    EXPECT_NE(formation.status().message().find("cannot share memory"), std::string::npos)
        << formation.status().message();
  });
}

INSTANTIATE_TEST_SUITE_P(Began, RanksThatCannotShareMemory,
                         ::testing::Values(0, std::numeric_limits<int64_t>::max()));

// Rank 0 failed in this attempt, so the late rank does not wait for another one.
TEST_P(FormationOf, LateRankAfterMismatchFailsAtOnce) {
  auto registry = std::make_shared<Registry>();
  MemoryStore store;
  std::barrier gave_up(3);
  run_ranks(3, [&](int rank) {
    RankParty party(registry, small_settings());
    if (rank == 2) gave_up.arrive_and_wait();
    Result<Formation> formation =
        rank == 1 ? party.form(store, 1, 2, "test", std::chrono::seconds(60), {0, 1})
                  : party.form(store, rank, 3, "test",
                               rank == 2 ? milliseconds(300) : milliseconds(60'000), {0, 1, 2});
    if (rank != 2) gave_up.arrive_and_wait();
    ASSERT_FALSE(formation.ok());
    EXPECT_EQ(formation.status().code(), Code::kMismatch) << formation.status().message();
  });
}

// The late rank fails at once, and the errors name only absent ranks.
TEST_P(FormationOf, LateRankAfterTimeoutReportsTheCause) {
  auto registry = std::make_shared<Registry>();
  MemoryStore store;
  std::barrier gave_up(3);
  run_ranks(3, [&](int rank) {
    RankParty party(registry, small_settings());
    if (rank == 0) gave_up.arrive_and_wait();
    Result<Formation> formation =
        party.form(store, rank, 3, "test", milliseconds(rank == 0 ? 60'000 : 200));
    ASSERT_FALSE(formation.ok());
    EXPECT_EQ(formation.status().code(), Code::kTimeout);
    const std::string& text = formation.status().message();
    EXPECT_NE(text.find("waiting for rank 0"), std::string::npos) << text;
    EXPECT_EQ(text.find("rank 0, rank"), std::string::npos) << text;
    EXPECT_EQ(text.find("has already given up") != std::string::npos, rank == 0) << text;
    if (rank != 0) gave_up.arrive_and_wait();
  });
}

// The store of a process that crashes after it has put this many values.
class CrashingStore final : public Store {
 public:
  CrashingStore(Store& store, int values) : store_(store), values_left_(values) {}
  Status set(const std::string& key, std::string_view value) override {
    return values_left_-- > 0 ? store_.set(key, value) : crashed();
  }
  Result<std::string> get(const std::string& key, const Deadline& deadline) override {
    return values_left_ > 0 ? store_.get(key, deadline) : crashed();
  }
  Result<bool> has(const std::string& key) override {
    return values_left_ > 0 ? store_.has(key) : crashed();
  }
  Result<int64_t> add(const std::string& key, int64_t amount) override {
    return values_left_ > 0 ? store_.add(key, amount) : crashed();
  }
  Status remove(const std::string&) override { return crashed(); }

 private:
  static Status crashed() { return Status(Code::kResource, "the process has crashed"); }
  Store& store_;
  int values_left_;
};

// A process that puts its entry into the store and crashes.
void crash(Store& store, const std::shared_ptr<Registry>& registry, int rank, int size,
           const std::string& host = "") {
  CrashingStore last(store, 1);
  RankParty party(registry, small_settings());
  party.host_identity = host;
  party.per_host = 1;
  EXPECT_FALSE(party.form(last, rank, size).ok());
}

TEST_P(FormationOf, SuccessLeavesNoKeys) {
  for (bool same_host : {false, true}) {
    auto registry = std::make_shared<Registry>();
    MemoryStore store;
    run_ranks(4, [&](int rank) {
      RankParty party(registry, small_settings());
      if (!same_host) party.host_identity = std::to_string(rank / 2);
      for (int round = 0; round < 3; ++round) EXPECT_TRUE(party.form(store, rank, 4).ok());
    });
    EXPECT_EQ(store.keys(), std::vector<std::string>());
  }
}

// A rank on another host cannot see the predecessor's death.
TEST_P(FormationOf, RestartedRankReplacesItsPredecessor) {
  for (int victim : {0, 1, 2}) {
    for (const char* host : {"", "elsewhere"}) {
      auto registry = std::make_shared<Registry>();
      MemoryStore store;
      crash(store, registry, victim, 3, host);
      const int64_t began_ns = wall_clock_ns();
      run_ranks(3, [&](int rank) {
        RankParty party(registry, small_settings());
        party.began_ns = began_ns;
        if (rank == victim) std::this_thread::sleep_for(milliseconds(300));
        Result<Formation> formation = party.form(store, rank, 3);
        ASSERT_TRUE(formation.ok()) << victim << host << ": " << formation.status().message();
        EXPECT_EQ(formation.value().host_count, 1);
        EXPECT_NE(formation.value().members[static_cast<size_t>(victim)].peer, nullptr);
      });
    }
  }
}

TEST_P(FormationOf, FormationSucceedsInStoreOfCrashedWorldOfOtherSize) {
  auto registry = std::make_shared<Registry>();
  MemoryStore store;
  for (int size : {3, 2, 3, 4, 2}) {
    for (int rank = 1; rank < size; ++rank) crash(store, registry, rank, size);
    const int next = size == 2 ? 3 : 2;
    const int64_t began_ns = wall_clock_ns();
    run_ranks(next, [&](int rank) {
      RankParty party(registry, small_settings());
      party.began_ns = began_ns;
      std::this_thread::sleep_for(milliseconds(50 * rank));
      Result<Formation> formation = party.form(store, rank, next);
      EXPECT_TRUE(formation.ok()) << size << ": " << formation.status().message();
    });
  }
}

// No successor follows.
TEST_P(FormationOf, ErrorNamesRankThatCrashedAfterItsEntry) {
  auto registry = std::make_shared<Registry>();
  MemoryStore store;
  crash(store, registry, 1, 2);
  RankParty party(registry, small_settings());
  Result<Formation> formation = party.form(store, 0, 2);
  ASSERT_FALSE(formation.ok());
  EXPECT_NE(formation.status().message().find("rank 1 (pid"), std::string::npos)
      << formation.status().message();
}

TEST_P(FormationOf, FailureOfAnEarlierAttemptIsIgnored) {
  auto registry = std::make_shared<Registry>();
  MemoryStore store;
  FormationRequest request;
  request.prefix = "test/";
  request.name = "test";
  request.size = 3;
  for (int rank : {0, 2}) {
    request.rank = rank;
    CrashingStore last(store, 3);
    decline_group(last, request, Status(Code::kResource, "no thread is left"),
                  Deadline::after(seconds(1)));
  }
  EXPECT_NE(store.keys(), std::vector<std::string>());
  const int64_t began_ns = wall_clock_ns();
  run_ranks(3, [&](int rank) {
    RankParty party(registry, small_settings());
    party.began_ns = began_ns;
    std::this_thread::sleep_for(milliseconds(rank == 0 ? 300 : 50 * rank));
    Result<Formation> formation = party.form(store, rank, 3);
    EXPECT_TRUE(formation.ok()) << formation.status().message();
  });
}

// Rank 1 is absent and rank 4 late; neither delays the failure of rank 3.
TEST_P(FormationOf, FailureBeforeAllRanksArriveReachesAllRanks) {
  auto registry = std::make_shared<Registry>();
  MemoryStore store;
  run_ranks(5, [&](int rank) {
    if (rank == 1) return;
    FormationRequest request;
    request.prefix = "test/";
    request.name = "test";
    request.rank = rank;
    request.size = 5;
    if (rank == 3) {
      std::this_thread::sleep_for(milliseconds(100));
      return decline_group(store, request, Status(Code::kResource, "no thread is left"),
                           Deadline::after(seconds(1)));
    }
    if (rank == 4) std::this_thread::sleep_for(milliseconds(1000));
    RankParty party(registry, small_settings());
    Result<Formation> formation = party.form(store, rank, 5);
    ASSERT_FALSE(formation.ok());
    EXPECT_EQ(formation.status().code(), Code::kResource);
    EXPECT_NE(formation.status().message().find("no thread is left"), std::string::npos)
        << formation.status().message();
  });
}

TEST_P(FormationOf, KnownDeathEndsTheWait) {
  auto registry = std::make_shared<Registry>();
  MemoryStore store;
  run_ranks(3, [&](int rank) {
    if (rank == 1) return;
    RankParty party(registry, small_settings());
    party.gone = [] { return Status(Code::kPeerDied, "rank 1 died or exited"); };
    Result<Formation> formation = party.form(store, rank, 3);
    ASSERT_FALSE(formation.ok());
    EXPECT_EQ(formation.status().code(), Code::kPeerDied);
  });
}

// A store whose rank dies before its second answer to an entry.
class DyingStore final : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  Status set(const std::string& key, std::string_view value) override {
    if (key.find("/to/") != std::string::npos && ++answers_ == 2) is_dead = true;
    return is_dead ? Status(Code::kInternal, "dead") : store_.set(key, value);
  }
  Status remove(const std::string& key) override {
    return is_dead ? Status(Code::kInternal, "dead") : store_.remove(key);
  }
  std::atomic<bool> is_dead{false};

 private:
  int answers_ = 0;
};

// Three hosts: the second has the table and sees the death; the third only has the store.
TEST_P(FormationOf, DeathOfRankZeroDuringAnswersReachesAllRanks) {
  auto registry = std::make_shared<Registry>();
  MemoryStore store;
  DyingStore dying(store);
  const int per_host = GetParam().count, size = 3 * per_host;
  run_ranks(size, [&](int rank) {
    RankParty party(registry, small_settings());
    if (rank / per_host == 1)
      party.gone = [&] {
        return dying.is_dead ? Status(Code::kPeerDied, "rank 0 died or exited") : Status();
      };
    Result<Formation> formation =
        party.form(rank == 0 ? static_cast<Store&>(dying) : store, rank, size);
    ASSERT_FALSE(formation.ok());
    if (rank / per_host == 0) return;
    EXPECT_EQ(formation.status().code(), Code::kPeerDied) << formation.status().message();
  });
}

TEST_P(FormationOf, MalformedEntryIsReportedAsVersionMismatch) {
  auto registry = std::make_shared<Registry>();
  MemoryStore store;
  for (const std::string& rubbish :
       {std::string(), std::string("rubbish"), std::string(5000, 'x')}) {
    ASSERT_TRUE(store.set("test/entry/1", rubbish).ok());
    RankParty party(registry, small_settings());
    Result<Formation> formation = party.form(store, 0, 2);
    ASSERT_FALSE(formation.ok());
    EXPECT_EQ(formation.status().code(), Code::kUnsupported) << formation.status().message();
  }
}

// Three hosts of four ranks, and one host of twelve.
TEST(LocalExchange, OnlyHostLeadersWriteToStore) {
  constexpr int kRanks = 12;
  for (int per_host : {4, 12}) {
    auto registry = std::make_shared<Registry>();
    MemoryStore store;
    std::barrier together(kRanks);
    run_ranks(kRanks, [&](int rank) {
      RankParty party(registry, small_settings());
      party.per_host = per_host;
      party.host_identity = std::to_string(rank / per_host);
      RecordingStore noting(store);
      together.arrive_and_wait();
      Result<Formation> formation = party.form(noting, rank, kRanks);
      ASSERT_TRUE(formation.ok()) << formation.status().message();
      EXPECT_EQ(formation.value().host_count, kRanks / per_host);
      if (rank % per_host != 0) EXPECT_EQ(noting.writes, 0) << rank;
      // For a group inside a host: its entry, put at most twice and withdrawn, and the last rank's
      // failure.
      if (rank == 0 && per_host == kRanks) EXPECT_LE(noting.writes, 8);
    });
    EXPECT_EQ(store.keys(), std::vector<std::string>());
  }
}

// A rank whose leader is elsewhere, or too late to speak for it, speaks for itself.
TEST(LocalExchange, RankWithoutLeaderUsesStore) {
  for (bool is_late : {false, true}) {
    auto registry = std::make_shared<Registry>();
    MemoryStore store;
    run_ranks(4, [&](int rank) {
      RankParty party(registry, small_settings());
      party.per_host = 4;
      if (rank == 3 && !is_late) party.host_of_local = "elsewhere";
      if (rank == 0 && is_late) std::this_thread::sleep_for(milliseconds(1500));
      Result<Formation> formation = party.form(store, rank, 4);
      ASSERT_TRUE(formation.ok()) << formation.status().message();
    });
    EXPECT_EQ(store.keys(), std::vector<std::string>());
  }
}

// Two hosts of two ranks: rank 3's leader speaks for it, then rank 3 does nothing.
TEST(LocalExchange, StoppedMemberOfAnotherHostIsNamed) {
  auto registry = std::make_shared<Registry>();
  MemoryStore store;
  std::latch failed(3);
  run_ranks(4, [&](int rank) {
    RankParty party(registry, small_settings());
    party.per_host = 2;
    party.host_identity = std::to_string(rank / 2);
    if (rank == 3)
      party.gone = [&] {
        failed.wait();
        return Status();
      };
    Result<Formation> formation = party.form(store, rank, 4, "test", milliseconds(5000));
    ASSERT_FALSE(formation.ok());
    if (rank == 3) return;
    EXPECT_EQ(formation.status().code(), Code::kTimeout);
    EXPECT_NE(formation.status().message().find("waiting for rank 3 ("), std::string::npos)
        << formation.status().message();
    failed.count_down();
  });
}

// Rank 1 has found no leader and waits in the store since before the leader's process began.
TEST(LocalExchange, GroupFormsIfTheLeaderStartsLast) {
  auto registry = std::make_shared<Registry>();
  MemoryStore store;
  run_ranks(2, [&](int rank) {
    RankParty party(registry, small_settings());
    party.per_host = 2;
    if (rank == 0) {
      std::this_thread::sleep_for(milliseconds(1500));
      party.began_ns = wall_clock_ns();
    }
    Result<Formation> formation = party.form(store, rank, 2);
    ASSERT_TRUE(formation.ok()) << formation.status().message();
  });
}

// Rank 1 expects a group of two; ranks 0 and 2 expect a group of three.
TEST(LocalExchange, DifferentGroupSizesOnOneHostAreMismatch) {
  auto registry = std::make_shared<Registry>();
  MemoryStore store;
  const int64_t start_ns = monotonic_ns();
  run_ranks(3, [&](int rank) {
    RankParty party(registry, small_settings());
    party.per_host = 3;
    const int size = rank == 1 ? 2 : 3;
    Result<Formation> formation = party.form(store, rank, size);
    ASSERT_FALSE(formation.ok());
    EXPECT_EQ(formation.status().code(), Code::kMismatch) << formation.status().message();
    const std::string& message = formation.status().message();
    for (const char* part : {"world sizes differ: rank ", " has 3", " has 2",
                             "; start all ranks with the same world size"})
      EXPECT_NE(message.find(part), std::string::npos) << message;
  });
  EXPECT_LT(monotonic_ns() - start_ns, 20'000'000'000);
}

}  // namespace
}  // namespace dscomm::test
