// Abstract Unix sockets, which processes of one host find each other by. Their names are in no file
// system, so nothing can be left behind, and two hosts (network namespaces) never meet.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include "core/shm/layout.h"

namespace dscomm {

// The name is a zero byte, then "dscomm-" and the 32 hexadecimal digits of a token.
struct AbstractAddress {
  explicit AbstractAddress(const ArenaId& token);
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&name); }

  sockaddr_un name{};
  socklen_t bytes = 0;
};

// Whether the other end of a connection runs as the same user.
bool is_same_user(int connection);

}  // namespace dscomm
