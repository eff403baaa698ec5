#include "core/base/socket_sleep.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>

#include <algorithm>
#include <array>

#include "core/base/deadline.h"

namespace dscomm {
namespace {

// A sleep shorter than kAtOnceNs counts as ended at once. kMostEndsAtOnce: see sleep().
constexpr int64_t kAtOnceNs = 20'000;
constexpr int kMostEndsAtOnce = 1000;

// 0 if the descriptor is not a socket.
uint64_t cookie_of(int socket) {
  uint64_t cookie = 0;
  socklen_t length = sizeof cookie;
  return getsockopt(socket, SOL_SOCKET, SO_COOKIE, &cookie, &length) == 0 ? cookie : 0;
}

bool listens(int socket) {
  int flag = 0;
  socklen_t length = sizeof flag;
  return getsockopt(socket, SOL_SOCKET, SO_ACCEPTCONN, &flag, &length) == 0 && flag != 0;
}

bool watch(const UniqueFd& epoll, int socket, uint32_t events) {
  epoll_event event{};
  event.events = events;
  return epoll_ctl(epoll.get(), EPOLL_CTL_ADD, socket, &event) == 0;
}

}  // namespace

void SocketList::add(int socket) {
  const uint64_t cookie = cookie_of(socket);
  if (cookie == 0) return;
  std::lock_guard lock(mutex_);
  const uint64_t number = last_.load(std::memory_order_relaxed) + 1;
  entries_.push_back({number, socket, cookie});
  last_.store(number, std::memory_order_relaxed);
}

bool SocketSleep::follow() {
  if (has_failed_) return false;
  if (list_.last_.load(std::memory_order_relaxed) == seen_) return true;
  if (!data_.valid()) data_ = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
  if (!room_.valid()) room_ = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
  has_failed_ = !data_.valid() || !room_.valid();
  if (has_failed_) return false;
  std::lock_guard lock(list_.mutex_);
  // The library may have closed sockets, and their descriptors may belong to other files now.
  const auto is_closed = [](const auto& entry) { return cookie_of(entry.socket) != entry.cookie; };
  std::erase_if(list_.entries_, is_closed);
  for (const auto& entry : list_.entries_) {
    if (entry.number <= seen_) continue;
    const bool is_connection = !listens(entry.socket);
    const bool is_watched = watch(data_, entry.socket, EPOLLIN) &&
                            (!is_connection || watch(room_, entry.socket, EPOLLOUT | EPOLLET));
    has_connection_ |= is_watched && is_connection;
    has_failed_ |= !is_watched && !is_closed(entry);
  }
  seen_ = list_.last_.load(std::memory_order_relaxed);
  return !has_failed_;
}

bool SocketSleep::sleep(int64_t most_ns, int other) {
  if (!follow() || !has_connection_) return false;
  std::array<pollfd, 3> watched = {
      {{data_.get(), POLLIN, 0}, {room_.get(), POLLIN, 0}, {other, POLLIN, 0}}};
  if (ends_at_once_ == kMostEndsAtOnce) {
    ends_at_once_ = 0;
    watched[0].fd = watched[1].fd = -1;
  }
  const timespec most{static_cast<time_t>(most_ns / 1'000'000'000),
                      static_cast<long>(most_ns % 1'000'000'000)};
  const int64_t began_ns = monotonic_ns();
  const int ready = ppoll(watched.data(), watched.size(), &most, nullptr);
  const bool is_at_once = ready > 0 && monotonic_ns() - began_ns < kAtOnceNs;
  ends_at_once_ = is_at_once ? ends_at_once_ + 1 : std::max(ends_at_once_ - 10, 0);
  if (ready <= 0) return true;
  if (watched[1].revents != 0) {
    // Consumes the events, so that the next sleep waits for new ones.
    std::array<epoll_event, 64> events;
    epoll_wait(room_.get(), events.data(), static_cast<int>(events.size()), 0);
  }
  return true;
}

}  // namespace dscomm
