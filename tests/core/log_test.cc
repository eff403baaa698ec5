// Lines of the log.
#include "core/base/log.h"

#include <gtest/gtest.h>
#include <unistd.h>

namespace dscomm {
namespace {

TEST(Log, LineNamesTheRankOnceItIsKnown) {
  const auto logged = [] {
    ::testing::internal::CaptureStderr();
    log_line(LogLevel::kWarn, "careful");
    return ::testing::internal::GetCapturedStderr();
  };
  const std::string pid = std::to_string(getpid());
  set_log_rank(-1);
  EXPECT_EQ(logged(), "[dscomm pid " + pid + "] warning: careful\n");
  set_log_rank(3);
  EXPECT_EQ(logged(), "[dscomm rank 3 pid " + pid + "] warning: careful\n");
  set_log_rank(-1);
}

}  // namespace
}  // namespace dscomm
