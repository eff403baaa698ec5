// MessageSocket: messages between two processes of a host, over a Unix socket, without ever
// blocking.
//
// Both ends are of one build and on one machine, so numbers travel as they lie in memory. Sizes are
// checked all the same.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "core/base/owned.h"

namespace dscomm {

// One thread.
class FrameSocket {
 public:
  FrameSocket() = default;
  explicit FrameSocket(UniqueFd socket);  // a stream socket; becomes non-blocking

  bool open() const { return socket_.valid(); }
  int fd() const { return socket_.get(); }
  // What poll() shall look for.
  short events() const;

  // Sends the rest and takes in what has come. False when the other end has gone, or what came is
  // no message; what came before it is still there. All of it must be asked for with next() before
  // poll() is called again: what has been taken in does not wake anybody.
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
  size_t sent_ = 0;  // of outgoing_
};

// `Kind` is an enumeration of uint32_t. A kind that is not in it may come.
template <typename Kind>
class MessageSocket : public FrameSocket {
 public:
  using FrameSocket::FrameSocket;
  struct Message {
    Kind kind{};
    std::string text;
  };

  // Sends what the socket lets through now, and keeps the rest.
  void send(Kind kind, std::string_view text) { send_frame(static_cast<uint32_t>(kind), text); }
  std::optional<Message> next() {
    std::optional<std::pair<uint32_t, std::string>> frame = next_frame();
    if (!frame) return std::nullopt;
    return Message{static_cast<Kind>(frame->first), std::move(frame->second)};
  }
};

}  // namespace dscomm
