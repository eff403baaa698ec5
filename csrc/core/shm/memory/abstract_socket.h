// Abstract Unix sockets, through which the processes of a host find each other. Their names are in
// no file system, so nothing is left behind. They work only within one network namespace.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <string>

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

// Identifies the host of a process: the kernel's boot id and the network namespace, equal for two
// processes that can reach each other's abstract sockets. Only a hint about which processes to
// attach to: attaching proves that they share memory. At most 95 characters.
std::string host_identity();

}  // namespace dscomm
