// How calls were carried out, for the log.
#include "core/team/call_tally.h"

#include <gtest/gtest.h>

#include "core/base/log.h"

namespace dscomm::test {
namespace {

TEST(CallTally, SummaryGivesCallsAndSizesOfEachAlgorithm) {
  CallTally tally("a team");
  tally.add(Collective::kAllReduce, "tiny", 8);
  tally.add(Collective::kAllReduce, "chunked", 4096);
  tally.add_tensor(true);
  tally.add(Collective::kAllReduce, "tiny", 4);
  tally.add(Collective::kAllReduce, "chunked", 4096);
  tally.add_tensor(false);
  EXPECT_EQ(tally.summary(Collective::kAllReduce),
            "a team: all_reduce: 2 tiny, 4 to 8 bytes; 2 chunked, 4096 bytes; "
            "1 of 2 large tensors read in place, from the pool");
  tally.set_distance("cache-near");
  tally.add(Collective::kBarrier, "tiny", 0);
  EXPECT_EQ(tally.summary(Collective::kBarrier),
            "a team: barrier: 1 tiny, 0 bytes; peers: cache-near");
  EXPECT_EQ(tally.summary(Collective::kGather), "");
}

TEST(CallTally, TallyIsMadeOnlyAtDebugLevel) {
  EXPECT_EQ(CallTally::make("0", "a team"), nullptr);
  set_log_level("debug");
  EXPECT_NE(CallTally::make("0", "a team"), nullptr);
  set_log_level("warn");
}

}  // namespace
}  // namespace dscomm::test
