#include "core/team/self_team.h"

#include <gtest/gtest.h>

#include <vector>

#include "team_reference.h"

namespace dscomm::testing {
namespace {

CallOptions soon() { return {Deadline::after(std::chrono::milliseconds(1000))}; }

TEST(SelfTeam, EveryCollective) {
  check_every_collective(1, [](const RankBody& body) {
    SelfTeam team;
    body(team);
  });
}

TEST(SelfTeam, AverageKeepsValuesAndPremulSumScalesThem) {
  SelfTeam team;
  std::vector<float> in{1, -2, 3}, out(3);
  ASSERT_TRUE(
      team.all_reduce(in.data(), out.data(), 3, {DType::kFloat32, ReduceOp::kAvg}, soon()).ok());
  EXPECT_EQ(out, in);
  Reduction doubled{DType::kFloat32, ReduceOp::kPremulSum, 2.0};
  ASSERT_TRUE(team.all_reduce(in.data(), in.data(), 3, doubled, soon()).ok());
  EXPECT_EQ(in, (std::vector<float>{2, -4, 6}));
}

TEST(SelfTeam, InvalidArgumentsFailWithoutEndingTheTeam) {
  SelfTeam team;
  float value = 1, other = 2;
  std::vector<const void*> ins{&value}, no_ins;
  std::vector<void*> outs{&other}, no_outs;
  std::vector<size_t> one{1}, two{2}, none;
  const DType dtype = DType::kFloat32;
  std::vector<Status> statuses{
      team.broadcast(&value, 1, dtype, 1, soon()),
      team.broadcast(&value, 1, dtype, -1, soon()),
      team.reduce(&value, &other, 1, {dtype}, 3, soon()),
      team.gather(&value, 1, dtype, outs, one, 1, soon()),
      team.scatter(ins, one, &other, 1, dtype, 1, soon()),
      team.all_gather(&value, 1, dtype, no_outs, none, soon()),
      team.all_gather(&value, 1, dtype, outs, two, soon()),
      team.reduce_scatter(no_ins, none, &other, {dtype}, soon()),
      team.gather(&value, 1, dtype, outs, two, 0, soon()),
      team.scatter(ins, two, &other, 1, dtype, 0, soon()),
      team.all_to_all(ins, one, outs, two, dtype, soon()),
      team.all_to_all(ins, one, outs, none, dtype, soon()),
  };
  for (const Status& status : statuses) {
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_FALSE(status.message().empty());
  }
  EXPECT_EQ(other, 2) << "nothing may be copied by a call that is refused";
  Status status = team.all_reduce(&value, &other, 1, {DType::kInt32, ReduceOp::kAvg}, soon());
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_TRUE(team.failure().ok());
  EXPECT_TRUE(team.barrier(soon()).ok());
}

TEST(SelfTeam, TheFirstCauseIsKept) {
  SelfTeam team;
  team.abort(make_status(Code::kAborted, "first"));
  team.abort(make_status(Code::kTimeout, "second"));
  float value = 1;
  for (const Status& status : {team.failure(), team.barrier(soon()),
                               team.all_reduce(&value, &value, 1, {DType::kFloat32}, soon())}) {
    EXPECT_EQ(status.code(), Code::kAborted);
    EXPECT_EQ(status.message(), "first");
  }
}

}  // namespace
}  // namespace dscomm::testing
