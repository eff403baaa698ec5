// Durations in messages.
#include "core/base/duration.h"

#include <gtest/gtest.h>

namespace dscomm {
namespace {

TEST(Duration, DurationTextUsesReadableUnit) {
  const std::pair<int64_t, const char*> expected[] = {
      {0, "0 ms"},        {999, "999 ms"},       {1000, "1 s"},         {2500, "2.5 s"},
      {1001, "1.001 s"},  {90'000, "90 s"},      {60'000, "60 s"},      {120'000, "2 min"},
      {150'000, "150 s"}, {1'800'000, "30 min"}, {7'200'000, "120 min"}};
  for (const auto& [milliseconds, text] : expected) EXPECT_EQ(duration_text(milliseconds), text);
}

}  // namespace
}  // namespace dscomm
