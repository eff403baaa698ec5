// The toy dtype in an all-reduce between ranks: it wraps and has bitwise operators.
#include <gtest/gtest.h>

#include <cstdint>

#include "shm_ranks.h"

namespace dscomm::test {
namespace {

TEST(ToyDType, AllReduceWrapsAndCombinesBits) {
  run_shm_ranks(2, [](Team& team) {
    const uint16_t in = team.rank() == 0 ? 0xfff0 : 0x0013;
    const CallOptions options{Deadline::after(std::chrono::seconds(60))};
    uint16_t out = 0;
    ASSERT_TRUE(team.all_reduce(&in, &out, 1, {DType::kBits16, ReduceOp::kSum}, options).ok());
    EXPECT_EQ(out, 0x0003);
    ASSERT_TRUE(team.all_reduce(&in, &out, 1, {DType::kBits16, ReduceOp::kBxor}, options).ok());
    EXPECT_EQ(out, 0xffe3);
  });
}

}  // namespace
}  // namespace dscomm::test
