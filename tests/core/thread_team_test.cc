// Tests the test tools: ThreadTeam passes the checks of every Team, and wrong Teams fail them.

#include "thread_team.h"

#include <gtest/gtest.h>

#include <thread>

#include "team_reference.h"

namespace dscomm::testing {
namespace {

RunRanks threads(int ranks) {
  return [ranks](const RankBody& body) {
    auto board = std::make_shared<ThreadBoard>(ranks);
    std::vector<std::thread> running;
    for (int rank = 0; rank < ranks; ++rank) {
      running.emplace_back([&, rank] {
        ThreadTeam team(board, rank, ranks);
        body(team);
      });
    }
    for (std::thread& thread : running) thread.join();
  };
}

TEST(ThreadTeam, EveryCollective) { check_every_collective(3, threads(3)); }
TEST(ThreadTeam, ResultsAreBitIdenticalOnAllRanks) { check_same_bits(3, threads(3)); }
TEST(ThreadTeam, MismatchedCallsFailOnAllRanks) { check_disagreements(3, threads(3)); }

TEST(ThreadTeam, TimeoutNamesTheMissingRank) {
  threads(3)([](Team& team) {
    // All threads run by then: a thread takes longer to start than the next barrier waits.
    ASSERT_TRUE(team.barrier({Deadline::after(std::chrono::seconds(60))}).ok());
    if (team.rank() == 1) return;
    Status status = team.barrier({Deadline::after(std::chrono::milliseconds(500))});
    EXPECT_EQ(status.code(), Code::kTimeout);
    EXPECT_NE(status.message().find("for 1:"), std::string::npos) << status.message();
  });
}

// A Team that rounds after each of two levels gives other results than one that rounds once.
TEST(TeamReference, ReferenceValuesRevealDoubleRounding) {
  for (DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    Reduction sum{dtype, ReduceOp::kSum};
    bool differs = false;
    for (size_t index = 0; index < 1000 && !differs; ++index) {
      uint16_t source[4], pair[2], twice, once;
      const void* all[4];
      for (int rank = 0; rank < 4; ++rank) {
        store_value(sum.dtype, reinterpret_cast<std::byte*>(&source[rank]),
                    value_of(sum, rank, index, 7919));
        all[rank] = &source[rank];
      }
      const void* pairs[2] = {&pair[0], &pair[1]};
      reduce_scalar(&pair[0], all, 2, 1, sum, 1);
      reduce_scalar(&pair[1], all + 2, 2, 1, sum, 1);
      reduce_scalar(&twice, pairs, 2, 1, sum, 1);
      reduce_scalar(&once, all, 4, 1, sum, 1);
      differs = once != twice;
    }
    EXPECT_TRUE(differs) << dtype_name(dtype)
                         << ": the values of the reference do not show double rounding";
  }
}

}  // namespace
}  // namespace dscomm::testing
