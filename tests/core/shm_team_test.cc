// ShmTeam: every collective against the reference, and failures. Ranks are threads, on real arenas.

#include "core/shm/shm_team.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <latch>
#include <optional>
#include <thread>

#include "core/base/memory_limit.h"
#include "core/team/hierarchical_team.h"
#include "shm_ranks.h"
#include "team_reference.h"

namespace dscomm::test {
namespace {

using dscomm::testing::check_disagreements;
using dscomm::testing::check_every_collective;
using dscomm::testing::check_same_bits;
using dscomm::testing::matrix_is_reduced;
using dscomm::testing::ReferenceOptions;
using dscomm::testing::RunRanks;
using std::chrono::milliseconds;

CallOptions within(int ms) { return {Deadline::after(milliseconds(ms))}; }

RunRanks shm_ranks(int ranks, const Settings& settings = small_settings()) {
  return [ranks, settings](const dscomm::testing::RankBody& body) {
    run_shm_ranks(ranks, body, settings);
  };
}

class ShmTeamRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, ShmTeamRanks,
                         ::testing::ValuesIn(matrix_is_reduced() ? std::vector{2, 3, 7}
                                                                 : std::vector{2, 3, 4, 7}));

TEST_P(ShmTeamRanks, EveryCollective) {
  ReferenceOptions options;
  options.counts = {0, 1, 28, 29, 60, 200, 1100, 5000};  // tiny, one shot, one chunk, several
  if (GetParam() != 3)
    options.dtypes = {DType::kFloat32, DType::kBFloat16, DType::kInt64, DType::kUInt8};
  check_every_collective(GetParam(), shm_ranks(GetParam()), options);
}
TEST_P(ShmTeamRanks, ResultsAreBitIdenticalOnAllRanks) {
  check_same_bits(GetParam(), shm_ranks(GetParam()));
}
TEST_P(ShmTeamRanks, MismatchedCallsFailOnAllRanks) {
  check_disagreements(GetParam(), shm_ranks(GetParam()));
}

// All or some ranks pass tensors that peers read in place, drawn for each call; the PooledTeam
// overwrites and frees them as soon as a call returns.
RunRanks pooled_ranks(int ranks, double share) {
  return [ranks, share](const dscomm::testing::RankBody& body) {
    run_shm_ranks(ranks, body, small_settings(), share);
  };
}

TEST_P(ShmTeamRanks, EveryCollectiveWithTensorsReadInPlace) {
  ReferenceOptions options;
  options.counts = {0, 1, 13, 1100, 5000};
  options.dtypes = {DType::kFloat32, DType::kInt16, DType::kComplex128};
  check_every_collective(GetParam(), pooled_ranks(GetParam(), 1), options);
  options.dtypes = {DType::kBFloat16, DType::kInt64, DType::kUInt8};
  check_every_collective(GetParam(), pooled_ranks(GetParam(), 0.5), options);
}
TEST_P(ShmTeamRanks, ResultsOfTensorsReadInPlaceAreBitIdenticalOnAllRanks) {
  check_same_bits(GetParam(), pooled_ranks(GetParam(), 0.5));
}
TEST_P(ShmTeamRanks, MismatchedCallsWithTensorsReadInPlaceFailOnAllRanks) {
  check_disagreements(GetParam(), pooled_ranks(GetParam(), 0.5));
}

// Calls follow each other without any synchronisation except their own.
TEST_P(ShmTeamRanks, PoolTensorsMayBeRewrittenRightAfterTheCall) {
  run_shm_ranks(
      GetParam(),
      [](Team& team) {
        std::vector<int64_t> data(3000), all(data.size() * static_cast<size_t>(team.size()));
        std::vector<void*> outs;
        std::vector<size_t> counts(static_cast<size_t>(team.size()), data.size());
        for (size_t k = 0; k < counts.size(); ++k) outs.push_back(all.data() + k * data.size());
        const int64_t ranks_sum = int64_t{team.size()} * (team.size() - 1) / 2;
        for (int64_t i = 0; i < 100; ++i) {
          data.assign(data.size(), i + team.rank());
          ASSERT_TRUE(
              team.all_gather(data.data(), data.size(), DType::kInt64, outs, counts, within(60000))
                  .ok());
          ASSERT_TRUE(
              team.all_reduce(data.data(), data.data(), data.size(), {DType::kInt64}, within(60000))
                  .ok());
          for (int64_t value : data) ASSERT_EQ(value, i * team.size() + ranks_sum);
          for (size_t k = 0; k < all.size(); ++k)
            ASSERT_EQ(all[k], i + static_cast<int64_t>(k / data.size()));
          const int root = static_cast<int>(i % team.size());
          ASSERT_TRUE(
              team.broadcast(data.data(), data.size(), DType::kInt64, root, within(60000)).ok());
          for (int64_t value : data) ASSERT_EQ(value, i * team.size() + ranks_sum);
        }
      },
      small_settings(), 0.7);
}

// A rank whose tensor is read in place awaits readers until the deadline, and notices leaving ones.
TEST(ShmTeam, BroadcastInPlaceFailsIfReaderLeavesOrIsLate) {
  for (bool leaves : {true, false}) {
    auto registry = std::make_shared<Registry>();
    MemoryStore store;
    std::atomic<bool> is_over{false};
    run_ranks(2, [&](int rank) {
      RankParty party(registry, small_settings());
      std::unique_ptr<ShmTeam> team = party.team(store, rank, 2);
      if (rank == 1) {
        if (leaves) team.reset();
        while (!is_over) std::this_thread::sleep_for(milliseconds(1));
        return;
      }
      std::byte* tensor = party.pool->allocate(100'000).value();
      Status status =
          team->broadcast(tensor, 100'000, DType::kUInt8, 0, within(leaves ? 60000 : 50));
      EXPECT_EQ(status.code(), leaves ? Code::kPeerLeft : Code::kTimeout) << status.message();
      is_over = true;
    });
  }
}

// ShmTeams inside and across domains, as with several NUMA nodes or L3 caches.
Result<std::unique_ptr<HierarchicalTeam>> composed_team(
    RankParty& party, MemoryStore& store, int rank, const std::vector<std::vector<int>>& domains) {
  TeamFactory factory = [&](std::span<const int> members,
                            const std::string& name) -> Result<std::unique_ptr<Team>> {
    int local = static_cast<int>(std::find(members.begin(), members.end(), rank) - members.begin());
    return std::unique_ptr<Team>(party.team(store, local, static_cast<int>(members.size()), name));
  };
  return HierarchicalTeam::make(rank, domains, factory, factory, {"composed", 4096});
}

RunRanks composed_ranks(std::vector<std::vector<int>> domains, double pooled_share = 0) {
  return [domains, pooled_share](const dscomm::testing::RankBody& body) {
    int ranks = 0;
    for (const std::vector<int>& domain : domains) ranks += static_cast<int>(domain.size());
    auto registry = std::make_shared<Registry>();
    MemoryStore store;
    run_ranks(ranks, [&](int rank) {
      RankParty party(registry, small_settings());
      auto composed = composed_team(party, store, rank, domains);
      ASSERT_TRUE(composed.ok()) << composed.status().message();
      std::unique_ptr<Team> team = std::move(composed).value();
      if (pooled_share > 0)
        team = std::make_unique<PooledTeam>(std::move(team), party.pool, pooled_share);
      body(*team);
      EXPECT_TRUE(!team->failure().ok() || team->barrier(within(60000)).ok());
    });
  };
}

TEST(ShmTeam, EveryCollectiveInHierarchyOfShmTeams) {
  ReferenceOptions options;
  options.dtypes = {DType::kFloat32, DType::kBFloat16, DType::kInt64};
  options.counts = {0, 1, 13, 3000};
  check_every_collective(4, composed_ranks({{0, 2}, {1, 3}}), options);
  check_every_collective(5, composed_ranks({{0, 1}, {2, 3, 4}}), options);
  check_every_collective(4, composed_ranks({{0, 2}, {1, 3}}, 0.5), options);
  check_same_bits(5, composed_ranks({{0, 1}, {2, 3, 4}}));
  check_same_bits(5, composed_ranks({{0, 1}, {2, 3, 4}}, 0.5));
  check_disagreements(4, composed_ranks({{0, 2}, {1, 3}}));
}

// A lost wake-up causes a hang, since sleeps last until a peer ends them.
TEST(ShmTeam, NoWakeUpIsLost) {
  Settings settings = small_settings();
  settings.spin_pauses = 0;
  settings.yield_us = 0;
  settings.sleep_slice_ms = 0;
  for (int ranks : {2, 4}) {
    run_shm_ranks(
        ranks,
        [](Team& team) {
          std::vector<int64_t> data(3000);
          for (int64_t i = 0; i < 300; ++i) {
            data.assign(data.size(), i + team.rank());
            size_t count = i % 3 == 0 ? 1 : i % 3 == 1 ? 50 : data.size();
            ASSERT_TRUE(
                team.all_reduce(data.data(), data.data(), count, {DType::kInt64}, within(60000))
                    .ok());
            int64_t ranks_sum = int64_t{team.size()} * (team.size() - 1) / 2;
            ASSERT_EQ(data[count - 1], i * team.size() + ranks_sum);
            int root = static_cast<int>(i % team.size());
            ASSERT_TRUE(
                team.broadcast(data.data(), data.size(), DType::kInt64, root, within(60000)).ok());
          }
        },
        settings);
  }
}

// Roots run ahead of their readers; unread data must not be overwritten.
TEST(ShmTeam, RootAheadOfReadersDoesNotOverwriteUnreadData) {
  run_shm_ranks(3, [](Team& team) {
    std::atomic<unsigned> pause{0};
    for (int i = 0; i < 2000; ++i) {
      int root = (i / 20) % 3;
      size_t count = i % 7 == 0 ? 700 : 3;  // staged and in the mailbox
      std::vector<int32_t> data(count, team.rank() == root ? i : -1);
      ASSERT_TRUE(team.broadcast(data.data(), count, DType::kInt32, root, within(60000)).ok());
      for (int32_t value : data) ASSERT_EQ(value, i);
      std::vector<int32_t> sum(count, 1);
      if (i % 11 == 0) {
        ASSERT_TRUE(
            team.reduce(sum.data(), sum.data(), count, {DType::kInt32}, root, within(60000)).ok());
        if (team.rank() == root) {
          ASSERT_EQ(sum[0], 3);
        }
      }
      for (int spin = 0; team.rank() == 2 && i % 5 == 0 && spin < 1000; ++spin)
        ++pause;  // a slow reader
    }
  });
}

// Every call fills all buffers, so a root that did not wait for its readers would overwrite unread
// data. Readers start late, so that nothing else orders the two.
TEST(ShmTeam, RootsWaitForSlowReaders) {
  run_shm_ranks(3, [](Team& team) {
    for (int i = 0; i < 20; ++i) {
      if (team.rank() > 0) std::this_thread::sleep_for(milliseconds(2));
      std::vector<int32_t> data(4 * small_settings().staging_chunk_bytes / sizeof(int32_t),
                                team.rank() == 0 ? i : -1);
      ASSERT_TRUE(team.broadcast(data.data(), data.size(), DType::kInt32, 0, within(60000)).ok());
      ASSERT_EQ(data, std::vector<int32_t>(data.size(), i));
    }
  });
}

// Rank 1 waits for rank 3 in a Team of only these two, and rank 3 does nothing. Only rank 1's other
// Team shows it that the group has ended.
TEST(ShmTeam, AbortEndsWaitsInOtherTeamsOfTheHierarchy) {
  std::atomic<int> ended{0};
  composed_ranks({{0, 1}, {2, 3}})([&](Team& team) {
    if (team.rank() == 3) {
      while (ended < 3) std::this_thread::sleep_for(milliseconds(1));
      return;
    }
    std::thread aborts;
    if (team.rank() == 2)
      aborts = std::thread([&] {
        std::this_thread::sleep_for(milliseconds(50));
        team.abort(Status(Code::kAborted, "enough"));
      });
    std::vector<float> data(5000, 1);
    Status status =
        team.all_reduce(data.data(), data.data(), data.size(), {DType::kFloat32}, within(60000));
    EXPECT_EQ(status.message(), "enough");
    ++ended;
    if (aborts.joinable()) aborts.join();
  });
}

TEST(ShmTeam, DeathNamesTheRankOnAllRanks) {
  auto registry = std::make_shared<Registry>();
  MemoryStore store;
  std::atomic<int> reduced{0};
  run_ranks(4, [&](int rank) {
    RankParty party(registry, small_settings());
    std::unique_ptr<ShmTeam> team = party.team(store, rank, 4);
    float x = 1;
    ASSERT_TRUE(team->all_reduce(&x, &x, 1, {}, within(60000)).ok());
    ++reduced;
    if (rank == 2) {
      // A fast rank must not end the group for a slow one that is still in the first call.
      while (reduced < 4) std::this_thread::yield();
      party.directory->die();
      // Keeps the Team: its destructor would leave the group, as no killed process does.
      std::this_thread::sleep_for(milliseconds(500));
      return;
    }
    Status status = team->all_reduce(&x, &x, 1, {}, within(60000));
    EXPECT_EQ(status.code(), Code::kPeerDied);
    EXPECT_NE(status.message().find("rank 2"), std::string::npos) << status.message();
    EXPECT_EQ(team->barrier(within(60000)).message(), status.message());
  });
}

// Rank 1, for which rank 0 waits first, is late: it may be waiting in another group.
TEST(ShmTeam, DeathOfOneRankEndsWaitForOtherRank) {
  constexpr size_t kCount = 40'000;  // floats, more than the staging holds
  using Call = std::function<Status(Team&, std::vector<float>&)>;
  const auto blocks = [](std::vector<float>& data) {
    return std::vector<void*>{data.data(), data.data() + 100, data.data() + 200};
  };
  const auto inputs = [](std::vector<float>& data) {
    return std::vector<const void*>{data.data(), data.data() + 100, data.data() + 200};
  };
  const std::vector<size_t> counts(3, 100);
  const std::vector<std::pair<const char*, Call>> calls = {
      {"barrier", [](Team& team, auto&) { return team.barrier(within(5000)); }},
      {"tiny all_reduce",
       [](Team& team, auto& data) {
         return team.all_reduce(data.data(), data.data(), 1, {}, within(5000));
       }},
      {"long all_reduce",
       [](Team& team, auto& data) {
         return team.all_reduce(data.data(), data.data(), kCount, {}, within(5000));
       }},
      {"long broadcast",
       [](Team& team, auto& data) {
         return team.broadcast(data.data(), kCount, DType::kFloat32, 0, within(5000));
       }},
      {"reduce",
       [](Team& team, auto& data) {
         return team.reduce(data.data(), data.data(), kCount, {}, 0, within(5000));
       }},
      {"all_gather",
       [&](Team& team, auto& data) {
         return team.all_gather(data.data() + 300, 100, DType::kFloat32, blocks(data), counts,
                                within(5000));
       }},
      {"gather",
       [&](Team& team, auto& data) {
         return team.gather(data.data() + 300, 100, DType::kFloat32, blocks(data), counts, 0,
                            within(5000));
       }},
      {"reduce_scatter",
       [&](Team& team, auto& data) {
         return team.reduce_scatter(inputs(data), counts, data.data() + 300, {}, within(5000));
       }},
      {"all_to_all",
       [&](Team& team, auto& data) {
         std::vector<float> out(300);
         return team.all_to_all(inputs(data), counts, blocks(out), counts, DType::kFloat32,
                                within(5000));
       }},
  };
  for (const auto& [name, call] : calls) {
    auto registry = std::make_shared<Registry>();
    MemoryStore store;
    std::latch formed(3), failed(1);
    run_ranks(3, [&](int rank) {
      RankParty party(registry, small_settings());
      std::unique_ptr<ShmTeam> team = party.team(store, rank, 3);
      formed.arrive_and_wait();
      if (rank == 2) party.directory->die();
      if (rank != 0) return failed.wait();
      std::vector<float> data(kCount, 1.0f);
      const Status status = call(*team, data);
      EXPECT_EQ(status.code(), Code::kPeerDied) << name << ": " << status.message();
      EXPECT_NE(status.message().find("rank 2 "), std::string::npos)
          << name << ": " << status.message();
      failed.count_down();
    });
  }
}

TEST(ShmTeam, DataOfRankThatLeftIsReadable) {
  auto registry = std::make_shared<Registry>();
  MemoryStore store;
  std::atomic<bool> left{false};
  run_ranks(2, [&](int rank) {
    RankParty party(registry, small_settings());
    std::unique_ptr<ShmTeam> team = party.team(store, rank, 2);
    std::vector<int32_t> data(1000, rank);
    if (rank == 0) {
      ASSERT_TRUE(team->broadcast(data.data(), data.size(), DType::kInt32, 0, within(60000)).ok());
      team.reset();
      left = true;
      return;
    }
    while (!left) std::this_thread::yield();
    data.assign(data.size(), -1);
    ASSERT_TRUE(team->broadcast(data.data(), data.size(), DType::kInt32, 0, within(60000)).ok());
    EXPECT_EQ(data, std::vector<int32_t>(1000, 0));
    Status status = team->barrier(within(60000));
    EXPECT_EQ(status.code(), Code::kPeerLeft);
    EXPECT_NE(status.message().find("rank 0"), std::string::npos) << status.message();
  });
}

// A rank leaves before its process ends; both may happen between two checks of a waiting member.
TEST(ShmTeam, RankThatLeavesAndExitsIsNeverReportedDead) {
  auto registry = std::make_shared<Registry>();
  MemoryStore store;
  std::atomic<int> over{0};
  for (int i = 0; i < 20; ++i) {
    std::atomic<bool> ready{false};
    run_ranks(2, [&](int rank) {
      RankParty party(registry, small_settings());
      Result<Formation> formation = party.form(store, rank, 2, "test" + std::to_string(i));
      ASSERT_TRUE(formation.ok()) << formation.status().message();
      const Formation& f = formation.value();
      auto mailboxes = std::make_unique<Mailboxes>(party.arena, f.group_id, "test", rank, f.members,
                                                   f.wait_policy);
      if (rank == 0) {
        ready = true;
        while (mailboxes->members().member_state(1) == MemberState::kPresent) {
        }
        EXPECT_EQ(mailboxes->members().member_state(1), MemberState::kLeft);
        ++over;
        return;
      }
      while (!ready) std::this_thread::yield();
      ASSERT_TRUE(mailboxes->leave().ok());
      party.directory->die();
    });
  }
  EXPECT_EQ(over, 20);
}

// An abort does not undo its rank's earlier data; the next call fails, and the members learn it.
TEST(ShmTeam, AbortKeepsPublishedData) {
  for (size_t count : {size_t{1}, size_t{1000}}) {
    std::atomic<bool> aborted{false};
    run_shm_ranks(3, [&](Team& team) {
      std::vector<int32_t> data(count, team.rank());
      if (team.rank() > 0)
        while (!aborted) std::this_thread::yield();
      ASSERT_TRUE(team.broadcast(data.data(), count, DType::kInt32, 0, within(60000)).ok());
      EXPECT_EQ(data, std::vector<int32_t>(count, 0));
      if (team.rank() == 0) {
        team.abort(Status(Code::kAborted, "enough"));
        aborted = true;
      }
      EXPECT_EQ(team.barrier(within(60000)).message(), "enough");
    });
  }
}

// Every wait takes the slow path, which checks for aborts; with staging and in place.
TEST(ShmTeam, AbortAfterACallDoesNotFailThatCall) {
  Settings settings = small_settings();
  settings.spin_pauses = 0;
  settings.yield_us = 0;
  for (int i = 0; i < 60; ++i)
    run_shm_ranks(
        3,
        [&](Team& team) {
          std::vector<int64_t> data(i % 3 == 0 ? 1 : i % 3 == 1 ? 100 : 3000, 1);
          Status status = team.all_reduce(data.data(), data.data(), data.size(), {DType::kInt64},
                                          within(60000));
          if (team.rank() == 0) team.abort(Status(Code::kAborted, "enough"));
          EXPECT_TRUE(status.ok()) << status.message();
          EXPECT_EQ(data, std::vector<int64_t>(data.size(), 3));
          EXPECT_EQ(team.barrier(within(60000)).message(), "enough");
        },
        settings, i % 2 == 0 ? 0.7 : 0);
}

TEST(ShmTeam, AbortAfterACallDoesNotFailThatCallInHierarchy) {
  for (int i = 0; i < 20; ++i)
    composed_ranks({{0, 1}, {2, 3}})([&](Team& team) {
      // The last rank to reach its domain's last step is late for it.
      if (team.rank() == 3 && i % 2 == 0) std::this_thread::sleep_for(milliseconds(5));
      std::vector<int64_t> data(i % 2 == 0 ? 3000 : 1, team.rank() == 0 ? 1 : 0);
      Status status =
          i % 4 < 2 ? team.all_reduce(data.data(), data.data(), data.size(), {DType::kInt64},
                                      within(60000))
                    : team.broadcast(data.data(), data.size(), DType::kInt64, 0, within(60000));
      if (team.rank() == 0) team.abort(Status(Code::kAborted, "enough"));
      EXPECT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(data, std::vector<int64_t>(data.size(), 1));
      EXPECT_EQ(team.barrier(within(60000)).message(), "enough");
    });
}

// Rank 3 completes a broadcast and dies; rank 2, in a Team with it, waits for rank 0.
TEST(ShmTeam, DeathDoesNotEndUnrelatedWaitsInHierarchy) {
  std::atomic<bool> dead{false};
  std::unique_ptr<Team> of_the_dead;  // it does not leave
  auto registry = std::make_shared<Registry>();
  MemoryStore store;
  run_ranks(4, [&](int rank) {
    RankParty party(registry, small_settings());
    std::unique_ptr<Team> team = composed_team(party, store, rank, {{0, 2}, {1, 3}}).value();
    int32_t value = rank == 1 ? 7 : 0;
    if (rank == 0) {
      while (!dead) std::this_thread::yield();
      std::this_thread::sleep_for(milliseconds(500));
    }
    Status status = team->broadcast(&value, 1, DType::kInt32, 1, within(60000));
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(value, 7);
    if (rank == 3) {
      party.directory->die();
      dead = true;
      of_the_dead = std::move(team);
      return;
    }
    status = team->barrier(within(60000));
    EXPECT_EQ(status.code(), Code::kPeerDied) << status.message();
  });
}

// The status of leaving, by rank, when each rank makes this many broadcasts from this root; or that
// of a broadcast which failed: one that waits for long compares the calls of all ranks. If `ends`
// is set, rank 3's process ends after its calls, by that exception unless it is empty.
std::vector<Status> leave_after(const std::vector<int>& calls, const std::vector<int>& roots,
                                bool composed, std::optional<std::string> ends = {}) {
  std::vector<Status> told(calls.size());
  auto registry = std::make_shared<Registry>();
  MemoryStore store;
  std::atomic<int> called{0}, left{0};
  std::unique_ptr<Team> of_the_ended;  // it does not leave before the others
  run_ranks(static_cast<int>(calls.size()), [&](int rank) {
    const auto k = static_cast<size_t>(rank);
    RankParty party(registry, small_settings());
    std::unique_ptr<Team> team;
    if (composed)
      team = composed_team(party, store, rank, {{0, 1}, {2, 3}}).value();
    else
      team = party.team(store, rank, static_cast<int>(calls.size()));
    int32_t value = 0;
    for (int i = 0; i < calls[k] && told[k].ok(); ++i)
      told[k] = team->broadcast(&value, 1, DType::kInt32, roots[k], within(60000));
    const bool ends_here = ends && rank == 3;
    if (ends_here) {
      team->note_end(*ends);
      party.directory->die();
      of_the_ended = std::move(team);
    }
    ++called;
    while (called < static_cast<int>(calls.size())) std::this_thread::yield();
    if (!ends_here) {
      if (told[k].ok()) {
        told[k] = team->leave();
        EXPECT_TRUE(team->leave().ok());
      }
      team.reset();
    }
    ++left;
    while (left < static_cast<int>(calls.size())) std::this_thread::yield();
  });
  return told;
}

TEST(ShmTeam, LeaveReportsMismatchInTheLastCalls) {
  for (bool composed : {false, true})
    for (int i = 0; i < 4; ++i) {
      for (const auto& [calls, roots] :
           {std::pair(std::vector{9, 9, 9, 9}, std::vector{0, 0, 0, 3}),
            {{9, 9, 9, 8}, {0, 0, 0, 0}},
            {{1, 1, 1, 0}, {0, 0, 0, 0}}}) {
        size_t told = 0;
        // A rank with another root deviates from its first call on, so it makes one.
        const auto& made = roots[3] == 3 ? std::vector{1, 1, 1, 1} : calls;
        for (const Status& status : leave_after(made, roots, composed)) {
          if (status.ok()) continue;
          ++told;
          EXPECT_EQ(status.code(), Code::kMismatch) << status.message();
          EXPECT_NE(status.message().find(composed ? "rank 1 (" : "rank 3 ("), std::string::npos)
              << status.message();
        }
        EXPECT_GT(told, 0u) << made[3] << " calls, root " << roots[3];
      }
      for (int same : {0, 1, 9})
        for (const Status& status :
             leave_after(std::vector(4, same), std::vector{0, 0, 0, 0}, composed))
          EXPECT_TRUE(status.ok()) << status.message();
    }
}

TEST(ShmTeam, LeaveReportsRankThatEndedWithFewerCalls) {
  for (bool composed : {false, true})
    for (const std::string exception : {"", "ValueError"}) {
      size_t told = 0;
      for (const Status& status : leave_after({9, 9, 9, 8}, {0, 0, 0, 0}, composed, exception)) {
        if (status.ok()) continue;
        ++told;
        const std::string how = exception.empty() ? "ended without destroy_process_group()"
                                                  : "was ended by an unhandled ValueError";
        EXPECT_NE(status.message().find(how), std::string::npos) << status.message();
      }
      EXPECT_GT(told, 0u);
      for (const Status& status : leave_after({9, 9, 9, 9}, {0, 0, 0, 0}, composed, exception))
        EXPECT_TRUE(status.ok()) << status.message();
    }
}

TEST(ShmTeam, TimeoutNamesTheMissingRank) {
  run_shm_ranks(3, [](Team& team) {
    if (team.rank() == 1) {
      while (team.failure().ok()) std::this_thread::yield();
      return;
    }
    Status status = team.barrier(within(200));
    EXPECT_EQ(status.code(), Code::kTimeout);
    for (const char* part :
         {"waiting for rank 1 (",
          ", which is in this process and has made no call; if rank 1 is "
          "only slow, raise the timeout",
          "call new_group() with the same members and in the same order on all ranks"})
      EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
  });
}

TEST(ShmTeam, AbortEndsWaitsOfAllRanks) {
  run_shm_ranks(3, [](Team& team) {
    if (team.rank() == 0) {
      std::this_thread::sleep_for(milliseconds(50));
      team.abort(Status(Code::kAborted, "enough"));
      return;
    }
    Status status = team.barrier(within(60000));
    EXPECT_EQ(status.code(), Code::kAborted);
    EXPECT_EQ(status.message(), "enough");
  });
}

// Rank 2 only asks: first after rank 1's abort, then after rank 0's abort with another cause.
TEST(ShmTeam, FailureKeepsTheFirstCauseSeen) {
  std::atomic<int> step{0};
  auto wait_for = [&step](int wanted) {
    while (step < wanted) std::this_thread::yield();
  };
  run_shm_ranks(3, [&](Team& team) {
    if (team.rank() == 1) {
      team.abort(Status(Code::kAborted, "the first"));
      step = 1;
      wait_for(3);
    } else if (team.rank() == 0) {
      wait_for(2);
      team.abort(Status(Code::kAborted, "another"));
      step = 3;
    } else {
      wait_for(1);
      EXPECT_EQ(team.failure().message(), "the first");
      step = 2;
      wait_for(3);
      EXPECT_EQ(team.failure().message(), "the first");
      EXPECT_EQ(team.barrier(within(60000)).message(), "the first");
    }
  });
}

TEST(ShmTeam, RepeatedCallOfOneRankIsMismatch) {
  run_shm_ranks(2, [](Team& team) {
    int32_t x = 0;
    Status status;
    if (team.rank() == 0) status = team.broadcast(&x, 1, DType::kInt32, 0, within(60000));
    ASSERT_TRUE(status.ok());
    status = team.broadcast(&x, 1, DType::kInt32, 0, within(60000));
    if (status.ok()) status = team.barrier(within(60000));
    EXPECT_EQ(status.code(), Code::kMismatch) << status.message();
    EXPECT_NE(status.message().find("barrier()"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("broadcast(int32[1], root 0)"), std::string::npos)
        << status.message();
  });
}

TEST(ShmTeam, ManyGroupsReuseTheirMemory) {
  auto registry = std::make_shared<Registry>();
  MemoryStore store;
  Settings settings = small_settings();
  run_ranks(2, [&](int rank) {
    RankParty party(registry, settings);
    size_t after_first = 0;
    for (int i = 0; i < 400; ++i) {
      std::unique_ptr<ShmTeam> team = party.team(store, rank, 2, "group" + std::to_string(i));
      std::vector<float> data(3000, 1.0f);
      ASSERT_TRUE(team->all_reduce(data.data(), data.data(), data.size(), {}, within(60000)).ok());
      ASSERT_TRUE(team->barrier(within(60000)).ok());
      if (i == 20) after_first = backed_bytes(party.arena->fd());
    }
    EXPECT_EQ(backed_bytes(party.arena->fd()), after_first);
  });
}

// Two ranks that both believe to be the root wait for each other's acknowledgements, in a call with
// more rounds than buffers; neither reads the other's data.
TEST(ShmTeam, DifferentRootsAreMismatch) {
  for (int ranks : {2, 3}) {
    run_shm_ranks(ranks, [](Team& team) {
      std::vector<float> data(20000);
      Status status =
          team.broadcast(data.data(), data.size(), DType::kFloat32, team.rank() % 2, within(60000));
      EXPECT_EQ(status.code(), Code::kMismatch) << status.message();
    });
  }
}

// Waits until a test's counter reaches `value`, without ordering memory; or for a minute, if
// another rank has failed.
void await_relaxed(const std::atomic<int>& counter, int value) {
  const Deadline deadline = Deadline::after(milliseconds(60000));
  while (counter.load(std::memory_order_relaxed) < value && !deadline.expired())
    std::this_thread::yield();
}

// Memory that one group returns is reused by another at once. Only the readers' done and closed
// words order the old reads before the new writes: the groups exist already, and the root reads
// nothing.
TEST(ShmTeam, StagingReleasedByOneGroupIsReusedSafely) {
  auto registry = std::make_shared<Registry>();
  MemoryStore store;
  constexpr int kGroups = 40;
  Settings settings = small_settings();
  settings.arena_bytes = 160 << 20;
  // Relaxed, so that they order nothing: the broadcasts that rank 1 has read, and the groups that
  // rank 0 has left.
  std::atomic<int> read{0}, left{0};
  run_ranks(2, [&](int rank) {
    RankParty party(registry, settings);
    // Beyond the limit up to which groups keep their staging between calls.
    ASSERT_TRUE(party.arena->allocate(70 << 20).ok());
    std::vector<std::unique_ptr<ShmTeam>> teams;
    for (int i = 0; i < kGroups; ++i)
      teams.push_back(party.team(store, rank, 2, "group" + std::to_string(i)));
    auto lasting = party.team(store, rank, 2, "lasting"),
         other = party.team(store, rank, 2, "other");
    int broadcasts = 0;
    auto broadcast = [&](Team& team, int32_t value) {
      std::vector<int32_t> data(2500, rank == 0 ? value : -1);
      ASSERT_TRUE(team.broadcast(data.data(), data.size(), DType::kInt32, 0, within(60000)).ok());
      ASSERT_EQ(data, std::vector<int32_t>(2500, value));
      if (rank == 0) return await_relaxed(read, ++broadcasts);  // does not ask the reader
      read.fetch_add(1, std::memory_order_relaxed);
    };
    for (int i = 0; i < kGroups; ++i) {
      broadcast(*teams[static_cast<size_t>(i)], i);
      // The root leaves first; otherwise it would acquire the reader's leaving.
      if (rank == 1) await_relaxed(left, i + 1);
      teams[static_cast<size_t>(i)].reset();
      if (rank == 0) left.fetch_add(1, std::memory_order_relaxed);
      broadcast(*lasting, i);
      broadcast(*other, -i);
    }
    ASSERT_TRUE(lasting->barrier(within(60000)).ok());
    ASSERT_TRUE(other->barrier(within(60000)).ok());
  });
}

// A reader whose call has failed no longer reports progress, only that it left.
TEST(ShmTeam, StagingIsReusedAfterItsReadersLeft) {
  auto registry = std::make_shared<Registry>();
  MemoryStore store;
  const size_t chunk_bytes = small_settings().staging_chunk_bytes;
  const size_t slab_bytes = kPageBytes + static_cast<size_t>(small_settings().staging_bytes);
  std::atomic<int> begun{0}, left{0};  // begun: by ranks 0 and 2; left: by rank 2
  run_ranks(3, [&](int rank) {
    RankParty party(registry, small_settings());
    // Kept, because dropping a peer would also order a reader's reads.
    Result<Formation> formation = party.form(store, rank, 3);
    ASSERT_TRUE(formation.ok()) << formation.status().message();
    const Formation& f = formation.value();
    auto team = std::make_unique<ShmTeam>(party.arena, f.group_id, "test", rank, f.members,
                                          f.wait_policy, f.tuning);
    if (rank == 1) {
      await_relaxed(begun, 2);
      std::this_thread::sleep_for(milliseconds(50));  // by then the reader has read the available
                                                      // data
      team.reset();
      std::this_thread::sleep_for(milliseconds(300));  // alive, but gone from the group
      return;
    }
    std::vector<std::byte> data(2 * static_cast<size_t>(small_settings().staging_bytes));
    begun.fetch_add(1, std::memory_order_relaxed);
    // The root waits for rank 1, and never checks the reader's progress.
    Status status = team->broadcast(data.data(), data.size(), DType::kUInt8, 0, within(60000));
    EXPECT_EQ(status.code(), Code::kPeerLeft) << status.message();
    // The root first checks after the reader has left: earlier words of it would order its reads.
    if (rank == 0) await_relaxed(left, 1);
    const size_t used_bytes = party.arena->used_bytes();
    team.reset();
    if (rank == 2) {
      left.fetch_add(1, std::memory_order_relaxed);
      std::this_thread::sleep_for(milliseconds(300));
      return;
    }
    while (party.arena->used_bytes() == used_bytes) {
      std::this_thread::sleep_for(milliseconds(5));
      party.arena->release_when([] { return true; }, {});  // makes it check
    }
    Result<uint64_t> slab = party.arena->allocate(slab_bytes);
    ASSERT_TRUE(slab.ok());
    std::memset(party.arena->data() + slab.value(), 1, slab_bytes);
  });
}

// --- memory for staged data

// Staging of 1 MiB in an arena of 16 MiB, of which groups keep 4 MiB.
Settings tight_settings() {
  Settings settings;
  settings.arena_bytes = 16 << 20;
  settings.pool_bytes = 1 << 20;
  settings.staging_bytes = 1 << 20;
  settings.staging_chunk_bytes = 256 << 10;
  return settings;
}

// Rank 0 broadcasts `bytes` bytes, `calls` times in each of `groups` groups. Rank 1 starts when
// `reader_begins` returns.
void broadcast_ahead(int groups, int calls, size_t bytes,
                     const std::function<void()>& reader_begins,
                     const std::function<void(Arena&)>& root_is_done) {
  auto registry = std::make_shared<Registry>();
  MemoryStore store;
  run_ranks(2, [&](int rank) {
    RankParty party(registry, tight_settings());
    std::vector<std::unique_ptr<ShmTeam>> teams;
    for (int k = 0; k < groups; ++k)
      teams.push_back(party.team(store, rank, 2, "group" + std::to_string(k)));
    if (rank == 1) reader_begins();
    for (int call = 0; call < calls; ++call)
      for (int k = 0; k < groups; ++k) {
        const auto value = static_cast<unsigned char>(7 * call + k);
        std::vector<unsigned char> data(bytes, rank == 0 ? value : 255);
        Status status = teams[static_cast<size_t>(k)]->broadcast(data.data(), data.size(),
                                                                 DType::kUInt8, 0, within(60000));
        ASSERT_TRUE(status.ok()) << status.message();
        ASSERT_EQ(data, std::vector<unsigned char>(bytes, value)) << call << " " << k;
      }
    if (rank == 0) root_is_done(*party.arena);
    for (auto& team : teams) ASSERT_TRUE(team->barrier(within(60000)).ok());
  });
}

// Four calls: a fifth one in a group's ring waits for the readers of its first.
TEST(StagingMemory, SmallCallsThatOutrunAReaderUseLittleMemory) {
  std::atomic<bool> is_done{false};
  broadcast_ahead(
      40, 4, 1024,
      [&] {
        while (!is_done) std::this_thread::sleep_for(milliseconds(1));
      },
      [&](Arena& arena) {
        EXPECT_LT(backed_bytes(arena.fd()), size_t{8 << 20});
        is_done = true;
      });
}

TEST(StagingMemory, CallsWaitForALateReaderWhenTheArenaIsFull) {
  std::atomic<bool> has_begun{false};
  broadcast_ahead(
      40, 3, 600'000,
      [&] {
        std::this_thread::sleep_for(milliseconds(100));
        has_begun = true;
      },
      [&](Arena&) { EXPECT_TRUE(has_begun); });
}

// Rank 0 fills its arena with unread data until a call fails.
Status fill_arena_with_unread_data(const CallOptions& options,
                                   const std::function<void(RankParty&)>& first_reader) {
  auto registry = std::make_shared<Registry>();
  MemoryStore store;
  Status failed;
  std::atomic<bool> has_failed{false};
  run_ranks(3, [&](int rank) {
    RankParty party(registry, tight_settings());
    std::vector<std::unique_ptr<ShmTeam>> teams;
    for (int k = 0; k < 40; ++k)
      teams.push_back(party.team(store, rank, 3, "group" + std::to_string(k)));
    if (rank > 0) {
      if (rank == 1) first_reader(party);
      while (!has_failed) std::this_thread::sleep_for(milliseconds(1));
      return;
    }
    std::vector<unsigned char> data(600'000);
    for (size_t k = 0; k < teams.size() && failed.ok(); ++k)
      failed = teams[k]->broadcast(data.data(), data.size(), DType::kUInt8, 0, options);
    has_failed = true;
  });
  return failed;
}

TEST(StagingMemory, CallInFullArenaTimesOut) {
  const Status status = fill_arena_with_unread_data(within(200), [](RankParty&) {});
  EXPECT_EQ(status.code(), Code::kTimeout) << status.message();
  for (const char* part :
       {"timed out after 200 ms", "the arena of 16777216 bytes is full", "DSCOMM_ARENA_BYTES",
        "members of this rank's other groups have not read what it shared; if those members "
        "are only slow",
        "broadcast #1 of group"})
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
}

// Rank 2 lives but reads nothing, so no memory is returned.
TEST(StagingMemory, DeathEndsTheWaitForMemory) {
  const Status status = fill_arena_with_unread_data(within(60000), [](RankParty& party) {
    std::this_thread::sleep_for(milliseconds(100));
    party.directory->die();
  });
  EXPECT_EQ(status.code(), Code::kPeerDied) << status.message();
  EXPECT_NE(status.message().find("rank 1"), std::string::npos) << status.message();
}

// No memory will be returned, so waiting would not help.
TEST(StagingMemory, CallFailsAtOnceInArenaFullOfPermanentMemory) {
  auto registry = std::make_shared<Registry>();
  MemoryStore store;
  run_ranks(2, [&](int rank) {
    RankParty party(registry, tight_settings());
    std::unique_ptr<ShmTeam> team = party.team(store, rank, 2);
    ASSERT_TRUE(party.arena->allocate(15 << 20).ok());
    std::vector<unsigned char> data(600'000);
    const Status status =
        team->broadcast(data.data(), data.size(), DType::kUInt8, 0, within(60000));
    EXPECT_EQ(status.code(), Code::kResource) << status.message();
    EXPECT_NE(status.message().find("raise DSCOMM_ARENA_BYTES"), std::string::npos)
        << status.message();
  });
}

TEST(Arena, ReleaseMergesNeighbours) {
  std::shared_ptr<Arena> arena = Arena::create(4 << 20).value();
  const size_t sizes[] = {300 << 10, 100 << 10, 700 << 10};
  std::vector<uint64_t> offsets;
  for (size_t bytes : sizes) offsets.push_back(arena->allocate(bytes).value());
  ASSERT_TRUE(arena->allocate(kPageBytes).ok());
  for (size_t k : {size_t{0}, size_t{2}, size_t{1}}) arena->release(offsets[k], sizes[k]);
  EXPECT_EQ(arena->allocate(1100 << 10).value(), offsets[0]);
}

// Members of a group that is gone may still read its mailboxes, and must not find other data there.
TEST(Arena, MailboxPageIsReusedOnlyAsMailbox) {
  std::shared_ptr<Arena> arena = Arena::create(4 << 20).value();
  const uint64_t before = arena->allocate(kPageBytes).value();
  const uint64_t mailbox = arena->allocate_mailbox().value();
  const uint64_t after = arena->allocate(kPageBytes).value();
  arena->release(before, kPageBytes);
  arena->release(mailbox, sizeof(Mailbox));
  arena->release(after, kPageBytes);
  for (int k = 0; k < 3; ++k) EXPECT_NE(arena->allocate(kPageBytes).value(), mailbox);
  EXPECT_EQ(arena->allocate_mailbox().value(), mailbox);
}

TEST(Arena, LendLeavesRoomForPermanentMemory) {
  std::shared_ptr<Arena> arena = Arena::create(16 << 20).value();
  std::vector<uint64_t> lent;
  while (true) {
    Result<uint64_t> offset = arena->lend(1 << 20, {});
    if (!offset.ok()) break;
    lent.push_back(offset.value());
  }
  EXPECT_EQ(lent.size(), 13u);
  EXPECT_TRUE(arena->allocate(1 << 20).ok());
  bool is_read = false;
  for (uint64_t offset : lent) arena->release_when([&] { return is_read; }, {{offset, 1 << 20}});
  EXPECT_FALSE(arena->lend(1 << 20, {}).ok());
  is_read = true;
  EXPECT_TRUE(arena->lend(10 << 20, {}).ok());
}

TEST(Arena, LendServesOldestTicketFirst) {
  std::shared_ptr<Arena> arena = Arena::create(16 << 20).value();
  const uint64_t lent = arena->lend(10 << 20, {}).value();
  {
    const Arena::Ticket first(*arena, {1, 1}), second(*arena, {1, 2});
    EXPECT_FALSE(arena->lend(8 << 20, {}, &first).ok());
    // It would fit, but would keep the first one waiting for ever.
    EXPECT_FALSE(arena->lend(1 << 20, {}, &second).ok());
    EXPECT_FALSE(arena->lend(1 << 20, {}).ok());
    EXPECT_TRUE(arena->may_lend_later(first));
    arena->release_when([] { return true; }, {{lent, 10 << 20}});
    EXPECT_FALSE(arena->may_lend_later(first));
    EXPECT_TRUE(arena->may_lend_later(second));
    EXPECT_TRUE(arena->lend(8 << 20, {}, &first).ok());
  }
  EXPECT_TRUE(arena->lend(1 << 20, {}).ok());
}

// Two ranks of one process: the memory of the other one for the same call, or a later one, is
// returned only after this call.
TEST(Arena, QueuedCallAwaitsOnlyMemoryOfEarlierCallsAndOtherGroups) {
  std::shared_ptr<Arena> arena = Arena::create(16 << 20).value();
  const uint64_t same = arena->lend(1 << 20, {1, 7}).value();
  ASSERT_TRUE(arena->lend(1 << 20, {1, 8}).ok());
  const Arena::Ticket ticket(*arena, {1, 7});
  EXPECT_FALSE(arena->may_lend_later(ticket));
  arena->release_when([] { return false; }, {{same, 1 << 20}}, Arena::Borrower{1, 7});
  EXPECT_FALSE(arena->may_lend_later(ticket));
  const uint64_t earlier = arena->lend(1 << 20, {1, 6}, &ticket).value();
  EXPECT_TRUE(arena->may_lend_later(ticket));
  bool is_read = false;
  arena->release_when([&] { return is_read; }, {{earlier, 1 << 20}}, Arena::Borrower{1, 6});
  EXPECT_TRUE(arena->may_lend_later(ticket));
  is_read = true;
  const uint64_t other_group = arena->lend(10 << 20, {2, 7}, &ticket).value();
  EXPECT_TRUE(arena->may_lend_later(ticket));
  arena->release_when([] { return true; }, {{other_group, 10 << 20}});
  EXPECT_FALSE(arena->may_lend_later(ticket));
}

// Two ranks of one process: each holds memory for a call that the other one has not made yet,
// because it waits in another group.
TEST(Arena, QueuedCallDoesNotAwaitMemoryOfCallsBehindIt) {
  std::shared_ptr<Arena> arena = Arena::create(16 << 20).value();
  ASSERT_TRUE(arena->lend(10 << 20, {2, 7}).ok());
  const Arena::Ticket ticket(*arena, {1, 7});
  EXPECT_TRUE(arena->may_lend_later(ticket));
  {
    const Arena::Ticket behind(*arena, {2, 7});
    EXPECT_FALSE(arena->may_lend_later(ticket));
    EXPECT_TRUE(arena->may_lend_later(behind));
  }
  EXPECT_TRUE(arena->may_lend_later(ticket));
  const Arena::Ticket later(*arena, {2, 8});
  EXPECT_TRUE(arena->may_lend_later(ticket));
}

TEST(StagingMemory, CallFailsAtOnceIfOtherRankOfProcessHoldsMemoryForSameCall) {
  auto registry = std::make_shared<Registry>();
  MemoryStore store;
  RankParty process(registry, tight_settings());  // of both ranks
  std::latch formed(2), filled(1);
  run_ranks(2, [&](int rank) {
    std::unique_ptr<ShmTeam> team = process.team(store, rank, 2);
    formed.arrive_and_wait();
    if (rank == 0) {
      // Leaves room for one rank's staging: two pages and the table.
      const size_t kept = (14 << 20) - process.arena->used_bytes() - 4 * kPageBytes;
      EXPECT_TRUE(process.arena->allocate(kept).ok());
      filled.count_down();
    }
    filled.wait();
    std::vector<int64_t> data(1000);
    const Status status = team->all_reduce(data.data(), data.data(), data.size(),
                                           Reduction{DType::kInt64, ReduceOp::kSum}, within(10000));
    EXPECT_EQ(status.code(), Code::kResource) << status.message();
  });
}

}  // namespace
}  // namespace dscomm::test
