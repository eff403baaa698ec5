#include "pmix/messages.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

namespace dscomm {
namespace {

struct Header {
  uint32_t magic;
  uint32_t kind;
  uint64_t bytes;
};
constexpr uint32_t kMagic = 0x786d7031;  // "1pmx": the number of the format comes first

// The largest message carries the addresses of all ranks: some hundred bytes each with TCP, some
// kilobytes with what fast networks need.
constexpr uint64_t kLargestBytes = uint64_t{1} << 30;

}  // namespace

std::string pack(const PmixDescription& description) {
  Packer packer;
  packer.text(description.name_space).number(description.own_host).number(description.verbose);
  packer.number(description.hosts.size());
  for (const PmixHost& host : description.hosts) {
    packer.text(host.name).number(host.ranks.size());
    for (uint32_t rank : host.ranks) packer.number(rank);
  }
  packer.number(description.clients.size());
  for (const PmixClient& client : description.clients)
    packer.number(client.rank)
        .number(static_cast<uint64_t>(client.pid))
        .number(client.start_time)
        .number(client.uid)
        .number(client.gid);
  return packer.take();
}

bool unpack(std::string_view text, PmixDescription* description) {
  Unpacker unpacker(text);
  description->name_space = unpacker.text();
  description->own_host = static_cast<uint32_t>(unpacker.number());
  description->verbose = unpacker.number() != 0;
  description->hosts.resize(unpacker.count());
  for (PmixHost& host : description->hosts) {
    host.name = unpacker.text();
    host.ranks.resize(unpacker.count());
    for (uint32_t& rank : host.ranks) rank = static_cast<uint32_t>(unpacker.number());
  }
  description->clients.resize(unpacker.count());
  for (PmixClient& client : description->clients) {
    client.rank = static_cast<uint32_t>(unpacker.number());
    client.pid = static_cast<int64_t>(unpacker.number());
    client.start_time = unpacker.number();
    client.uid = static_cast<uint32_t>(unpacker.number());
    client.gid = static_cast<uint32_t>(unpacker.number());
  }
  return unpacker.whole() && description->own_host < description->hosts.size() &&
         !description->clients.empty();
}

std::string pack(const PmixEnvironments& environments) {
  Packer packer;
  packer.number(environments.own.size());
  for (const std::vector<std::string>& own : environments.own) packer.texts(own);
  return packer.texts(environments.defaults).take();
}

bool unpack(std::string_view text, PmixEnvironments* environments) {
  Unpacker unpacker(text);
  environments->own.resize(unpacker.count());
  for (std::vector<std::string>& own : environments->own) own = unpacker.texts();
  environments->defaults = unpacker.texts();
  return unpacker.whole();
}

std::string pack(const PmixFence& fence) {
  Packer packer;
  packer.number(fence.number).text(fence.name).number(fence.hosts.size());
  for (uint32_t host : fence.hosts) packer.number(host);
  return packer.text(fence.data).take();
}

bool unpack(std::string_view text, PmixFence* fence) {
  Unpacker unpacker(text);
  fence->number = unpacker.number();
  fence->name = unpacker.text();
  fence->hosts.resize(unpacker.count());
  for (uint32_t& host : fence->hosts) host = static_cast<uint32_t>(unpacker.number());
  fence->data = unpacker.text();
  return unpacker.whole();
}

std::string pack(const PmixFenceResult& result) {
  return Packer().number(result.number).number(result.succeeded).text(result.data).take();
}

bool unpack(std::string_view text, PmixFenceResult* result) {
  Unpacker unpacker(text);
  result->number = unpacker.number();
  result->succeeded = unpacker.number() != 0;
  result->data = unpacker.text();
  return unpacker.whole();
}

PmixSocket::PmixSocket(UniqueFd socket) : socket_(std::move(socket)) {
  int flags = fcntl(fd(), F_GETFL);
  if (flags >= 0) (void)fcntl(fd(), F_SETFL, flags | O_NONBLOCK);
}

short PmixSocket::events() const {
  return static_cast<short>(sent_ < outgoing_.size() ? POLLIN | POLLOUT : POLLIN);
}

void PmixSocket::send(PmixMessageKind kind, std::string_view text) {
  Header header{kMagic, static_cast<uint32_t>(kind), text.size()};
  outgoing_.append(reinterpret_cast<const char*>(&header), sizeof header);
  outgoing_.append(text);
  (void)flush();  // that the other end has gone shows in exchange()
}

bool PmixSocket::exchange() {
  if (!open()) return false;
  // What the other end said before it went may still be unread.
  bool flushed = flush();
  return receive() && flushed;
}

bool PmixSocket::flush() {
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

bool PmixSocket::receive() {
  char bytes[16384];
  while (true) {
    ssize_t count = ::recv(fd(), bytes, sizeof bytes, 0);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
    if (count == 0) return false;
    incoming_.append(bytes, static_cast<size_t>(count));
    Header header;
    if (incoming_.size() < sizeof header) continue;
    std::memcpy(&header, incoming_.data(), sizeof header);
    if (header.magic != kMagic || header.bytes > kLargestBytes) return false;
  }
}

std::optional<PmixMessage> PmixSocket::next() {
  Header header;
  if (incoming_.size() < sizeof header) return std::nullopt;
  std::memcpy(&header, incoming_.data(), sizeof header);
  if (header.magic != kMagic || header.bytes > incoming_.size() - sizeof header)
    return std::nullopt;
  PmixMessage message{static_cast<PmixMessageKind>(header.kind),
                      incoming_.substr(sizeof header, header.bytes)};
  incoming_.erase(0, sizeof header + header.bytes);
  return message;
}

void PmixSocket::close() { socket_.reset(); }

}  // namespace dscomm
