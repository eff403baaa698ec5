// PMI-1 as MPICH uses it: a rank's requests, and the answers about other ranks.
#include "mpi/mpich/pmi_session.h"

#include <gtest/gtest.h>

#include <random>

namespace dscomm::test {
namespace {

constexpr const char* kNotThere = "cmd=get_result rc=-1 msg=key_not_found value=unknown\n";

TEST(PmiSession, JobQueriesAreAnswered) {
  PmiSession rank(3, "(vector,(0,1,3))");
  EXPECT_EQ(rank.answer("cmd=init pmi_version=1 pmi_subversion=1"),
            "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n");
  EXPECT_EQ(rank.answer("cmd=get_universe_size"), "cmd=universe_size size=3 rc=0\n");
  EXPECT_EQ(rank.answer("cmd=get kvsname=dscomm key=PMI_process_mapping"),
            "cmd=get_result rc=0 msg=success value=(vector,(0,1,3))\n");
  EXPECT_EQ(rank.answer("cmd=finalize"), "cmd=finalize_ack rc=0\n");
}

TEST(PmiSession, ValuesAreVisibleToOtherRanksAfterBarrier) {
  PmiSession one(2, ""), other(2, "");
  EXPECT_EQ(one.answer("cmd=put kvsname=dscomm key=address value=10.0.0.1 port=7"),
            "cmd=put_result rc=0 msg=success\n");
  EXPECT_EQ(one.answer("cmd=get kvsname=dscomm key=address"),
            "cmd=get_result rc=0 msg=success value=10.0.0.1 port=7\n");
  EXPECT_EQ(other.answer("cmd=get kvsname=dscomm key=address"), kNotThere);

  for (PmiSession* rank : {&one, &other}) {
    EXPECT_EQ(rank->answer("cmd=barrier_in"), "");
    EXPECT_TRUE(rank->is_in_barrier());
  }
  const std::vector<std::string> said{one.take_values(), other.take_values()};
  for (PmiSession* rank : {&one, &other}) {
    EXPECT_TRUE(rank->add_values(said));
    EXPECT_EQ(rank->leave_barrier(), "cmd=barrier_out rc=0\n");
    EXPECT_FALSE(rank->is_in_barrier());
    EXPECT_EQ(rank->answer("cmd=get kvsname=dscomm key=address"),
              "cmd=get_result rc=0 msg=success value=10.0.0.1 port=7\n");
  }
  // The next barrier carries only new values.
  EXPECT_TRUE(other.add_values({one.take_values()}));
  EXPECT_EQ(one.take_values(), other.take_values());
}

TEST(PmiSession, LaterValueReplacesEarlierOne) {
  PmiSession rank(1, "");
  rank.answer("cmd=put kvsname=dscomm key=a value=1");
  EXPECT_TRUE(rank.add_values({rank.take_values()}));
  rank.answer("cmd=put kvsname=dscomm key=a value=2");
  EXPECT_TRUE(rank.add_values({rank.take_values()}));
  EXPECT_EQ(rank.answer("cmd=get kvsname=dscomm key=a"),
            "cmd=get_result rc=0 msg=success value=2\n");
}

TEST(PmiSession, SpawnIsRefusedInOneAnswer) {
  PmiSession rank(1, "");
  EXPECT_EQ(rank.answer("mcmd=spawn"), "");
  EXPECT_EQ(rank.answer("nprocs=2"), "");
  EXPECT_EQ(rank.answer("endcmd"), "cmd=spawn_result rc=-1 status=dscomm_starts_no_ranks\n");
  EXPECT_EQ(rank.answer("cmd=get_appnum"), "cmd=appnum appnum=0 rc=0\n");
}

TEST(PmiSession, UnknownCommandIsRefused) {
  PmiSession rank(1, "");
  EXPECT_EQ(rank.answer("cmd=lookup_name service=x"),
            "cmd=lookup_name_result rc=-1 msg=not_known_to_dscomm\n");
}

// Any line gets at most one line as its answer.
TEST(PmiSession, AnyLineGetsAtMostOneAnswerLine) {
  std::mt19937 random(1);
  const std::vector<std::string> words{"cmd=", "put", "get", "barrier_in", "key=",   "value=", " ",
                                       "=",    "a",   "\0",  "mcmd=spawn", "endcmd", "init"};
  PmiSession rank(2, "(vector,(0,1,2))");
  for (int i = 0; i < 20000; ++i) {
    std::string line;
    for (size_t count = random() % 8; count > 0; --count) line += words[random() % words.size()];
    const std::string answer = rank.answer(line);
    EXPECT_TRUE(answer.empty() || answer.find('\n') == answer.size() - 1) << line;
    if (rank.is_in_barrier()) {
      std::string put = rank.take_values();
      // Data that the store has damaged is refused or parsed, and causes no other harm.
      if (!put.empty() && random() % 4 == 0) put[random() % put.size()] ^= 1 << random() % 8;
      static_cast<void>(rank.add_values({put}));
      rank.leave_barrier();
    }
  }
}

TEST(NodeMap, NodeMapGroupsRanksByHost) {
  EXPECT_EQ(node_map_of({0, 0, 1, 1}), "(vector,(0,1,2),(1,1,2))");
  EXPECT_EQ(node_map_of({0, 1, 0}), "(vector,(0,1,1),(1,1,1),(0,1,1))");
  EXPECT_EQ(node_map_of({0}), "(vector,(0,1,1))");
}

}  // namespace
}  // namespace dscomm::test
