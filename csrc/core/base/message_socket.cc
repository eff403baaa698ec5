#include "core/base/message_socket.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

namespace dscomm {
namespace {

struct FrameHeader {
  uint32_t magic;
  uint32_t kind;
  uint64_t bytes;
};
constexpr uint32_t kFrameMagic = 0x67736d31;  // "1msg": the first digit is the version of the
                                              // format

// The largest message carries MPI's addresses of all ranks: a few hundred bytes for each rank with
// TCP, a few kilobytes with fast networks.
constexpr uint64_t kLargestFrameBytes = uint64_t{1} << 30;

}  // namespace

FrameSocket::FrameSocket(UniqueFd socket) : socket_(std::move(socket)) {
  int flags = fcntl(fd(), F_GETFL);
  if (flags >= 0) (void)fcntl(fd(), F_SETFL, flags | O_NONBLOCK);
}

short FrameSocket::events() const {
  return static_cast<short>(sent_ < outgoing_.size() ? POLLIN | POLLOUT : POLLIN);
}

void FrameSocket::send_frame(uint32_t kind, std::string_view text) {
  FrameHeader header{kFrameMagic, kind, text.size()};
  outgoing_.append(reinterpret_cast<const char*>(&header), sizeof header);
  outgoing_.append(text);
  (void)flush();  // exchange() reports if the other end is gone
}

bool FrameSocket::exchange() {
  if (!open()) return false;
  // Receives even if flush() fails: messages from before the other end closed may be unread.
  bool flushed = flush();
  return receive() && flushed;
}

bool FrameSocket::flush() {
  while (sent_ < outgoing_.size()) {
    ssize_t count = ::send(fd(), outgoing_.data() + sent_, outgoing_.size() - sent_, MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
    sent_ += static_cast<size_t>(count);
  }
  outgoing_.clear();
  sent_ = 0;
  return true;
}

bool FrameSocket::receive() {
  char bytes[16384];
  while (true) {
    ssize_t count = ::recv(fd(), bytes, sizeof bytes, 0);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
    if (count == 0) return false;
    incoming_.append(bytes, static_cast<size_t>(count));
    FrameHeader header;
    if (incoming_.size() < sizeof header) continue;
    std::memcpy(&header, incoming_.data(), sizeof header);
    if (header.magic != kFrameMagic || header.bytes > kLargestFrameBytes) return false;
  }
}

std::optional<std::pair<uint32_t, std::string>> FrameSocket::next_frame() {
  FrameHeader header;
  if (incoming_.size() < sizeof header) return std::nullopt;
  std::memcpy(&header, incoming_.data(), sizeof header);
  if (header.magic != kFrameMagic || header.bytes > incoming_.size() - sizeof header)
    return std::nullopt;
  std::pair<uint32_t, std::string> frame(header.kind,
                                         incoming_.substr(sizeof header, header.bytes));
  incoming_.erase(0, sizeof header + header.bytes);
  return frame;
}

}  // namespace dscomm
