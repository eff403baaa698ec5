// Replaces the accept() that libpmix calls in this program: the dynamic linker finds this function
// before the C library's. It returns only connections on which a complete greeting, the first
// message, has arrived, and closes those that send none within 10 s.
//
// libpmix listens on 127.0.0.1, where any user of the host can connect, and reads the greeting
// without a timeout on the thread that serves all ranks: one silent connection would block all.
//
// libpmix calls accept() on a dedicated thread, each time the listening socket is readable.
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <optional>
#include <vector>

#include "core/base/deadline.h"
#include "core/base/owned.h"

namespace dscomm {
namespace {

constexpr int64_t kGreetingNs = 10'000'000'000;
// Limit of one call of accept().
constexpr int64_t kTurnNs = 1'000'000'000;
// The longest pause between two checks of the pending connections.
constexpr int kAcceptLookMs = 10;
// Most pending connections; beyond this, the oldest is closed. Fits the usual limit of open files.
constexpr size_t kMostArrivals = 512;
// Most connections accepted between two checks of the pending ones.
constexpr int kAcceptedAtOnce = 64;

// The header before the greeting in libpmix 3 to 5, in host byte order.
struct PmixHeader {
  int32_t index;
  uint32_t tag;
  uint32_t bytes;  // length of the greeting
  uint32_t padding;
};
// libpmix itself rejects longer greetings.
constexpr uint32_t kMostGreetingBytes = 128 << 10;

// kRefused: not the greeting of a rank, or the peer has closed the connection.
enum class Greeting { kNothing, kPart, kWhole, kRefused };

// How much of a greeting has arrived. Reads nothing from the socket.
Greeting peek_greeting(int socket) {
  PmixHeader header{};
  const ssize_t peeked = recv(socket, &header, sizeof header, MSG_PEEK | MSG_DONTWAIT);
  if (peeked < 0)
    return errno == EAGAIN || errno == EINTR ? Greeting::kNothing : Greeting::kRefused;
  if (peeked == 0 || (peeked == sizeof header && header.bytes > kMostGreetingBytes))
    return Greeting::kRefused;
  int available = 0;
  if (ioctl(socket, FIONREAD, &available) != 0) return Greeting::kRefused;
  const bool is_whole =
      peeked == sizeof header && static_cast<size_t>(available) >= sizeof header + header.bytes;
  return is_whole ? Greeting::kWhole : Greeting::kPart;
}

struct PendingConnection {
  UniqueFd socket;
  sockaddr_storage name{};
  socklen_t size = sizeof(sockaddr_storage);
  int64_t since_ns = 0;
  Greeting greeting = Greeting::kNothing;  // state at the last check
};

class PendingConnections {
 public:
  // The first connection with a complete greeting; nothing if no connection has one within kTurnNs,
  // or if none is pending.
  std::optional<PendingConnection> next(int listener) {
    const int64_t end_ns = monotonic_ns() + kTurnNs;
    do {
      take_in(listener);
      for (PendingConnection& arrival : arrivals_)
        arrival.greeting = peek_greeting(arrival.socket.get());
      const auto greeted = std::find_if(
          arrivals_.begin(), arrivals_.end(),
          [](const PendingConnection& arrival) { return arrival.greeting == Greeting::kWhole; });
      if (greeted != arrivals_.end()) {
        PendingConnection arrival = std::move(*greeted);
        arrivals_.erase(greeted);
        if (!arrivals_.empty()) wake_libpmix(listener);
        return arrival;
      }
      std::erase_if(arrivals_, [now = monotonic_ns()](const PendingConnection& arrival) {
        return arrival.greeting == Greeting::kRefused || now - arrival.since_ns > kGreetingNs;
      });
      // No remaining connection has sent its whole greeting yet.
      while (arrivals_.size() > kMostArrivals) arrivals_.erase(arrivals_.begin());
      wait(listener);
    } while (!arrivals_.empty() && monotonic_ns() < end_ns);
    if (!arrivals_.empty()) wake_libpmix(listener);
    return {};
  }

 private:
  // libpmix wakes only for a connection, so this makes a connection and closes it.
  static void wake_libpmix(int listener) {
    sockaddr_storage name{};
    socklen_t size = sizeof name;
    if (getsockname(listener, reinterpret_cast<sockaddr*>(&name), &size) != 0) return;
    const UniqueFd caller(socket(name.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    (void)connect(caller.get(), reinterpret_cast<sockaddr*>(&name), size);
  }

  void take_in(int listener) {
    pollfd entry{listener, POLLIN, 0};
    for (int i = 0; i < kAcceptedAtOnce && ::poll(&entry, 1, 0) == 1; ++i) {
      PendingConnection arrival;
      const long socket = syscall(SYS_accept4, listener, &arrival.name, &arrival.size, 0);
      if (socket < 0) return;
      arrival.socket = UniqueFd(static_cast<int>(socket));
      arrival.since_ns = monotonic_ns();
      arrivals_.push_back(std::move(arrival));
    }
  }

  void wait(int listener) const {
    if (arrivals_.empty()) return;
    std::vector<pollfd> entries{{listener, POLLIN, 0}};
    // Do not poll a socket with a partial greeting: it would be readable all the time.
    for (const PendingConnection& arrival : arrivals_)
      if (arrival.greeting == Greeting::kNothing)
        entries.push_back({arrival.socket.get(), POLLIN, 0});
    ::poll(entries.data(), entries.size(), kAcceptLookMs);
  }

  std::vector<PendingConnection> arrivals_;
};

}  // namespace
}  // namespace dscomm

extern "C" __attribute__((visibility("default"))) int accept(int listener, sockaddr* name,
                                                             socklen_t* size) {
  static std::mutex mutex;
  static auto* const arrivals =
      new dscomm::PendingConnections;  // never destroyed: threads outlive main()
  std::lock_guard lock(mutex);
  std::optional<dscomm::PendingConnection> arrival = arrivals->next(listener);
  if (!arrival) {
    errno = EAGAIN;
    return -1;
  }
  if (name != nullptr && size != nullptr) {
    std::memcpy(name, &arrival->name, std::min(*size, arrival->size));
    *size = arrival->size;
  }
  return arrival->socket.release();
}
