#include "core/messages/liveness.h"

namespace dscomm {

std::string death_text(const std::string& member) {
  return member +
         " died or exited without leaving the group; look for its own error, a signal or the "
         "out-of-memory killer in its output and the system log";
}

}  // namespace dscomm
