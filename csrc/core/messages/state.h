// The state of PointToPoint: operations, messages, ports and connections. Guarded by its mutex.
#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/base/deadline.h"
#include "core/base/format.h"
#include "core/messages/matching.h"
#include "core/messages/point_to_point.h"
#include "core/shm/staging/copy.h"

namespace dscomm {

inline constexpr int64_t kLongestTimeoutMs = int64_t{1}
                                             << 40;  // some 35 years; keeps nanoseconds in range

// Copies a part of a message of `message_bytes` to its destination. A long message exceeds the
// caches, so it is written with streaming stores; ordinary ones would first read each cache line
// that they overwrite. Cache-near round trips of 16 MiB took 4.1 ms with ordinary stores and 3.5 ms
// with streaming ones; of 4 MiB 0.67 and 0.96 ms.
inline void copy_out(std::byte* to, const std::byte* from, size_t bytes, uint64_t message_bytes) {
  constexpr uint64_t kLeastStreamedBytes = 8 << 20;
  copy(to, from, bytes,
       message_bytes < kLeastStreamedBytes ? Stores::kOrdinary : Stores::kStreaming);
}

inline std::string describe_data(DType dtype, uint64_t count, int tag) {
  return format_text("{}[{}] tag {}", dtype_name(dtype), count, tag);
}

// A send or a receive.
class PointToPoint::Transfer final : public Operation {
 public:
  Transfer(PointToPoint* engine, GroupPtr of, const void* from, void* to, size_t elements,
           DType type, int other, int label, std::shared_ptr<void> owner,
           std::chrono::milliseconds timeout)
      : group(std::move(of)),
        port(group->ports[group->rank]),
        sending(from != nullptr),
        source(static_cast<const std::byte*>(from)),
        destination(static_cast<std::byte*>(to)),
        count(elements),
        bytes(elements * dtype_bytes(type)),
        dtype(type),
        peer(other),
        tag(label),
        timeout_ms(std::min<int64_t>(timeout.count(), kLongestTimeoutMs)),
        keep(std::move(owner)),
        engine_(engine) {}

  const GroupPtr group;
  const uint32_t port;  // this rank's
  const bool sending;
  const std::byte* const source;
  std::byte* const destination;
  const uint64_t count;
  const uint64_t bytes;
  const DType dtype;
  const int peer;  // -1: any
  const int tag;
  const int64_t timeout_ms;

  std::shared_ptr<void> keep;
  int64_t end_ns = INT64_MAX;
  uint64_t sent_bytes = 0;  // of a send: bytes put into cells so far
  int came_from = -1;       // of a receive: the source rank
  int waiting_threads = 0;
  std::optional<uint64_t> pool_offset;  // of a send that the peer reads in place
  bool is_finished = false;  // the result is decided; complete() follows without the mutex

  uint32_t destination_port() const { return group->ports[peer]; }
  std::string describe() const {
    return std::string(sending ? "send of " : "receive of ") + describe_data(dtype, count, tag);
  }

 protected:
  void help(std::chrono::milliseconds limit) override { engine_->help(*this, limit); }

 private:
  PointToPoint* const engine_;
};

// An incoming message.
struct PointToPoint::Message {
  ArenaId from;
  uint32_t port = 0;
  int source = -1;
  int tag = 0;
  DType dtype = DType::kUInt8;
  uint64_t bytes = 0;
  uint64_t arrived = 0;
  TransferPtr receive;                  // its destination, once matched
  std::unique_ptr<std::byte[]> heap;    // its destination until matched
  uint64_t charge = 0;                  // bytes counted in unexpected_used_
  const std::byte* in_place = nullptr;  // its data in the sender's pool
  bool discarded = false;

  uint64_t count() const { return bytes / std::max<size_t>(dtype_bytes(dtype), 1); }
};

// One rank of one group.
struct PointToPoint::Port {
  explicit Port(uint32_t own) : number(own) {}

  const uint32_t number;
  GroupPtr group;  // null until the group has formed
  // By rank; null for this rank. Empty until this rank first sends or receives. Members of the same
  // process share a connection.
  std::vector<Connection*> connections;
  Status failure;  // the cause, with which every later operation fails
  Matching<TransferPtr, MessagePtr> matching;
  std::unordered_set<TransferPtr> pending;
  Status pending_cause;  // ends the group unless the root cause arrives soon
  int64_t pending_since_ns = 0;

  void set_pending_cause(const Status& consequence) {
    if (!pending_cause.ok()) return;
    pending_cause = consequence;
    pending_since_ns = monotonic_ns();
  }
  bool names(const ArenaId& process) const {
    return group != nullptr && std::any_of(group->peers.begin(), group->peers.end(),
                                           [&](const auto& peer) { return peer->id() == process; });
  }
};

// Everything between this process and one other process (or itself), for all groups.
struct PointToPoint::Connection {
  Connection(const std::shared_ptr<Arena>& arena, ChannelDirectory& directory,
             std::shared_ptr<PeerProcess> peer_process)
      : peer(std::move(peer_process)),
        is_polled(peer->doorbell() == nullptr),
        channel(peer->make_channel(arena, directory)) {}

  const std::shared_ptr<PeerProcess> peer;
  const bool is_polled;
  const std::unique_ptr<CellChannel> channel;
  Status broken;  // why the connection cannot be used any more

  std::deque<TransferPtr> outgoing;
  uint64_t sent_messages = 0;
  bool begun = false;                  // a cell of outgoing.front() was published
  bool must_report_abandoned = false;  // a cell must tell the peer of a given-up send
  uint64_t abandoned_group = 0;
  uint32_t abandoned_port = 0;

  // Sends that the peer reads in place. Each is complete when the number of cells that the peer has
  // given back since the connection began reaches the number beside it.
  std::deque<std::pair<uint64_t, TransferPtr>> read_in_place;

  // When the connection was last polled for cells (0: cells moved then, so poll again at once), and
  // the channel's in_flight() then.
  int64_t polled_ns = 0;
  bool in_flight = false;

  MessagePtr incoming;  // incomplete; or null
  uint64_t received_messages = 0;
  bool unread = false;  // the last progress() left cells in the ring
};

inline PointToPoint::Port* PointToPoint::find_port(uint32_t number) const {
  const auto found = ports_.find(number);
  return found == ports_.end() ? nullptr : found->second.get();
}

}  // namespace dscomm
