// PointToPoint: moves messages into cells, and cells into messages. Nothing here blocks.
#include <atomic>
#include <new>

#include "core/base/fence.h"
#include "core/base/format.h"
#include "core/base/packer.h"
#include "core/messages/state.h"

namespace dscomm {
namespace {

// How many cells one connection may move before the others get their turn: two rings, so that
// one progress() empties a ring even if the sender refills it once meanwhile.
constexpr int kMostCellsInTurn = 2 * kRingCells;

// How often a thread that waits for one peer polls the other peers without a doorbell, if no
// message to or from them has begun. A poll is two system calls (8 B round trip inside a host, 2
// ranks on each of 2 hosts, 2 cores: 50 us if always polled, 20 to 35 us at this interval).
constexpr int64_t kAskOthersEveryNs = 100'000;

// Added to the bytes of each held message, so that DSCOMM_UNEXPECTED_BYTES limits empty ones, too.
constexpr uint64_t kMessageOverheadBytes = 256;

// The most bytes of an in-place message that one progress() copies: then others get their turn.
constexpr uint64_t kReadInPass = 4 << 20;

// Without DSCOMM_IN_PLACE_BYTES, a message of these sizes in the tensor pool is read in place.
// Longer ones are staged: then two cores share the copying. Between cache-far cores the limit is
// lower: each load from the sender's cache is slow, and staged data is streamed to memory.
constexpr uint64_t kLeastInPlaceBytes = 64 << 10;
constexpr uint64_t kMostInPlaceNearBytes = 8 << 20, kMostInPlaceFarBytes = 2 << 20;

// Whether a message from process `from` is from the rank that it names.
Status check_source(const PointToPointGroup& group, const ArenaId& from, int source) {
  if (source >= 0 && source < static_cast<int>(group.peers.size()) &&
      group.peers[source]->id() == from)
    return {};
  return make_status(Code::kInternal,
                     "a message in group '{}' says that it is from rank {}, but it is not",
                     group.name, source);
}

}  // namespace

Status PointToPoint::malformed(const Connection& connection, const char* what) {
  return malformed_value(format_text("message from {} ({})", connection.peer->describe(), what));
}

// On each due connection, moves up to kMostCellsInTurn cells each way. Returns whether any moved.
bool PointToPoint::progress(FinishedTransfers* finished, const Transfer* awaited) {
  bool moved = false;
  in_flight_ = false;
  some_are_polled_ = false;
  const int64_t now = awaited != nullptr && polled_count_ > 0 ? monotonic_ns() : 0;
  for (auto& [id, connection] : connections_) {
    if (is_due(*connection, awaited, now)) {
      bool moved_here = progress_in(*connection, finished);
      moved_here |= progress_out(*connection, finished);
      connection->in_flight = connection->channel->in_flight();
      connection->polled_ns = moved_here ? 0 : now;
      moved |= moved_here;
    }
    in_flight_ |= connection->in_flight;
    some_are_polled_ |= connection->is_polled && connection->broken.ok() && !connection->unread;
  }
  if (moved) polled_slice_ns_ = 0;
  return moved;
}

bool PointToPoint::is_due(const Connection& connection, const Transfer* awaited,
                          int64_t now) const {
  return awaited == nullptr || !connection.is_polled || awaited->peer < 0 ||
         awaited->group->peers[awaited->peer]->id() == connection.peer->id() ||
         connection.incoming != nullptr || !connection.outgoing.empty() ||
         now - connection.polled_ns >= kAskOthersEveryNs;
}

bool PointToPoint::progress_in(Connection& connection, FinishedTransfers* finished) {
  connection.unread = false;
  if (!connection.broken.ok()) return false;
  for (int taken = 0;; ++taken) {
    Result<std::optional<ArrivedCell>> cell = connection.channel->next_cell();
    if (!cell.ok()) return break_connection(connection, cell.status());
    if (!cell.value().has_value()) return taken > 0;
    CellResult fate = CellResult::kLeft;
    if (taken < kMostCellsInTurn) fate = take_cell(connection, *cell.value(), finished);
    if (fate != CellResult::kTaken) {
      connection.unread = true;
      return taken > 0 || fate == CellResult::kPartlyTaken;
    }
    const bool at_once = (cell.value()->header.flags & kInPlace) != 0;
    if (connection.channel->consume(at_once)) ring(*connection.peer);
  }
}

// Copies a cell to its destination.
PointToPoint::CellResult PointToPoint::take_cell(Connection& connection, const ArrivedCell& cell,
                                                 FinishedTransfers* finished) {
  const CellHeader& header = cell.header;
  const auto broken = [&](const char* what) {
    break_connection(connection, malformed(connection, what));
    return CellResult::kLeft;
  };
  if (connection.incoming != nullptr && connection.incoming->in_place != nullptr)
    return read_in_place(connection, finished);
  bool first = (header.flags & kFirstCell) != 0;
  bool continues = connection.incoming != nullptr;
  if (header.sequence != connection.received_messages + 1 || first == continues ||
      (continues && header.port != connection.incoming->port))
    return broken("a cell is out of order");
  if (!continues) {
    if (header.port == 0 || header.port > last_port_) return broken("its port was never opened");
    connection.incoming = begin_message(connection, header, finished);
  }
  if (connection.incoming == nullptr) return CellResult::kLeft;
  MessagePtr message = connection.incoming;
  if ((header.flags & kInPlace) != 0) {
    uint64_t offset = 0;
    if (header.cell_bytes != sizeof offset || continues) return broken("a cell does not fit it");
    std::memcpy(&offset, cell.data, sizeof offset);
    message->in_place = connection.channel->in_place(offset, message->bytes);
    if (message->in_place == nullptr) return broken("its data are outside the sender's pool");
    return read_in_place(connection, finished);
  }
  if ((header.flags & kAbandoned) != 0) {
    connection.incoming = nullptr;
    ++connection.received_messages;
    end_abandoned(message, finished);
    return CellResult::kTaken;
  }
  uint64_t left = message->bytes - message->arrived;
  if (header.cell_bytes > left || (header.cell_bytes == 0 && left > 0))
    return broken("a cell does not fit it");
  if (header.cell_bytes > 0 && !message->discarded) {
    std::byte* base = message->receive ? message->receive->destination : message->heap.get();
    copy_out(base + message->arrived, cell.data, header.cell_bytes, message->bytes);
  }
  message->arrived += header.cell_bytes;
  if (message->arrived == message->bytes) {
    connection.incoming = nullptr;
    ++connection.received_messages;
    if (message->receive) finish_transfer(message->receive, {}, finished);
  }
  return CellResult::kTaken;
}

// Copies the next part of a message from the sender's pool. To give up the send, the sender first
// ends the group and then releases the memory. So a copy is valid if no failure is known after it.
PointToPoint::CellResult PointToPoint::read_in_place(Connection& connection,
                                                     FinishedTransfers* finished) {
  MessagePtr message = connection.incoming;
  if (!message->discarded) {
    const uint64_t bytes = std::min(message->bytes - message->arrived, kReadInPass);
    std::byte* base = message->receive ? message->receive->destination : message->heap.get();
    copy_out(base + message->arrived, message->in_place + message->arrived, bytes, message->bytes);
    message->arrived += bytes;
    if (message->arrived < message->bytes) return CellResult::kPartlyTaken;
  }
  connection.incoming = nullptr;
  ++connection.received_messages;
  message->in_place = nullptr;
  if (message->discarded) return CellResult::kTaken;
  // Orders the copy before the check of the failure.
  fence(std::memory_order_acquire);
  Port* port = find_port(message->port);
  if (Status failure = port->group->failure(); !failure.ok())
    fail_group(*port, failure, finished);
  else if (message->receive)
    finish_transfer(message->receive, {}, finished);
  return CellResult::kTaken;
}

// Finds the receive of a message, or memory to hold it. Null if there is no room now.
PointToPoint::MessagePtr PointToPoint::begin_message(Connection& connection,
                                                     const CellHeader& header,
                                                     FinishedTransfers* finished) {
  auto message = std::make_shared<Message>();
  message->from = connection.peer->id();
  message->port = header.port;
  message->source = header.source;
  message->tag = header.tag;
  message->dtype = static_cast<DType>(header.dtype);
  message->bytes = header.bytes;
  const auto discard = [&] {
    message->discarded = true;
    return message;
  };
  Port* port = find_port(header.port);
  if (port == nullptr || !port->failure.ok()) return discard();  // closed, or failed here
  if (port->group != nullptr) {
    Status status = check_source(*port->group, message->from, header.source);
    if (status.ok() && header.group != port->group->id)
      status = malformed(connection, "its port has another group");
    TransferPtr receive;
    if (status.ok()) receive = port->matching.find_receive(header.source, header.tag);
    if (receive != nullptr) status = check_match(*receive, *message);
    if (!status.ok()) {
      fail_group(*port, status, finished);
      return discard();
    }
    if (receive != nullptr) {
      message->receive = receive;
      receive->came_from = header.source;
      port->matching.erase_receive(receive);
      return message;
    }
  }
  // Wait for the group to form: only the group can tell whether data in place is still valid.
  if ((header.flags & kInPlace) != 0 && port->group == nullptr) return nullptr;
  return store_unexpected(*port, std::move(message), finished);
}

bool PointToPoint::has_room(uint64_t bytes) const {
  const uint64_t room = unexpected_bytes_ - unexpected_used_;
  return room >= kMessageOverheadBytes && bytes <= room - kMessageOverheadBytes;
}

PointToPoint::MessagePtr PointToPoint::store_unexpected(Port& port, MessagePtr message,
                                                        FinishedTransfers* finished) {
  if (!has_room(message->bytes)) {
    // Drop what is held for groups that have failed elsewhere and have no pending operations.
    for (auto& [number, other] : ports_) {
      if (other->group == nullptr || other->matching.empty() || !other->failure.ok()) continue;
      if (Status failure = other->group->failure(); !failure.ok() && other->pending.empty())
        fail_group(*other, failure, finished);
    }
    if (!port.failure.ok()) {
      message->discarded = true;
      return message;
    }
    if (!has_room(message->bytes)) return nullptr;
  }
  message->heap.reset(new (std::nothrow) std::byte[std::max<uint64_t>(message->bytes, 1)]);
  if (message->heap == nullptr) return nullptr;  // the cell stays in the ring, as without room
  message->charge = message->bytes + kMessageOverheadBytes;
  unexpected_used_ += message->charge;
  port.matching.hold(message);
  return message;
}

// The sender has given up a message half-way.
void PointToPoint::end_abandoned(const MessagePtr& message, FinishedTransfers* finished) {
  if (message->discarded) return;
  message->discarded = true;
  release_charge(message.get());
  Port* port = find_port(message->port);
  if (port == nullptr) return;
  if (TransferPtr receive = std::move(message->receive)) {
    if (Status cause = port->group->failure(); !cause.ok()) {
      fail_group(*port, cause, finished);
    } else {
      // Does not fail the group yet: the root cause may be on its way, or lost with a dead process.
      port->set_pending_cause(
          make_status(Code::kAborted, "{}: {} gave up its send half-way; see why in its output",
                      receive->describe(), receive->group->name_member(message->source)));
    }
    return;
  }
  port->matching.erase_message(message);
}

// Stops receiving from and sending to this peer. The groups that use the connection end, with the
// root cause if that arrives soon. Returns false, as if no cell had moved.
bool PointToPoint::break_connection(Connection& connection, const Status& cause) {
  connection.broken = cause;
  if (connection.must_report_abandoned) --unreported_count_;  // the peer cannot be told any more
  connection.must_report_abandoned = false;
  for (auto& [number, port] : ports_)
    if (port->failure.ok() && !port->connections.empty() && port->names(connection.peer->id()))
      port->set_pending_cause(connection.broken);
  return false;
}

// Completes the sends that the peer has read in place.
bool PointToPoint::finish_read_in_place(Connection& connection, FinishedTransfers* finished) {
  bool some = false;
  while (!connection.read_in_place.empty() &&
         connection.read_in_place.front().first <= connection.channel->given_back()) {
    TransferPtr transfer = std::move(connection.read_in_place.front().second);
    connection.read_in_place.pop_front();
    finish_transfer(std::move(transfer), {}, finished);
    some = true;
  }
  return some;
}

bool PointToPoint::can_read_in_place(const PointToPointGroup& group, const Connection& connection,
                                     const void* data, uint64_t bytes,
                                     std::optional<uint64_t>* offset) const {
  const CellChannel& channel = *connection.channel;
  if (group.pool == nullptr || bytes == 0 || !channel.is_direct()) return false;
  const uint64_t most = channel.is_far() ? kMostInPlaceFarBytes : kMostInPlaceNearBytes;
  if (in_place_bytes_ >= 0 ? bytes < static_cast<uint64_t>(in_place_bytes_)
                           : bytes < kLeastInPlaceBytes || bytes >= most)
    return false;
  *offset = group.pool->find(data, bytes);
  return offset->has_value();
}

bool PointToPoint::progress_out(Connection& connection, FinishedTransfers* finished) {
  // Nothing moves any more; pending operations wait for the root cause.
  if (!connection.broken.ok()) return false;
  const bool is_finished = finish_read_in_place(connection, finished);
  int filled = 0;
  for (; filled < kMostCellsInTurn; ++filled) {
    if (connection.outgoing.empty() && !connection.must_report_abandoned) break;
    CellHeader header{};
    header.sequence = connection.sent_messages + 1;
    TransferPtr done;
    if (connection.must_report_abandoned) {
      if (connection.channel->vacant_cell(0) == nullptr) break;
      header.group = connection.abandoned_group;
      header.port = connection.abandoned_port;
      header.flags = kAbandoned;
      connection.must_report_abandoned = false;
      --unreported_count_;
      ++connection.sent_messages;
    } else {
      const TransferPtr& transfer = connection.outgoing.front();
      const bool in_place = transfer->pool_offset.has_value();
      const size_t bytes = in_place
                               ? sizeof(uint64_t)
                               : std::min<uint64_t>(connection.channel->cell_bytes(transfer->bytes),
                                                    transfer->bytes - transfer->sent_bytes);
      std::byte* cell = connection.channel->vacant_cell(bytes);
      if (cell == nullptr) break;
      header.group = transfer->group->id;
      header.port = transfer->destination_port();
      header.bytes = transfer->bytes;
      header.cell_bytes = static_cast<uint32_t>(bytes);
      header.tag = transfer->tag;
      header.source = transfer->group->rank;
      header.dtype = static_cast<uint8_t>(transfer->dtype);
      header.flags = connection.begun ? 0 : kFirstCell;
      if (in_place) {
        header.flags |= kInPlace;
        std::memcpy(cell, &*transfer->pool_offset, bytes);
        transfer->sent_bytes = transfer->bytes;
      } else {
        connection.channel->fill(cell, transfer->source + transfer->sent_bytes, bytes);
        transfer->sent_bytes += bytes;
      }
      connection.begun = transfer->sent_bytes < transfer->bytes;
      if (!connection.begun) {
        done = transfer;
        connection.outgoing.pop_front();
        ++connection.sent_messages;
      }
    }
    const bool more = connection.begun && filled + 1 < kMostCellsInTurn;
    if (connection.channel->publish(header, more)) ring(*connection.peer);
    if (Status sent = connection.channel->failure(); !sent.ok())
      return break_connection(connection, sent);
    if (done == nullptr) continue;
    if (done->pool_offset.has_value()) {
      connection.read_in_place.emplace_back(connection.channel->published(), done);
      continue;
    }
    connection.channel->end_message(done->bytes);
    finish_transfer(done, {}, finished);
  }
  return filled > 0 || is_finished;
}

Status PointToPoint::check_match(const Transfer& transfer, const Message& message) const {
  const PointToPointGroup& group = *transfer.group;
  DSCOMM_RETURN_IF_ERROR(check_source(group, message.from, message.source));
  if (transfer.dtype == message.dtype && transfer.bytes == message.bytes) return {};
  return make_status(
      Code::kMismatch,
      "send and receive differ: {} made a send of {} to {}, which made a "
      "receive of {}; both sides must name the same dtype and number of "
      "elements",
      group.name_member(message.source), describe_data(message.dtype, message.count(), message.tag),
      group.name_member(group.rank), describe_data(transfer.dtype, transfer.count, transfer.tag));
}

void PointToPoint::release_charge(Message* message) {
  unexpected_used_ -= std::exchange(message->charge, 0);
  message->heap.reset();
}

}  // namespace dscomm
