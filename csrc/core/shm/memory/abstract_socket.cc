#include "core/shm/memory/abstract_socket.h"

#include <unistd.h>

#include <cstddef>
#include <cstdio>

namespace dscomm {

AbstractAddress::AbstractAddress(const ArenaId& token) {
  name.sun_family = AF_UNIX;
  const int length = std::snprintf(
      name.sun_path + 1, sizeof name.sun_path - 1, "dscomm-%016llx%016llx",
      static_cast<unsigned long long>(token.high), static_cast<unsigned long long>(token.low));
  bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<size_t>(length));
}

bool is_same_user(int connection) {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  return getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0 &&
         credentials.uid == geteuid();
}

}  // namespace dscomm
