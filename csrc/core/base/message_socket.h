// MessageSocket: non-blocking messages between two processes of a host, over a Unix socket.
//
// Both ends run the same build on the same machine, so numbers are sent as they lie in memory. The
// receiver checks sizes nevertheless.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "core/base/owned.h"

namespace dscomm {

// Used by one thread.
class FrameSocket {
 public:
  FrameSocket() = default;
  explicit FrameSocket(UniqueFd socket);  // a stream socket; becomes non-blocking

  bool open() const { return socket_.valid(); }
  int fd() const { return socket_.get(); }
  // The events for poll().
  short events() const;

  // Sends what is queued and receives what has arrived. False if the other end is gone or has sent
  // a malformed message; earlier messages are still available. Call next() until it returns none
  // before the next poll(): poll() does not report messages that have been received already.
  bool exchange();
  void close() { socket_.reset(); }

 protected:
  void send_frame(uint32_t kind, std::string_view text);
  std::optional<std::pair<uint32_t, std::string>> next_frame();

 private:
  bool flush();
  bool receive();

  UniqueFd socket_;
  std::string incoming_, outgoing_;
  size_t sent_ = 0;  // bytes of outgoing_ that have been sent
};

// `Kind` is an enumeration of uint32_t. A received kind may be out of range.
template <typename Kind>
class MessageSocket : public FrameSocket {
 public:
  using FrameSocket::FrameSocket;
  struct Message {
    Kind kind{};
    std::string text;
  };

  // Sends what the socket accepts now, and keeps the rest for exchange().
  void send(Kind kind, std::string_view text) { send_frame(static_cast<uint32_t>(kind), text); }
  std::optional<Message> next() {
    std::optional<std::pair<uint32_t, std::string>> frame = next_frame();
    if (!frame) return std::nullopt;
    return Message{static_cast<Kind>(frame->first), std::move(frame->second)};
  }
};

}  // namespace dscomm
