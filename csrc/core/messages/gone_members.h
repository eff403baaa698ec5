// Finds the sends and receives that can never complete, because members have died or left.
// Peer::alive() detects a death on this host, the failure detector one on another host.
//
// Messages that a member sent before it went still count. So a receive from that member goes on
// while the channel may hold one; a receive from any source also while another member can send.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "core/base/format.h"
#include "core/base/status.h"
#include "core/team/departure.h"

namespace dscomm {

// The state of a member at one check.
struct MemberLife {
  bool died = false;    // without leaving the group
  bool left = false;    // in order
  bool unread = false;  // the channel from its process may hold unread cells
  bool gone() const { return died || left; }
};

// Calls alive() first: a member leaves before its process ends, so has_left() is final once the
// process is dead. In the other order, a member that leaves and ends in between seems to have died.
template <typename Alive, typename HasLeft>
MemberLife read_member_life(const Alive& alive, const HasLeft& has_left) {
  const bool lives = alive();
  const bool left = has_left();
  return {.died = !lives && !left, .left = left};
}

// "rank 1 died or exited without leaving the group; look for ..."
inline std::string death_text(const std::string& member) {
  return member + " died or exited without leaving the group" + kDeathAdvice;
}

// The error of a send to, or a receive from, a member that is gone.
inline Status describe_gone(bool sending, bool died, const std::string& what,
                            const std::string& member, const Departure& departure) {
  if (died) return Status(Code::kPeerDied, what + death_text(member));
  return Status(Code::kPeerLeft,
                what + member + " " + departure.how() +
                    (sending ? " before it received this" : " before it sent this") + "; " +
                    departure.advice("every send needs its receive"));
}

// Lists the other members that are gone: "rank 1 died, rank 2 left the group"; empty if there are
// none. departure(member) says how a member left.
template <typename Name, typename Depart>
std::string list_gone(int self, std::span<const MemberLife> members, const Name& name,
                      const Depart& departure) {
  std::string text;
  for (int member = 0; member < static_cast<int>(members.size()); ++member) {
    const MemberLife& life = members[member];
    if (member == self || !life.gone()) continue;
    text += format_text("{}{} {}", text.empty() ? "" : ", ", name(member),
                        life.died ? "died" : departure(member).how());
  }
  return text;
}

// The error if a send to `peer`, or a receive from `peer` (-1: from any), can never complete;
// nothing while it can. `members` are the members of the group, `self` is this rank's index, `what`
// begins the text; name(member) and departure(member) describe a member.
template <typename Name, typename Depart>
std::optional<Status> can_never_complete(bool sending, int peer, int self,
                                         std::span<const MemberLife> members,
                                         const std::string& what, const Name& name,
                                         const Depart& departure) {
  if (peer >= 0) {
    const MemberLife& life = members[peer];
    if (!life.gone() || (!sending && life.unread)) return {};
    return describe_gone(sending, life.died, what, name(peer),
                         life.died ? Departure() : departure(peer));
  }
  bool some_died = false;
  for (int member = 0; member < static_cast<int>(members.size()); ++member) {
    const MemberLife& life = members[member];
    if (member == self) continue;
    if (!life.gone() || life.unread) return {};
    some_died |= life.died;
  }
  const std::string text = what + "no other rank is left that could send it: " +
                           list_gone(self, members, name, departure);
  if (!some_died)
    return Status(Code::kPeerLeft, text + "; see their output; every receive needs its send");
  return Status(Code::kPeerDied,
                text +
                    "; look for the dead rank's own error, a signal or the out-of-memory killer in "
                    "its output and the system log");
}

}  // namespace dscomm
