// Which members are gone, and the effect on pending operations.
#include "core/messages/gone_members.h"

#include <gtest/gtest.h>

namespace dscomm {
namespace {

constexpr MemberLife kLives{}, kDied{.died = true}, kLeft{.left = true},
    kDiedUnread{.died = true, .unread = true}, kLeftUnread{.left = true, .unread = true};

std::string name(int member) { return "rank " + std::to_string(member); }

// Rank 3 ended by an exception; rank 4 ended without leaving.
Departure departure(int member) {
  if (member == 3) return {.exception = "ValueError"};
  return member == 4 ? Departure{.exception = ""} : Departure();
}

std::optional<Status> ask(bool sending, int peer, std::vector<MemberLife> members) {
  return can_never_complete(sending, peer, 0, members, "receive: ", name, departure);
}

TEST(GoneMembers, MemberThatLeavesAndExitsDuringCheckCountsAsLeft) {
  bool left = false, lives = true;
  const auto alive = [&] {
    const bool before = lives;
    left = true;
    lives = false;
    return before;
  };
  const auto has_left = [&] { return left; };
  for (int look = 0; look < 2; ++look) {
    const MemberLife life = read_member_life(alive, has_left);
    EXPECT_TRUE(life.left);
    EXPECT_FALSE(life.died);
  }
}

TEST(GoneMembers, MemberThatExitsWithoutLeavingCountsAsDied) {
  const MemberLife life = read_member_life([] { return false; }, [] { return false; });
  EXPECT_TRUE(life.died);
  EXPECT_FALSE(life.left);
}

TEST(GoneMembers, ReceiveContinuesWhileSourceHasUnreadCells) {
  EXPECT_FALSE(ask(false, 1, {kLives, kLives, kDied}).has_value());
  EXPECT_FALSE(ask(false, 1, {kLives, kDiedUnread}).has_value());
  EXPECT_FALSE(ask(false, 1, {kLives, kLeftUnread}).has_value());
  EXPECT_EQ(ask(false, 1, {kLives, kDied})->code(), Code::kPeerDied);
  EXPECT_EQ(ask(false, 1, {kLives, kLeft})->code(), Code::kPeerLeft);
}

TEST(GoneMembers, SendFailsOnceDestinationIsGone) {
  EXPECT_FALSE(ask(true, 1, {kLives, kLives, kDied}).has_value());
  EXPECT_EQ(ask(true, 1, {kLives, kDiedUnread})->code(), Code::kPeerDied);
  EXPECT_EQ(ask(true, 1, {kLives, kLeftUnread})->code(), Code::kPeerLeft);
}

TEST(GoneMembers, AnySourceReceiveFailsOnceNoSenderRemains) {
  EXPECT_FALSE(ask(false, -1, {kLives, kDied, kLives}).has_value());
  EXPECT_FALSE(ask(false, -1, {kLives, kDied, kLeftUnread}).has_value());
  EXPECT_FALSE(ask(false, -1, {kLives, kDiedUnread, kLeft}).has_value());
  const Status died = *ask(false, -1, {kLives, kDied, kLeft});
  EXPECT_EQ(died.code(), Code::kPeerDied);
  EXPECT_NE(died.message().find("rank 1 died, rank 2 left the group"), std::string::npos)
      << died.message();
  const Status left = *ask(false, -1, {kLives, kLeft, kLeft});
  EXPECT_EQ(left.code(), Code::kPeerLeft);
  EXPECT_NE(left.message().find("rank 1 left the group, rank 2 left the group"), std::string::npos)
      << left.message();
}

TEST(GoneMembers, TextNamesMembersThatAreGone) {
  const std::vector<MemberLife> members{kLives, kDied, kLives, kLeft};
  EXPECT_EQ(list_gone(0, members, name, departure),
            "rank 1 died, rank 3 was ended by an unhandled ValueError");
  EXPECT_EQ(list_gone(0, std::vector<MemberLife>(3), name, departure), "");
}

TEST(GoneMembers, ErrorTextSaysHowMemberEnded) {
  const std::vector<MemberLife> members{kLives, kLives, kLeft, kLeft, kLeft};
  EXPECT_EQ(ask(true, 2, members)->message(),
            "receive: rank 2 left the group before it received this; every send needs its receive");
  EXPECT_EQ(ask(false, 3, members)->message(),
            "receive: rank 3 was ended by an unhandled ValueError before it sent this; see its "
            "output for the traceback");
  EXPECT_EQ(ask(false, 4, members)->message(),
            "receive: rank 4 ended without destroy_process_group() before it sent this; see its "
            "output for an error; every send needs its receive");
  EXPECT_EQ(ask(false, -1, {kLives, kDied, kLeft, kLeft, kLeft})->message(),
            "receive: no other rank is left that could send it: rank 1 died, rank 2 left the "
            "group, rank 3 was ended by an unhandled ValueError, rank 4 ended without "
            "destroy_process_group(); look for the dead rank's own error, a signal or the "
            "out-of-memory killer in its output and the system log");
}

}  // namespace
}  // namespace dscomm
