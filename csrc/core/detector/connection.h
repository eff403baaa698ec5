// The messages, other than data, between the members of a transport and between the host leaders
// of a forming group; and Connection, a non-blocking TCP connection for these messages.
//
// A message is a header of fixed size and a text of at most 2 KiB. Received messages are checked
// before use, because anybody who finds the port can connect.
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

// Values travel between processes: only append.
enum class MessageKind : uint16_t {
  // While the members connect; `id` is the transport's, or a TableRelay's:
  kInvitation = 1,  // in the store: the text has the member's token and addresses
  kHello,           // first on a connection: the sender's rank; the text is the token
  kWelcome,         // the answer to kHello: the token was right, and this connection is used
  kMissing,         // to connected members: the text names ranks that `rank` awaits, or is empty
  kReady,           // to those that the sender connects to: the sender is ready (rendezvous.h)
  kStart,           // to all, from the first member; each passes it on: all are connected
  kFail,            // to all, before kStart: all give up, for this cause
  // Between connected members:
  kEnd,              // to all: `rank` ended the Team `id`; text: first unfinished call, and cause
  kGone,             // to all: `rank` has died or left
  kGoodbye,          // to linked members: the sender ends in order, and nothing follows
  kTolerateSilence,  // to linked members: `id` is the silence that both ends tolerate, in ms
  kAsk,              // to all: has the receiver reached a position of a Team? `id`: the question
  kAnswer,           // back along the path of the question: `rank` has reached the position, or not
  // While a group forms:
  kTable,  // a part of the member table of the meeting `id`; `rank` more parts follow
  // Between connected members, too:
  kCompare,  // to all: calls of `rank`; a rank that made different ones ends the Team
};

struct Message {
  MessageKind kind = MessageKind::kFail;
  int rank = -1;          // that the message is about
  uint64_t id = 0;        // see MessageKind and about_departure()
  Code code = Code::kOk;  // with the text: a cause; kOk: none
  std::string text;

  static Message about(MessageKind kind, int rank, uint64_t id, const Status& cause = {}) {
    return {kind, rank, id, cause.code(), cause.message()};
  }
  // kGoodbye, or the kGone for a member that said goodbye. `id` is 1 if its process noted its end
  // (see Team::note_end()); then the text is the type of the exception, or empty without one.
  static Message about_departure(MessageKind kind, int rank, const Departure& departure) {
    return {kind, rank, departure.exception ? uint64_t{1} : 0, Code::kPeerLeft,
            departure.exception.value_or("")};
  }
  Departure departure() const { return id == 0 ? Departure() : Departure{.exception = text}; }
  Status status() const { return code == Code::kOk ? Status() : Status(code, text); }
};

// The least silence that connections tolerate. It only bounds the life of a dead connection: ranks
// that wait notice a cut of the network at their deadlines.
inline constexpr std::chrono::minutes kLeastSilence{4};

// Cuts the text to at most `bytes`, between UTF-8 characters.
std::string bounded_text(const std::string& text, size_t bytes = kMessageTextBytes);
std::string encode(const Message& message);
// False unless `bytes` are exactly one message.
bool decode(std::string_view bytes, Message* message);

class Connection {
 public:
  Connection() = default;
  // Takes a connected or connecting, non-blocking TCP socket.
  explicit Connection(UniqueFd socket);

  bool open() const { return socket_.valid(); }
  int fd() const { return socket_.get(); }

  void queue(const Message& message) { outgoing_ += encode(message); }
  // Queues an encoded message.
  void queue(std::string_view bytes) { outgoing_ += bytes; }
  bool has_queued() const { return sent_ < outgoing_.size(); }
  // Sends what the socket accepts now. receive() reports errors.
  void flush();
  // Bytes queued here or in this host's kernel that the other end's kernel has not acknowledged.
  size_t unsent() const;

  // Reads what has come, until some 64 KiB are buffered for next(); the kernel keeps the rest.
  void receive();
  // Takes the next whole message. False if there is none, or if the data is no message.
  bool next(Message* message);
  // Whether nothing more will come. next() still returns earlier messages.
  bool ended() const { return ended_; }
  // Why it ended. 0: the other end closed it. EPROTO: the data received is no message. Else: errno.
  int error() const { return error_; }

  // Stops sending. The other end sees this after it has read what was sent.
  void finish();
  // The kernel takes the other end for lost after this long without an answer; initially
  // kLeastSilence. A shorter silence than before changes nothing.
  void tolerate_silence(std::chrono::milliseconds silence);

  // Closes the connection, even if another process has inherited its descriptor.
  void hang_up();
  // In a forked child: closes the descriptor; the connection stays the parent's.
  void close_descriptors() { socket_.reset(); }

 private:
  UniqueFd socket_;
  std::string incoming_, outgoing_;
  size_t sent_ = 0;                       // bytes of outgoing_ that have been sent
  std::chrono::milliseconds silence_{0};  // that it tolerates
  bool ended_ = false, finished_ = false;
  int error_ = 0;
};

}  // namespace dscomm
