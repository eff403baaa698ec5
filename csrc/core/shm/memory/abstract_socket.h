// Abstract Unix sockets, through which the processes of a host find each other. Their names are in
// no file system, so nothing is left behind. Two network namespaces cannot connect.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include "core/base/arena_id.h"

namespace dscomm {

// The name is a zero byte, then "dscomm-" and the token as 32 hexadecimal digits.
struct AbstractAddress {
  explicit AbstractAddress(const ArenaId& token);
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&name); }

  sockaddr_un name{};
  socklen_t bytes = 0;
};

// Whether the other end of a connection runs as the same user.
bool is_same_user(int connection);

}  // namespace dscomm
