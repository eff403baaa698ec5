#include "core/shm/memory/host_identity.h"

#include <sys/stat.h>

#include <fstream>

namespace dscomm {

std::string host_identity() {
  std::string boot = "unknown";
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat network{};
  if (stat("/proc/self/ns/net", &network) != 0) network.st_ino = 0;
  return boot.substr(0, 64) + ":" + std::to_string(network.st_ino);
}

}  // namespace dscomm
