// CacheDistance: what a rank concludes from the loads that it has timed.
#include "core/shm/mailbox/cache_distance.h"

#include <gtest/gtest.h>

namespace dscomm {
namespace {

void add(CacheDistance& distance, int member, int64_t load_ns, int times = 2) {
  for (int i = 0; i < times; ++i) distance.add(member, load_ns);
}

TEST(CacheDistance, NewDistanceIsNeitherFarNorSameCore) {
  CacheDistance distance(2);
  EXPECT_FALSE(distance.is_far());
  EXPECT_FALSE(distance.is_same_core());
}

TEST(CacheDistance, TwoFarLoadsInARowMakeItFar) {
  CacheDistance distance(2);
  distance.add(1, 120);
  EXPECT_FALSE(distance.is_far());
  distance.add(1, 120);
  EXPECT_TRUE(distance.is_far());
}

TEST(CacheDistance, OneInterruptedLoadDoesNotMakeItFar) {
  CacheDistance distance(2);
  for (int i = 0; i < 100; ++i) {
    add(distance, 1, 25);
    distance.add(1, 5'000'000);
    EXPECT_FALSE(distance.is_far());
  }
}

TEST(CacheDistance, DistanceFollowsLoadsAfterMigration) {
  CacheDistance distance(2);
  for (int i = 0; i < 3; ++i) {
    add(distance, 1, 120);
    EXPECT_TRUE(distance.is_far());
    add(distance, 1, 25);
    EXPECT_FALSE(distance.is_far());
  }
}

TEST(CacheDistance, FarRequiresMajorityOfMembers) {
  CacheDistance distance(4);
  add(distance, 1, 120);
  add(distance, 2, 25);
  EXPECT_FALSE(distance.is_far());
  add(distance, 3, 120);
  EXPECT_TRUE(distance.is_far());
  add(distance, 1, 25);
  EXPECT_FALSE(distance.is_far());
}

TEST(CacheDistance, SameCoreIsDecidedByMeanOfManyLoads) {
  CacheDistance distance(2);
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

TEST(CacheDistance, SameCoreAfterMigrationIsFalse) {
  CacheDistance distance(2);
  add(distance, 1, 0, 16);
  EXPECT_TRUE(distance.is_same_core());
  add(distance, 1, 120);
  EXPECT_TRUE(distance.is_far());
  EXPECT_FALSE(distance.is_same_core());
  add(distance, 1, 25);
  EXPECT_FALSE(distance.is_far());
  EXPECT_FALSE(distance.is_same_core());
}

TEST(CacheDistance, SameCoreRequiresAllMembers) {
  CacheDistance distance(3);
  add(distance, 1, 0, 16);
  EXPECT_TRUE(distance.is_same_core());
  add(distance, 2, 25, 16);
  EXPECT_FALSE(distance.is_same_core());
  add(distance, 2, 0, 64);
  EXPECT_TRUE(distance.is_same_core());
}

}  // namespace
}  // namespace dscomm
