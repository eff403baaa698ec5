#include "core/messages/doorbell.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

namespace dscomm {
namespace {

struct Bell {
  ArenaId token;
  std::unique_ptr<Doorbell> doorbell = Doorbell::create(&token).value();
};

TEST(Doorbell, RingEndsEverySleepUntilCleared) {
  Bell sleeper, ringer;
  ringer.doorbell->ring(sleeper.token);
  sleeper.doorbell->sleep(-1);  // would never return
  sleeper.doorbell->sleep(-1);
  sleeper.doorbell->clear();
  ringer.doorbell->ring(sleeper.token);
  sleeper.doorbell->sleep(-1);
}

// The kernel charges unread bytes to their sender, up to a few hundred.
TEST(Doorbell, RingAfterManyUnreadRingsWakesSleeper) {
  constexpr int kSleepers = 100, kRings = 20;  // more than a socket holds and than one sender may
                                               // have unread
  std::vector<Bell> sleepers(kSleepers);
  Bell ringer;
  for (int i = 0; i < kRings; ++i)
    for (Bell& sleeper : sleepers) ringer.doorbell->ring(sleeper.token);
  for (Bell& sleeper : sleepers) sleeper.doorbell->sleep(-1);
  Bell last;
  ringer.doorbell->ring(last.token);
  last.doorbell->sleep(-1);  // would never return
}

TEST(Doorbell, RingOfClosedDoorbellIsHarmless) {
  ArenaId gone;
  {
    Bell bell;
    gone = bell.token;
  }
  Bell().doorbell->ring(gone);
}

}  // namespace
}  // namespace dscomm
