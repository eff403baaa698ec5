#include "pmix/greeting.h"

#include <sys/ioctl.h>
#include <sys/socket.h>

#include <cerrno>

namespace dscomm {

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

}  // namespace dscomm
