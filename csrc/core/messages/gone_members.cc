#include "core/messages/gone_members.h"

namespace dscomm {

std::string death_text(const std::string& member) {
  return member +
         " died or exited without leaving the group; look for its own error, a signal or the "
         "out-of-memory killer in its output and the system log";
}

Status describe_gone(bool sending, bool died, const std::string& what, const std::string& member,
                     const Departure& departure) {
  if (died) return Status(Code::kPeerDied, what + death_text(member));
  return Status(Code::kPeerLeft,
                what + member + " " + departure.how() +
                    (sending ? " before it received this" : " before it sent this") + "; " +
                    departure.advice("every send needs its receive"));
}

}  // namespace dscomm
