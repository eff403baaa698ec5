// The ends of messages about timeouts.
#include "core/base/timeout_advice.h"

#include <gtest/gtest.h>

namespace dscomm {
namespace {

constexpr const char* kRaise =
    " only slow, raise the timeout (timeout= of init_process_group or new_group)";

TEST(TimeoutAdvice, OneSlowRankIsNamed) {
  for (const char* awaited : {"rank 12 (pid 5 on host a), which is sleeping (state S)",
                              "rank 12 (global rank 30, pid 5 on host a)"})
    EXPECT_EQ(timeout_advice(awaited), std::string("; if rank 12 is") + kRaise);
}

TEST(TimeoutAdvice, AdviceForSeveralSlowRanksOrNoneNamesNoRank) {
  EXPECT_EQ(timeout_advice(""), std::string("; if these ranks are") + kRaise);
  EXPECT_EQ(timeout_advice("rank 1 (pid 5 on host a); rank 2 (pid 6 on host a)"),
            std::string("; if these ranks are") + kRaise);
}

TEST(TimeoutAdvice, AdviceForStoppedProcessesGivesContinueCommand) {
  const std::string stopped = "rank 1 (global rank 9, pid 5 on host a), which is stopped (state T)";
  EXPECT_EQ(timeout_advice(stopped), "; continue the stopped process: kill -CONT 5 on host a");
  EXPECT_EQ(timeout_advice("rank 0 (pid 4 on host a), which is sleeping (state S); " + stopped +
                           "; rank 2 (pid 6 on host b), which is stopped (state T)"),
            "; continue the stopped process: kill -CONT 5 on host a, kill -CONT 6 on host b");
}

}  // namespace
}  // namespace dscomm
