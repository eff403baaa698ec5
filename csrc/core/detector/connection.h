// What the processes of a transport, and the leaders of a group that forms, say to each other
// beside the data, and the TCP connection that carries it without ever blocking.
//
// A message is a header of fixed size and a text of at most 2 KiB. What arrives is checked before
// it is used: whoever finds the port can connect to it.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/base/owned.h"
#include "core/base/status.h"
#include "core/team/departure.h"

namespace dscomm {

inline constexpr size_t kMessageTextBytes = 2048;

// Values travel between processes: append.
enum class MessageKind : uint16_t {
  // While the members connect; the id is the transport's, or a TableRelay's.
  kInvitation = 1,  // in the store: the text is the member's token and addresses
  kHello,           // to whom one connects: who it is; the text is the token
  kWelcome,         // the answer: the token was right, and this connection is the one
  kMissing,         // to those it is connected to: the text is whom `rank` waits for, or empty
  kReady,           // to whom one has connected: so have all that connect to this one
  kStart,           // to all, from the first member: all are connected
  kFail,            // to all, before kStart: all give up, for this cause
  // Then.
  kEnd,      // to all: `rank` has ended the Team `id`, for this cause, in such a call
  kGone,     // to all: `rank` has died or left
  kGoodbye,  // to those it is connected to: the sender ends in order, and nothing follows
  kOutlast,  // to those it is connected to: `id` is the silence that both ends outlast, in ms
  kAsk,      // to all: has the receiver come to this position of a Team? `id` is the question
  kAnswer,   // to the rank that asked, by the way the question came: `rank` has, or has not
  // While a group forms.
  kTable,  // a part of the member table of the meeting `id`; `rank` more parts follow
  // Again of members that are connected.
  kCompare,  // to all: `rank` has made these calls; a rank that has made others ends the Team
};

struct Message {
  MessageKind kind = MessageKind::kFail;
  int rank = -1;          // whom it is about
  uint64_t id = 0;        // see MessageKind and about_departure()
  Code code = Code::kOk;  // with the text: a cause
  std::string text;

  static Message about(MessageKind kind, int rank, uint64_t id, const Status& cause = {}) {
    return {kind, rank, id, cause.code(), cause.message()};
  }
  // kGoodbye, or the kGone of one that said it: the id says whether the process noted its end, and
  // the text is the exception that it noted.
  static Message about_departure(MessageKind kind, int rank, const Departure& departure) {
    return {kind, rank, departure.exception ? uint64_t{1} : 0, Code::kPeerLeft,
            departure.exception.value_or("")};
  }
  Departure departure() const { return id == 0 ? Departure() : Departure{.exception = text}; }
  Status status() const { return code == Code::kOk ? Status() : Status(code, text); }
};

// A cut of the network is noticed by whoever waits, at its deadline. So this only bounds how long a
// dead connection stays.
inline constexpr std::chrono::minutes kLeastSilence{4};

// The text is cut to what a message can carry, between characters of UTF-8.
std::string bounded_text(const std::string& text, size_t bytes = kMessageTextBytes);
std::string encode(const Message& message);
// False unless `bytes` are one message, whole.
bool decode(std::string_view bytes, Message* message);

class Connection {
 public:
  Connection() = default;
  // Takes a connected, or connecting, non-blocking TCP socket.
  explicit Connection(UniqueFd socket);

  bool open() const { return socket_.valid(); }
  int fd() const { return socket_.get(); }

  void queue(const Message& message) { outgoing_ += encode(message); }
  // An encoded message.
  void queue(std::string_view bytes) { outgoing_ += bytes; }
  bool has_queued() const { return sent_ < outgoing_.size(); }
  // Sends what the socket takes now. An error shows in receive().
  void flush();

  // Takes in what has come, at most some 64 KiB; the kernel keeps the rest.
  void receive();
  // The next whole message. False when there is none, or what came is no message.
  bool next(Message* message);
  // Whether nothing more will come. What has come is still there.
  bool ended() const { return ended_; }
  // Why it ended: 0 when the other end closed it, EPROTO when what came is no message, or an errno.
  int error() const { return error_; }

  // Nothing more will be sent: the other end sees the end once it has read the rest.
  void finish();
  // From now on the kernel takes the other end for lost only after this long without an answer. It
  // starts with kLeastSilence; a shorter silence than before changes nothing.
  void outlast(std::chrono::milliseconds silence);

  // Ends the connection, also for whoever has inherited its descriptor.
  void hang_up();
  // In a forked child: the connection stays the parent's.
  void close_descriptors() { socket_.reset(); }

 private:
  UniqueFd socket_;
  std::string incoming_, outgoing_;
  size_t sent_ = 0;                       // of outgoing_
  std::chrono::milliseconds silence_{0};  // that it outlasts
  bool ended_ = false, finished_ = false;
  int error_ = 0;
};

}  // namespace dscomm
