// The toy collective: a scan by each Team of the core. EveryCollective of each Team checks it, too.
#include <gtest/gtest.h>

#include <cstdint>

#include "core/team/call.h"
#include "core/team/call_record.h"
#include "core/team/self_team.h"
#include "shm_ranks.h"

namespace dscomm::test {
namespace {

const Reduction kSumOfInts{DType::kInt64, ReduceOp::kSum};

CallOptions soon() { return {Deadline::after(std::chrono::seconds(60))}; }

TEST(ToyCollective, ScanAddsRanksUpToThisOne) {
  run_shm_ranks(4, [](Team& team) {
    int64_t value = int64_t{1} << (8 * team.rank());
    ASSERT_TRUE(team.scan(&value, &value, 1, kSumOfInts, soon()).ok());
    EXPECT_EQ(value, 0x01010101 & ((int64_t{1} << (8 * team.rank() + 1)) - 1));
  });
}

TEST(ToyCollective, ScanByOneRankIsACopy) {
  SelfTeam team;
  const int64_t in = 7;
  int64_t out = 0;
  ASSERT_TRUE(team.scan(&in, &out, 1, kSumOfInts, soon()).ok());
  EXPECT_EQ(out, 7);
}

TEST(ToyCollective, RecordAndRefusalNameTheScan) {
  EXPECT_EQ(describe_call(make_record(Collective::kScan, kSumOfInts, 3, soon())),
            "scan(int64[3], SUM)");
  SelfTeam team;
  const float in = 1;
  float out = 0;
  EXPECT_EQ(team.scan(&in, &out, 1, {DType::kFloat32, ReduceOp::kBand}, soon()).code(),
            Code::kUnsupported);
}

}  // namespace
}  // namespace dscomm::test
