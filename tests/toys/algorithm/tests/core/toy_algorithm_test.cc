// The toy algorithm of an all-reduce: chosen by size, noted in the log, with the right result.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/base/log.h"
#include "shm_ranks.h"

namespace dscomm::test {
namespace {

TEST(ToyAlgorithm, AllReduceOf116BytesGoesByRoot) {
  ::testing::internal::CaptureStderr();
  set_log_level("debug");
  run_shm_ranks(3, [](Team& team) {
    for (int call = 0; call < 100; ++call) {
      std::vector<float> data(29, static_cast<float>(team.rank() + call));
      const CallOptions options{Deadline::after(std::chrono::seconds(60))};
      const Status status = team.all_reduce(data.data(), data.data(), data.size(),
                                            {DType::kFloat32, ReduceOp::kSum}, options);
      ASSERT_TRUE(status.ok()) << status.message();
      for (float value : data) ASSERT_EQ(value, static_cast<float>(3 + 3 * call));
    }
  });
  set_log_level("warn");
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("first all_reduce by root: 116 bytes"), std::string::npos) << log;
}

}  // namespace
}  // namespace dscomm::test
