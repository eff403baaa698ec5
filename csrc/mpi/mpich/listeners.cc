#include "mpi/mpich/listeners.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdlib>
#include <filesystem>
#include <map>

#include "core/base/log.h"
#include "core/transport/address_filter.h"

namespace dscomm {
namespace {

// Listening sockets by the kernel's cookie, which is unique for each socket.
std::map<uint64_t, int> find_listeners() {
  std::map<uint64_t, int> found;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", none)) {
    const int socket = std::atoi(entry.path().filename().c_str());
    int listens = 0, domain = 0;
    uint64_t cookie = 0;
    socklen_t listens_size = sizeof listens, domain_size = sizeof domain, size = sizeof cookie;
    if (getsockopt(socket, SOL_SOCKET, SO_ACCEPTCONN, &listens, &listens_size) == 0 &&
        listens != 0 && getsockopt(socket, SOL_SOCKET, SO_DOMAIN, &domain, &domain_size) == 0 &&
        (domain == AF_INET || domain == AF_INET6) &&
        getsockopt(socket, SOL_SOCKET, SO_COOKIE, &cookie, &size) == 0)
      found.emplace(cookie, socket);
  }
  return found;
}

bool is_at_all_addresses(int socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size) != 0) return true;
  if (address.ss_family == AF_INET)
    return reinterpret_cast<const sockaddr_in*>(&address)->sin_addr.s_addr == htonl(INADDR_ANY);
  const in6_addr& v6 = reinterpret_cast<const sockaddr_in6*>(&address)->sin6_addr;
  return IN6_IS_ADDR_UNSPECIFIED(&v6);
}

}  // namespace

NewListeners::NewListeners() {
  for (const auto& [cookie, socket] : find_listeners()) known_.insert(cookie);
}

void NewListeners::restrict_new(const std::vector<std::string>& addresses) {
  for (const auto& [cookie, socket] : find_listeners()) {
    if (is_at_all_addresses(socket) || !known_.insert(cookie).second) continue;
    ++count_;
    if (Status status = admit_only(socket, addresses); !status.ok())
      log_line(LogLevel::kInfo, "anybody may connect to MPI's port here: {}", status.message());
  }
}

}  // namespace dscomm
