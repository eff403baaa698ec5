// Distance: what a rank concludes from the loads that it has timed.
#include "core/shm/distance.h"

#include <gtest/gtest.h>

namespace dscomm {
namespace {

void add(Distance& distance, int member, int64_t load_ns, int times = 2) {
  for (int i = 0; i < times; ++i) distance.add(member, load_ns);
}

TEST(Distance, NewDistanceIsNeitherFarNorSameCore) {
  Distance distance(2);
  EXPECT_FALSE(distance.is_far());
  EXPECT_FALSE(distance.is_same_core());
}

TEST(Distance, TwoFarLoadsInARowChangeTheState) {
  Distance distance(2);
  distance.add(1, 120);
  EXPECT_FALSE(distance.is_far());
  distance.add(1, 120);
  EXPECT_TRUE(distance.is_far());
}

TEST(Distance, OneInterruptedLoadDoesNotChangeTheState) {
  Distance distance(2);
  for (int i = 0; i < 100; ++i) {
    add(distance, 1, 25);
    distance.add(1, 5'000'000);
    EXPECT_FALSE(distance.is_far());
  }
}

TEST(Distance, LoadsAfterMigrationChangeTheState) {
  Distance distance(2);
  for (int i = 0; i < 3; ++i) {
    add(distance, 1, 120);
    EXPECT_TRUE(distance.is_far());
    add(distance, 1, 25);
    EXPECT_FALSE(distance.is_far());
  }
}

TEST(Distance, MajorityOfMembersDecides) {
  Distance distance(4);
  add(distance, 1, 120);
  add(distance, 2, 25);
  EXPECT_FALSE(distance.is_far());
  add(distance, 3, 120);
  EXPECT_TRUE(distance.is_far());
  add(distance, 1, 25);
  EXPECT_FALSE(distance.is_far());
}

TEST(Distance, SameCoreIsDecidedByMeanOfManyLoads) {
  Distance distance(2);
  // Like the clock of a virtual machine, with steps of 10 ns.
  for (int64_t load_ns : {-10, 0, 0, 10, 10, 0, -10, 0, 10, 0, 0, 10, 0, -10, 0})
    distance.add(1, load_ns);
  EXPECT_FALSE(distance.is_same_core());
  distance.add(1, 10);
  EXPECT_TRUE(distance.is_same_core());
  for (int64_t load_ns : {20, 30, 10, 20, 30, 20, 10, 30, 20, 20, 30, 10, 20, 30, 20})
    distance.add(1, load_ns);
  EXPECT_FALSE(distance.is_same_core());
}

TEST(Distance, SameCoreAfterMigrationIsFalse) {
  Distance distance(2);
  add(distance, 1, 0, 16);
  EXPECT_TRUE(distance.is_same_core());
  add(distance, 1, 120);
  EXPECT_TRUE(distance.is_far());
  EXPECT_FALSE(distance.is_same_core());
  add(distance, 1, 25);
  EXPECT_FALSE(distance.is_far());
  EXPECT_FALSE(distance.is_same_core());
}

TEST(Distance, SameCoreRequiresAllMembers) {
  Distance distance(3);
  add(distance, 1, 0, 16);
  EXPECT_TRUE(distance.is_same_core());
  add(distance, 2, 25, 16);
  EXPECT_FALSE(distance.is_same_core());
  add(distance, 2, 0, 64);
  EXPECT_TRUE(distance.is_same_core());
}

}  // namespace
}  // namespace dscomm
