#include "core/messages/doorbell.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <cerrno>

#include "core/shm/memory/abstract_socket.h"

namespace dscomm {
namespace {

// Most datagrams that clear() takes; a socket holds some ten (net.unix.max_dgram_qlen).
constexpr int kMostTaken = 64;

}  // namespace

Result<std::unique_ptr<Doorbell>> Doorbell::create(ArenaId* token) {
  if (getrandom(token, sizeof *token, 0) != static_cast<ssize_t>(sizeof *token))
    return system_error("getrandom");
  UniqueFd fd(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return system_error("making a Unix socket");
  const AbstractAddress name(*token);
  if (bind(fd.get(), name.get(), name.bytes) != 0)
    return system_error("binding an abstract Unix socket");
  return std::unique_ptr<Doorbell>(new Doorbell(std::move(fd), *token));
}

void Doorbell::ring(const ArenaId& token) const {
  const AbstractAddress name(token);
  const char byte = 1;
  const auto send_from = [&](int socket) {
    return sendto(socket, &byte, sizeof byte, MSG_DONTWAIT | MSG_NOSIGNAL, name.get(),
                  name.bytes) == sizeof byte;
  };
  if (send_from(socket_.get()) || (errno != EAGAIN && errno != ENOBUFS)) return;
  // Either the peer's socket is full, or this socket has too many bytes in flight, which the kernel
  // may free well after they were received (Linux 6.18). A new socket has no bytes in flight.
  UniqueFd fresh(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (fresh.valid()) send_from(fresh.get());
}

void Doorbell::sleep(int64_t timeout_ns) const {
  timespec timeout{timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
  pollfd entry{socket_.get(), POLLIN, 0};
  ::ppoll(&entry, 1, timeout_ns < 0 ? nullptr : &timeout, nullptr);
}

void Doorbell::clear() const {
  char byte;
  for (int taken = 0; taken < kMostTaken; ++taken)
    if (recv(socket_.get(), &byte, sizeof byte, MSG_DONTWAIT) < 0) return;
}

}  // namespace dscomm
