#include "core/shm/memory/abstract_socket.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstddef>
#include <fstream>

#include "core/base/format.h"

namespace dscomm {

AbstractAddress::AbstractAddress(const ArenaId& token) {
  name.sun_family = AF_UNIX;
  const std::string text = format_text("dscomm-{:016x}{:016x}", token.high, token.low);
  text.copy(name.sun_path + 1, sizeof name.sun_path - 1);
  bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
}

bool is_same_user(int connection) {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  return getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0 &&
         credentials.uid == geteuid();
}

std::string host_identity() {
  std::string boot = "unknown";
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat network{};
  if (stat("/proc/self/ns/net", &network) != 0) network.st_ino = 0;
  return boot.substr(0, 64) + ":" + std::to_string(network.st_ino);
}

}  // namespace dscomm
