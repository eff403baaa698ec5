// Teams of a host that is divided into domains. Ranks are threads.
#include "core/formation/domain_teams.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <latch>
#include <numeric>
#include <optional>

#include "shm_ranks.h"

namespace dscomm::test {
namespace {

const Deadline kInAMinute = Deadline::after(std::chrono::seconds(60));

// A rank that has formed a flat Team.
struct Rank {
  Rank(const std::shared_ptr<Registry>& registry, Store& store, int rank, int size,
       const Settings& settings = small_settings())
      : party(registry, settings) {
    Formation formation = party.form(store, rank, size).value();
    request.arena = party.arena;
    request.group_id = formation.group_id;
    request.group_name = "test";
    request.rank = rank;
    request.members = formation.members;
    for (int k = 0; k < size; ++k) {
      request.members[static_cast<size_t>(k)].group_rank = k;
      request.names.push_back("rank " + std::to_string(k));
    }
    request.wait_policy = formation.wait_policy;
    request.tuning = formation.tuning;
    flat.emplace(party.arena, formation.group_id, "test", rank, request.members,
                 formation.wait_policy, formation.tuning, InPlace{});
  }

  RankParty party;
  DomainTeamsRequest request;
  std::optional<ShmTeam> flat;
};

using DomainList = std::vector<std::vector<int>>;

// Includes several slices per leader, a domain of one rank, and interleaved ranks.
class Division : public ::testing::TestWithParam<DomainList> {};

TEST_P(Division, EveryRankGetsTheSum) {
  int size = 0;
  for (const std::vector<int>& domain : GetParam()) size += static_cast<int>(domain.size());
  auto registry = std::make_shared<Registry>();
  MemoryStore store;
  run_ranks(size, [&](int number) {
    Rank rank(registry, store, number, size);
    rank.request.domains = GetParam();
    Result<std::unique_ptr<Team>> made = make_domain_teams(rank.request, *rank.flat, kInAMinute);
    ASSERT_TRUE(made.ok()) << made.status().message();
    Team& team = *made.value();
    for (const size_t count : {1u, 100u, 5000u}) {
      std::vector<int32_t> values(count);
      std::iota(values.begin(), values.end(), number);
      const Reduction sum{DType::kInt32, ReduceOp::kSum};
      Status status = team.all_reduce(values.data(), values.data(), count, sum, {kInAMinute});
      ASSERT_TRUE(status.ok()) << status.message();
      for (size_t i = 0; i < count; ++i)
        ASSERT_EQ(values[i], size * static_cast<int>(i) + size * (size - 1) / 2);
    }
    EXPECT_TRUE(team.barrier({kInAMinute}).ok());
  });
}

INSTANTIATE_TEST_SUITE_P(Domains, Division,
                         ::testing::Values(DomainList{{0, 1}, {2, 3}}, DomainList{{0, 2}, {1, 3}},
                                           DomainList{{0, 1, 2, 3}, {4}}, DomainList{{0}, {1, 2}},
                                           DomainList{{0, 1}, {2, 3, 4}, {5}}));

// A rank that has its Teams has published everything that the others need.
TEST(DomainTeams, FormationSucceedsIfRankDiesAfterItsPart) {
  for (int round = 0; round < 20; ++round) {
    auto registry = std::make_shared<Registry>();
    MemoryStore store;
    run_ranks(4, [&](int number) {
      Rank rank(registry, store, number, 4);
      rank.request.domains = {{0, 1}, {2, 3}};
      Result<std::unique_ptr<Team>> made = make_domain_teams(rank.request, *rank.flat, kInAMinute);
      EXPECT_TRUE(made.ok()) << made.status().message();
      if (number == round % 4) rank.party.directory->die();
    });
  }
}

// Rank 3 skips a broadcast. The only rank that made the call and shares a Team with it dies.
TEST(DomainTeams, LeaveReportsMismatchOfRanksWithoutSharedTeam) {
  std::latch called(5), left(5);
  std::atomic<int> told{0};
  auto registry = std::make_shared<Registry>();
  MemoryStore store;
  run_ranks(5, [&](int number) {
    Rank rank(registry, store, number, 5);
    rank.request.domains = {{0, 2, 4}, {1, 3}};
    Result<std::unique_ptr<Team>> made = make_domain_teams(rank.request, *rank.flat, kInAMinute);
    EXPECT_TRUE(made.ok()) << made.status().message();
    if (!made.ok()) std::abort();  // the other ranks would wait for this one
    Team& team = *made.value();
    std::vector<int32_t> values(80, number);
    if (number != 3)
      EXPECT_TRUE(team.broadcast(values.data(), 80, DType::kInt32, 4, {kInAMinute}).ok());
    called.arrive_and_wait();
    if (number == 1) {
      rank.party.directory->die();
    } else {
      EXPECT_TRUE(team.leave().ok());
      const Status status = rank.flat->leave();
      if (!status.ok()) {
        ++told;
        EXPECT_EQ(status.code(), Code::kMismatch) << status.message();
        EXPECT_NE(status.message().find("broadcast(int32[80], root 4)"), std::string::npos)
            << status.message();
        EXPECT_NE(status.message().find("rank 3 "), std::string::npos) << status.message();
        EXPECT_NE(status.message().find(" made no call"), std::string::npos) << status.message();
      }
    }
    left.arrive_and_wait();
  });
  EXPECT_GE(told, 1);
}

// Rank 0 waits for rank 1 of its domain, which comes late, and shares a Team with no other rank.
TEST(DomainTeams, DeathInAnotherDomainEndsWaitForLateRank) {
  for (const bool is_barrier : {false, true}) {
    std::latch formed(4), failed(1);
    auto registry = std::make_shared<Registry>();
    MemoryStore store;
    run_ranks(4, [&](int number) {
      Rank rank(registry, store, number, 4);
      rank.request.domains = {{0, 1}, {2, 3}};
      Result<std::unique_ptr<Team>> made = make_domain_teams(rank.request, *rank.flat, kInAMinute);
      EXPECT_TRUE(made.ok()) << made.status().message();
      formed.arrive_and_wait();
      if (number == 3) rank.party.directory->die();
      if (number != 0) return failed.wait();
      if (made.ok()) {
        const CallOptions options{Deadline::after(std::chrono::seconds(5))};
        float value = 1;
        const Status status = is_barrier ? made.value()->barrier(options)
                                         : made.value()->all_reduce(&value, &value, 1, {}, options);
        EXPECT_EQ(status.code(), Code::kPeerDied) << status.message();
        EXPECT_NE(status.message().find("rank 3 "), std::string::npos) << status.message();
      }
      failed.count_down();
    });
  }
}

// Rank 0 reads the cause from the Team of the whole host.
TEST(DomainTeams, AbortCauseOfDepartedRankReachesOtherDomain) {
  std::latch left(4), failed(1);
  auto registry = std::make_shared<Registry>();
  MemoryStore store;
  run_ranks(4, [&](int number) {
    Rank rank(registry, store, number, 4);
    rank.request.domains = {{0, 1}, {2, 3}};
    Result<std::unique_ptr<Team>> made = make_domain_teams(rank.request, *rank.flat, kInAMinute);
    EXPECT_TRUE(made.ok()) << made.status().message();
    if (number == 3 && made.ok()) {
      for (Team* team : {made.value().get(), static_cast<Team*>(&*rank.flat)}) {
        team->abort(Status(Code::kAborted, "no more data"));
        EXPECT_TRUE(team->leave().ok());
      }
    }
    left.arrive_and_wait();
    if (number != 0) return failed.wait();
    if (made.ok()) {
      const Status status = made.value()->barrier({Deadline::after(std::chrono::seconds(5))});
      EXPECT_EQ(status.code(), Code::kAborted) << status.message();
      EXPECT_NE(status.message().find("no more data"), std::string::npos) << status.message();
    }
    failed.count_down();
  });
}

TEST(DomainTeams, DeathDuringFormationNamesTheRank) {
  std::latch checked(2);
  auto registry = std::make_shared<Registry>();
  MemoryStore store;
  run_ranks(3, [&](int number) {
    Rank rank(registry, store, number, 3);
    rank.request.domains = {{0, 1}, {2}};
    if (number == 1) {
      rank.party.directory->die();
      return checked.wait();  // without leaving
    }
    Result<std::unique_ptr<Team>> made = make_domain_teams(rank.request, *rank.flat, kInAMinute);
    EXPECT_EQ(made.status().code(), Code::kPeerDied);
    EXPECT_NE(made.status().message().find("rank 1 "), std::string::npos)
        << made.status().message();
    checked.count_down();
  });
}

TEST(DomainTeams, FailureDuringFormationReachesAllRanks) {
  auto registry = std::make_shared<Registry>();
  MemoryStore store;
  run_ranks(3, [&](int number) {
    Rank rank(registry, store, number, 3);
    rank.request.domains = {{0, 1}, {2}};
    if (number == 1)
      while (rank.party.arena->allocate_mailbox().ok()) continue;
    Result<std::unique_ptr<Team>> made = make_domain_teams(rank.request, *rank.flat, kInAMinute);
    ASSERT_FALSE(made.ok());
    EXPECT_EQ(made.status().code(), Code::kResource) << made.status().message();
  });
}

}  // namespace
}  // namespace dscomm::test
