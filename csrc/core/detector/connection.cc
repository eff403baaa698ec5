#include "core/detector/connection.h"

#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace dscomm {
namespace {

constexpr uint32_t kMagic = 0x64667333;  // "3sfd": the digit is the version of the format

struct Header {
  uint32_t magic;
  uint16_t kind;
  uint16_t text_bytes;
  int32_t rank;
  uint32_t code;
  uint64_t id;
};
static_assert(sizeof(Header) == 24);

// receive() stops once it has buffered this much for next().
constexpr size_t kIncomingBytes = 65536;

// The kernel starts to probe after half of the silence, and spreads the probes over the other half.
constexpr int64_t kProbes = 8;
constexpr int64_t kLongestProbeS = 32767;  // Linux: MAX_TCP_KEEPIDLE, MAX_TCP_KEEPINTVL

enum class Parsed { kWhole, kPart, kGarbage };

Parsed parse(std::string_view bytes, Message* message, size_t* used) {
  Header header;
  if (bytes.size() < sizeof header) return Parsed::kPart;
  std::memcpy(&header, bytes.data(), sizeof header);
  if (header.magic != kMagic || header.text_bytes > kMessageTextBytes ||
      header.kind < static_cast<uint16_t>(MessageKind::kInvitation) ||
      header.kind > static_cast<uint16_t>(MessageKind::kCompare) ||
      header.code > static_cast<uint32_t>(Code::kInternal))
    return Parsed::kGarbage;
  *used = sizeof header + header.text_bytes;
  if (bytes.size() < *used) return Parsed::kPart;
  message->kind = static_cast<MessageKind>(header.kind);
  message->rank = header.rank;
  message->id = header.id;
  message->code = static_cast<Code>(header.code);
  message->text = bytes.substr(sizeof header, header.text_bytes);
  return Parsed::kWhole;
}

// Sets an option that is not essential.
void set_option(int socket, int level, int option, int value) {
  (void)setsockopt(socket, level, option, &value, sizeof value);
}

}  // namespace

std::string bounded_text(const std::string& text, size_t bytes) {
  if (text.size() <= bytes) return text;
  size_t end = bytes;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
  return text.substr(0, end);
}

std::string encode(const Message& message) {
  const std::string text = bounded_text(message.text);
  Header header{
      kMagic,       static_cast<uint16_t>(message.kind), static_cast<uint16_t>(text.size()),
      message.rank, static_cast<uint32_t>(message.code), message.id};
  return std::string(reinterpret_cast<const char*>(&header), sizeof header) + text;
}

bool decode(std::string_view bytes, Message* message) {
  size_t used = 0;
  return parse(bytes, message, &used) == Parsed::kWhole && used == bytes.size();
}

Connection::Connection(UniqueFd socket) : socket_(std::move(socket)) {
  const int fd = socket_.get();
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, kProbes);
  tolerate_silence(kLeastSilence);
}

void Connection::tolerate_silence(std::chrono::milliseconds silence) {
  if (silence <= silence_) return;
  silence_ = silence;
  const int64_t ms = std::min<int64_t>(silence.count(), (kProbes + 1) * kLongestProbeS * 1000);
  const int64_t probe_after_s = std::min(ms / 2000, kLongestProbeS);
  const int64_t between_probes_s = (ms / 1000 - probe_after_s + kProbes - 1) / kProbes;
  set_option(fd(), IPPROTO_TCP, TCP_KEEPIDLE, static_cast<int>(probe_after_s));
  set_option(fd(), IPPROTO_TCP, TCP_KEEPINTVL, static_cast<int>(between_probes_s));
  // Limits the wait for acknowledgements of data, and overrides the number of probes.
  set_option(fd(), IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(ms));
}

void Connection::flush() {
  while (has_queued()) {
    ssize_t sent = ::send(fd(), outgoing_.data() + sent_, outgoing_.size() - sent_, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (sent < 0) {
      // Messages from before the other end closed may be unread, so only receive() ends the
      // connection. The kernel reports an error once, so it is kept in error_.
      if (error_ == 0 && errno != EPIPE) error_ = errno;
      sent_ = outgoing_.size();
      break;
    }
    sent_ += static_cast<size_t>(sent);
  }
  // Drop sent data when that is cheap.
  if (sent_ * 2 < outgoing_.size()) return;
  outgoing_.erase(0, sent_);
  sent_ = 0;
}

size_t Connection::unsent() const {
  int in_kernel = 0;
  (void)::ioctl(fd(), SIOCOUTQ, &in_kernel);  // works for every TCP socket
  return outgoing_.size() - sent_ + static_cast<size_t>(in_kernel);
}

void Connection::receive() {
  while (!ended_ && incoming_.size() < kIncomingBytes) {
    char bytes[4096];
    ssize_t count = ::recv(fd(), bytes, sizeof bytes, 0);
    if (count > 0) {
      incoming_.append(bytes, static_cast<size_t>(count));
      continue;
    }
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (count < 0 && error_ == 0) error_ = errno;
    ended_ = true;
  }
}

bool Connection::next(Message* message) {
  size_t used = 0;
  switch (parse(incoming_, message, &used)) {
    case Parsed::kWhole:
      incoming_.erase(0, used);
      return true;
    case Parsed::kPart:
      return false;
    case Parsed::kGarbage:
      break;
  }
  incoming_.clear();
  ended_ = true;
  error_ = EPROTO;
  return false;
}

void Connection::finish() {
  if (!finished_) ::shutdown(fd(), SHUT_WR);
  finished_ = true;
}

void Connection::hang_up() {
  if (open()) ::shutdown(fd(), SHUT_RDWR);
  socket_.reset();
}

}  // namespace dscomm
