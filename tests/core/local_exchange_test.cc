// The leader of a host and its members, apart from the content of their agreement; and how a rank
// finds the ranks of its host.
#include "core/formation/local_exchange.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/team/departure.h"
#include "environment.h"
#include "in_process.h"

namespace dscomm::test {
namespace {

using std::chrono::seconds;

LocalRanks ranks_of_this_test(int count) {
  LocalRanks local;
  for (int rank = 0; rank < count; ++rank) local.ranks.push_back(rank);
  local.group =
      std::to_string(getpid()) + ::testing::UnitTest::GetInstance()->current_test_info()->name();
  return local;
}

LocalEntry entry_of(int rank) {
  return {rank, "rank " + std::to_string(rank), 3, "0, 1, 2", {"all", std::to_string(rank)}};
}

const GiveUpCheck kNoReason = [] { return Status(); };

TEST(LocalExchange, DeathsOfLeaderAndMemberAreReported) {
  const LocalRanks local = ranks_of_this_test(3);
  const auto make_deadline = [] { return Deadline::after(seconds(60)); };
  for (int victim : {0, 2}) {
    std::unique_ptr<LocalLeader> leader = LocalLeader::listen(local, entry_of(0));
    ASSERT_NE(leader, nullptr);
    EXPECT_EQ(LocalLeader::listen(local, entry_of(0)), nullptr);  // the name is taken
    std::barrier joined(3), dead(3);
    run_ranks(3, [&](int rank) {
      if (rank == 0) {
        while (!leader->awaited().empty())
          ASSERT_TRUE(leader->await_messages(10'000'000, make_deadline()).ok());
        EXPECT_EQ(leader->entries().at(2).own, "2");
        joined.arrive_and_wait();
        if (victim == 0) leader.reset();
        dead.arrive_and_wait();
        if (victim == 0) return;
        Status death;
        while (death.ok()) death = leader->await_messages(10'000'000, make_deadline());
        EXPECT_EQ(death.code(), Code::kPeerDied);
        EXPECT_EQ(death.message(), std::string("rank 2 died or exited") + kDeathAdvice);
        leader->send_failure(death);
        return;
      }
      auto member = std::make_unique<LocalMember>(local);
      Result<bool> has_joined = member->join_leader(entry_of(rank), kNoReason, make_deadline());
      EXPECT_TRUE(has_joined.ok() && has_joined.value());
      joined.arrive_and_wait();
      if (rank == victim) member.reset();
      dead.arrive_and_wait();
      if (rank == victim) return;
      Result<LocalMessage> word = member->await(kNoReason, make_deadline());
      ASSERT_FALSE(word.ok());
      EXPECT_EQ(word.status().message(),
                "rank " + std::to_string(victim) + " died or exited" + kDeathAdvice);
      EXPECT_EQ(member->has_ended(), victim == 0);
    });
  }
}

TEST(LocalExchange, FailureBeforeConfirmationReachesTheMember) {
  const LocalRanks local = ranks_of_this_test(2);
  const auto make_deadline = [] { return Deadline::after(seconds(60)); };
  std::unique_ptr<LocalLeader> leader = LocalLeader::listen(local, entry_of(0));
  ASSERT_NE(leader, nullptr);
  std::atomic<bool> has_called{false};
  run_ranks(2, [&](int rank) {
    if (rank == 0) {
      while (!has_called) std::this_thread::yield();
      EXPECT_TRUE(leader->handle_messages().ok());
      EXPECT_EQ(leader->awaited().count(1), 1u);
      leader->send_failure(Status(Code::kResource, "no memory"));
      leader.reset();
      return;
    }
    LocalMember member(local);
    const auto call = [&] {
      has_called = true;
      return Status();
    };
    Result<bool> joined = member.join_leader(entry_of(1), call, make_deadline());
    ASSERT_TRUE(joined.ok() && joined.value());
    EXPECT_EQ(member.await(kNoReason, make_deadline()).status().message(), "no memory");
  });
}

// A member's report about a superseded table does not count for the next one.
TEST(LocalExchange, ReportOnSupersededTableIsIgnored) {
  const LocalRanks local = ranks_of_this_test(2);
  const auto make_deadline = [] { return Deadline::after(seconds(60)); };
  std::unique_ptr<LocalLeader> leader = LocalLeader::listen(local, entry_of(0));
  ASSERT_NE(leader, nullptr);
  std::barrier step(2);
  run_ranks(2, [&](int rank) {
    if (rank == 0) {
      while (!leader->awaited().empty())
        ASSERT_TRUE(leader->await_messages(10'000'000, make_deadline()).ok());
      leader->send_table(7, "first");
      step.arrive_and_wait();  // the leader has a report of it
      leader->begin_table();
      EXPECT_TRUE(leader->handle_messages().ok());
      leader->send_table(8, "second");
      step.arrive_and_wait();  // a member has failed on the first table
      EXPECT_TRUE(leader->handle_messages().ok());
      EXPECT_EQ(leader->reports().size(), 0u);
      EXPECT_EQ(leader->without_report(), "rank 1");
      step.arrive_and_wait();
      while (leader->reports().empty())
        ASSERT_TRUE(leader->await_messages(10'000'000, make_deadline()).ok());
      EXPECT_EQ(leader->reports().at(1), "fine");
      step.arrive_and_wait();
      return;
    }
    LocalMember member(local);
    ASSERT_TRUE(member.join_leader(entry_of(1), kNoReason, make_deadline()).value());
    EXPECT_EQ(member.await(kNoReason, make_deadline()).value().kind, LocalMessageKind::kTable);
    member.report("bad");
    step.arrive_and_wait();
    // The answer is the next table.
    EXPECT_EQ(member.fail(Status(Code::kResource, "x"), make_deadline()).value().kind,
              LocalMessageKind::kTable);
    step.arrive_and_wait();
    step.arrive_and_wait();
    member.report("fine");
    step.arrive_and_wait();
  });
}

// A failing member asks for an earlier cause; a member that confirms nothing does not count.
TEST(LocalExchange, UnconfirmedMemberIsIgnoredAndEarlierCauseWins) {
  const LocalRanks local = ranks_of_this_test(3);
  const auto make_deadline = [] { return Deadline::after(seconds(60)); };
  std::unique_ptr<LocalLeader> leader = LocalLeader::listen(local, entry_of(0));
  ASSERT_NE(leader, nullptr);
  LocalMember late(local);
  // The leader does not answer.
  Result<bool> joined = late.join_leader(entry_of(1), kNoReason, make_deadline());
  ASSERT_TRUE(joined.ok());
  EXPECT_FALSE(joined.value());
  EXPECT_TRUE(leader->handle_messages().ok());
  EXPECT_EQ(leader->entries().size(), 0u);
  EXPECT_EQ(leader->awaited().count(2), 1u);
  leader->stop_awaiting(1);
  run_ranks(2, [&](int thread) {
    if (thread == 0) {
      Status cause;
      while (cause.ok()) cause = leader->await_messages(10'000'000, make_deadline());
      EXPECT_EQ(cause.message(), "no memory");
      leader->send_failure(Status(Code::kAborted, "something before"));
      return;
    }
    LocalMember member(local);
    ASSERT_TRUE(member.join_leader(entry_of(2), kNoReason, make_deadline()).value());
    EXPECT_EQ(member.fail(Status(Code::kResource, "no memory"), make_deadline()).status().message(),
              "something before");
  });
}

TEST(LocalRanks, EnvironmentOfAnotherWorldGivesNoRanks) {
  const auto ranks = [](int rank, int size) {
    return local_ranks_of_launcher(rank, size, "0").ranks;
  };
  const std::vector<int> none, second_host{4, 5, 6, 7};
  EXPECT_EQ(ranks(5, 8), none);
  Environment environment{{"TORCHELASTIC_RUN_ID", "none"},
                          {"RANK", "5"},
                          {"WORLD_SIZE", "8"},
                          {"LOCAL_RANK", "1"},
                          {"LOCAL_WORLD_SIZE", "4"},
                          {"MASTER_ADDR", "a"},
                          {"MASTER_PORT", "1234"},
                          {"TORCHELASTIC_RESTART_COUNT", "0"}};
  EXPECT_EQ(ranks(5, 8), second_host);
  EXPECT_EQ(ranks(1, 2), none);  // a process that inherits the variables is in another world
  EXPECT_EQ(ranks(5, 16), none);
  const std::string first = local_ranks_of_launcher(5, 8, "0").group;
  EXPECT_NE(local_ranks_of_launcher(5, 8, "1").group, first);
  setenv("TORCHELASTIC_RESTART_COUNT", "1", 1);
  EXPECT_NE(local_ranks_of_launcher(5, 8, "0").group, first);
  for (const char* local_rank : {"", "x", "-1", "4", "6"}) {
    setenv("LOCAL_RANK", local_rank, 1);
    EXPECT_EQ(ranks(5, 8), none) << local_rank;
  }
  setenv("LOCAL_RANK", "0", 1);
  EXPECT_EQ(ranks(5, 8), none);  // would be ranks 5 to 8, beyond the world
}

}  // namespace
}  // namespace dscomm::test
