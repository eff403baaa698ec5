#include "core/messages/point_to_point.h"

#include "core/messages/state.h"

namespace dscomm {
namespace {

// How long a receiver polls, with the mutex held, for the next cell of a message: some 2 us, the
// time in which a sender fills a cell.
constexpr int kPausesForCell = 40;

Status check_arguments(const PointToPointGroup& group, const char* what, const void* data,
                       size_t count, DType dtype, int peer, bool any_allowed) {
  int size = static_cast<int>(group.peers.size());
  const char* side = any_allowed ? "source" : "destination";
  if (dtype_bytes(dtype) == 0)
    return make_status(Code::kInvalidArgument, "{}: {} is not a dtype that dscomm carries", what,
                       dtype_name(dtype));
  const bool is_any = any_allowed && peer == -1 && size > 1;  // any member but this one
  if (!is_any && (peer < 0 || peer >= size))
    return make_status(Code::kInvalidArgument,
                       "{}: {} {} is not a rank of group '{}', which has {}", what, side, peer,
                       group.name, size);
  if (peer == group.rank)
    return make_status(Code::kInvalidArgument, "{}: {} {} is this rank itself", what, side, peer);
  if (count > SIZE_MAX / dtype_bytes(dtype))
    return make_status(Code::kInvalidArgument, "{}: {} elements of {} are more than memory holds",
                       what, count, dtype_name(dtype));
  if (data == nullptr && count > 0)
    return make_status(Code::kInvalidArgument, "{}: {} elements at a null address", what, count);
  return {};
}

// The cause that members get if this rank leaves while they may read its memory.
Status describe_leaving(const PointToPointGroup& group) {
  const Departure departure = group.departure(group.rank);
  return Status(Code::kPeerLeft, group.name_member(group.rank) + " " + departure.how() +
                                     " before all that it sent was received; " +
                                     departure.advice("every send needs its receive"));
}

}  // namespace

PointToPoint::PointToPoint(std::shared_ptr<Arena> arena, const Settings& settings,
                           std::unique_ptr<Doorbell> doorbell)
    : arena_(std::move(arena)),
      doorbell_(std::move(doorbell)),
      channel_bytes_(static_cast<size_t>(settings.channel_bytes)),
      unexpected_bytes_(static_cast<uint64_t>(settings.unexpected_bytes)),
      in_place_bytes_(settings.in_place_bytes),
      slice_ns_(settings.sleep_slice_ms * 1'000'000),
      directory_(arena_) {}

PointToPoint::~PointToPoint() {
  FinishedTransfers finished;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    worker_wake_.notify_all();
    doorbell_->ring(doorbell_->token());
    for (auto& [number, port] : ports_)
      end_port(*port, Status(Code::kAborted, "this process has ended its communication"),
               &finished);
  }
  deliver(std::move(finished));
  if (worker_.joinable()) worker_.join();
}

OperationPtr PointToPoint::send(GroupPtr group, const void* data, size_t count, DType dtype,
                                int dst, int tag, std::shared_ptr<void> keep,
                                std::chrono::milliseconds timeout) {
  Status status = check_arguments(*group, "send", data, count, dtype, dst, false);
  if (!status.ok()) return Operation::refuse(status);
  static constexpr std::byte kNothing{};  // an empty tensor may have no address
  return submit(std::make_shared<Transfer>(this, std::move(group), count > 0 ? data : &kNothing,
                                           nullptr, count, dtype, dst, tag, std::move(keep),
                                           timeout));
}

OperationPtr PointToPoint::receive(GroupPtr group, void* data, size_t count, DType dtype, int src,
                                   int tag, std::shared_ptr<void> keep,
                                   std::chrono::milliseconds timeout) {
  Status status = check_arguments(*group, "receive", data, count, dtype, src, true);
  if (!status.ok()) return Operation::refuse(status);
  return submit(std::make_shared<Transfer>(this, std::move(group), nullptr, data, count, dtype, src,
                                           tag, std::move(keep), timeout));
}

Status PointToPoint::blocking_send(const GroupPtr& group, const void* data, size_t count,
                                   DType dtype, int dst, int tag,
                                   std::chrono::milliseconds timeout) {
  DSCOMM_RETURN_IF_ERROR(check_arguments(*group, "send", data, count, dtype, dst, false));
  OperationPtr rest;
  FinishedTransfers finished;
  FastPath sent;
  {
    std::lock_guard lock(mutex_);
    sent = try_send(group, data, count, dtype, dst, tag, timeout, &rest, &finished);
  }
  if (sent == FastPath::kNotPossible)
    rest = send(group, data, count, dtype, dst, tag, nullptr, timeout);
  if (!finished.empty()) deliver(std::move(finished));
  return rest == nullptr ? Status() : rest->wait();
}

Status PointToPoint::blocking_receive(const GroupPtr& group, void* data, size_t count, DType dtype,
                                      int src, int tag, std::chrono::milliseconds timeout,
                                      int* came_from) {
  DSCOMM_RETURN_IF_ERROR(check_arguments(*group, "receive", data, count, dtype, src, true));
  if (came_from != nullptr) *came_from = src;
  OperationPtr rest;
  FastPath received = src >= 0 ? FastPath::kNotYet : FastPath::kNotPossible;
  for (int pauses = 0; received == FastPath::kNotYet;) {
    CellFlag flag;
    FinishedTransfers finished;
    {
      std::lock_guard lock(mutex_);
      received = try_receive(group, data, count, dtype, src, tag, timeout, &flag, &rest, &finished);
    }
    if (!finished.empty()) deliver(std::move(finished));
    if (received != FastPath::kNotYet) break;
    // Polls without the mutex. That is safe, because `group` keeps the word's memory mapped.
    // Relaxed: next_cell() loads the word again.
    while (flag.word->load(std::memory_order_relaxed) != flag.value &&
           ++pauses <= group->wait.spin_pauses)
      pause_core();
    if (pauses > group->wait.spin_pauses) received = FastPath::kNotPossible;
  }
  if (received == FastPath::kNotPossible)
    rest = receive(group, data, count, dtype, src, tag, nullptr, timeout);
  if (rest == nullptr) return {};
  Status status = rest->wait();
  if (came_from != nullptr && src < 0) *came_from = rest->source();
  return status;
}

// Publishes as many cells as there is room for, if no earlier message waits in the channel.
// kNotPossible: no cell was published. `rest` sends the other cells.
PointToPoint::FastPath PointToPoint::try_send(const GroupPtr& group, const void* data, size_t count,
                                              DType dtype, int dst, int tag,
                                              std::chrono::milliseconds timeout, OperationPtr* rest,
                                              FinishedTransfers* finished) {
  Port* port = find_port(group->ports[group->rank]);
  if (port == nullptr || port->connections.empty() || !port->failure.ok())
    return FastPath::kNotPossible;
  Connection& connection = *port->connections[dst];
  CellChannel& channel = *connection.channel;
  const size_t bytes = count * dtype_bytes(dtype);
  std::optional<uint64_t> offset;
  if (can_read_in_place(*group, connection, data, bytes, &offset)) return FastPath::kNotPossible;
  if (!channel.is_direct() || !connection.outgoing.empty() || connection.must_report_abandoned ||
      !connection.broken.ok() || !channel.open(channel_bytes_, bytes).ok())
    return FastPath::kNotPossible;
  if (!group->peers[dst]->alive(false) || group->has_left(dst) || !group->failure().ok())
    return FastPath::kNotPossible;
  CellHeader header{};
  header.group = group->id;
  header.sequence = connection.sent_messages + 1;
  header.bytes = bytes;
  header.port = group->ports[dst];
  header.tag = tag;
  header.source = group->rank;
  header.dtype = static_cast<uint8_t>(dtype);
  header.flags = kFirstCell;
  const auto* from = static_cast<const std::byte*>(data);
  size_t sent = 0;
  do {
    const size_t most = std::min(channel.cell_bytes(bytes), bytes - sent);
    std::byte* cell = channel.vacant_cell(most);
    if (cell == nullptr) break;
    channel.fill(cell, from + sent, most);
    header.cell_bytes = static_cast<uint32_t>(most);
    sent += most;
    if (channel.publish(header, sent < bytes)) ring(*connection.peer);
    header.flags = 0;
  } while (sent < bytes);
  if (header.flags == kFirstCell) return FastPath::kNotPossible;  // no cell was published
  if (sent == bytes) {
    ++connection.sent_messages;
    channel.end_message(bytes);
    return FastPath::kDone;
  }
  auto transfer = std::make_shared<Transfer>(this, group, data, nullptr, count, dtype, dst, tag,
                                             nullptr, timeout);
  transfer->sent_bytes = sent;
  connection.begun = true;
  connection.outgoing.push_back(transfer);
  continue_as_operation(*port, transfer, finished);
  *rest = std::move(transfer);
  return FastPath::kDone;
}

// Receives the next message of the channel if only this receive can match it. kNotYet: the message
// has not come, and will appear at `flag`.
PointToPoint::FastPath PointToPoint::try_receive(const GroupPtr& group, void* data, size_t count,
                                                 DType dtype, int src, int tag,
                                                 std::chrono::milliseconds timeout, CellFlag* flag,
                                                 OperationPtr* rest, FinishedTransfers* finished) {
  const uint32_t own = group->ports[group->rank];
  Port* port = find_port(own);
  if (port == nullptr || port->connections.empty() || !port->failure.ok() ||
      !port->matching.empty())
    return FastPath::kNotPossible;
  Connection& connection = *port->connections[src];
  CellChannel& channel = *connection.channel;
  if (connection.incoming != nullptr || !connection.broken.ok()) return FastPath::kNotPossible;
  const size_t bytes = count * dtype_bytes(dtype);
  auto* to = static_cast<std::byte*>(data);
  uint64_t arrived = 0;
  do {
    *flag = channel.next_flag();
    if (flag->word == nullptr) break;
    // Polls only after a message has begun, because its sender then fills the next cell. Relaxed:
    // next_cell() loads the word again.
    for (int pauses = 0; arrived > 0 && pauses < kPausesForCell; ++pauses) {
      if (flag->word->load(std::memory_order_relaxed) == flag->value) break;
      pause_core();
    }
    if (flag->word->load(std::memory_order_relaxed) != flag->value) {
      if (arrived == 0) return FastPath::kNotYet;
      break;
    }
    Result<std::optional<ArrivedCell>> next = channel.next_cell();
    if (!next.ok() || !next.value().has_value()) break;
    const ArrivedCell& cell = *next.value();
    const CellHeader& header = cell.header;
    // progress() handles every unusual cell.
    if (header.sequence != connection.received_messages + 1 || header.port != own ||
        header.group != group->id || header.flags != (arrived == 0 ? kFirstCell : 0) ||
        header.source != src || header.tag != tag || header.dtype != static_cast<uint8_t>(dtype) ||
        header.bytes != bytes || header.cell_bytes > bytes - arrived ||
        (header.cell_bytes == 0 && bytes > 0))
      break;
    copy_out(to + arrived, cell.data, header.cell_bytes, bytes);
    arrived += header.cell_bytes;
    if (arrived == bytes) ++connection.received_messages;
    if (channel.consume(false)) ring(*connection.peer);
    if (arrived == bytes) return FastPath::kDone;
  } while (true);
  if (arrived == 0) return FastPath::kNotPossible;
  auto transfer = std::make_shared<Transfer>(this, group, nullptr, data, count, dtype, src, tag,
                                             nullptr, timeout);
  transfer->came_from = src;
  auto message = std::make_shared<Message>();
  message->from = connection.peer->id();
  message->port = own;
  message->source = src;
  message->tag = tag;
  message->dtype = dtype;
  message->bytes = bytes;
  message->arrived = arrived;
  message->receive = transfer;
  connection.incoming = std::move(message);
  continue_as_operation(*port, transfer, finished);
  *rest = std::move(transfer);
  return FastPath::kDone;
}

// Makes a pending operation of a call that began without one, in try_send() or try_receive().
void PointToPoint::continue_as_operation(Port& port, const TransferPtr& transfer,
                                         FinishedTransfers* finished) {
  port.pending.insert(transfer);
  ++pending_count_;
  if (Status status = register_pending(transfer); !status.ok()) fail_group(port, status, finished);
}

uint32_t PointToPoint::open_port() {
  std::lock_guard lock(mutex_);
  const uint32_t number = ++last_port_;
  ports_[number] = std::make_unique<Port>(number);
  return number;
}

void PointToPoint::join(GroupPtr group) {
  std::lock_guard lock(mutex_);
  Port* port = find_port(group->ports[group->rank]);
  if (port != nullptr) port->group = std::move(group);
}

void PointToPoint::close_port(uint32_t number) {
  FinishedTransfers finished;
  {
    std::lock_guard lock(mutex_);
    if (auto found = ports_.find(number); found != ports_.end()) {
      Port& port = *found->second;
      Status status = port.failure;
      if (status.ok() && port.group != nullptr) {
        const PointToPointGroup& group = *port.group;
        status = group.failure();
        // A peer may be reading a send's memory: end the group before the caller can free it.
        for (const auto& [id, connection] : connections_)
          for (const auto& [cell, transfer] : connection->read_in_place)
            if (transfer->port == number)
              group.abort(status.ok() ? describe_leaving(group) : status);
        if (status.ok())
          status = Status(Code::kAborted,
                          "group '" + group.name + "' was destroyed before this ended; wait first");
      }
      end_port(port, status, &finished);
      ports_.erase(found);
    }
    drop_dead_channels();
    // Tells receivers of half-sent messages that no more comes: the worker does if a ring is full.
    progress(&finished);
    if (has_work() && helpers_ == 0) unpark_worker();
  }
  deliver(std::move(finished));
}

OperationPtr PointToPoint::submit(const TransferPtr& transfer) {
  FinishedTransfers finished;
  {
    std::lock_guard lock(mutex_);
    Port* port = find_port(transfer->port);
    if (stopping_ || port == nullptr) {
      transfer->is_finished = true;
      finished.push_back({transfer, Status(Code::kAborted, "group '" + transfer->group->name +
                                                               "' was destroyed on this rank")});
    } else {
      connect_members(*port);
      port->pending.insert(transfer);
      ++pending_count_;
      Status status = start(*port, transfer, &finished);
      if (status.ok() && !transfer->is_finished) status = register_pending(transfer);
      // All is sent, but some cells are not through. No thread waits, so the worker makes progress.
      if (transfer->is_finished && in_flight_) status = start_worker(*transfer->group);
      if (!transfer->is_finished && !status.ok()) fail_group(*port, status, &finished);
    }
  }
  deliver(std::move(finished));
  return transfer;
}

// Completes finished operations. The caller holds no lock.
void PointToPoint::deliver(FinishedTransfers finished) {
  // All are completed before the first callback, which may wait for another one of them.
  std::vector<std::vector<Operation::Callback>> callbacks;
  for (const auto& [transfer, status] : finished) {
    transfer->keep.reset();
    callbacks.push_back(transfer->complete(status, status.ok() ? transfer->came_from : -1));
  }
  for (size_t k = 0; k < finished.size(); ++k)
    Operation::call_back(callbacks[k], finished[k].second);
}

// Connects to all members: from now on, each progress() reads what they have sent.
void PointToPoint::connect_members(Port& port) {
  if (!port.connections.empty()) return;
  const PointToPointGroup& group = *port.group;
  port.connections.resize(group.peers.size());
  for (size_t k = 0; k < group.peers.size(); ++k) {
    if (static_cast<int>(k) == group.rank) continue;
    std::unique_ptr<Connection>& connection = connections_[group.peers[k]->id()];
    if (connection == nullptr) {
      connection = std::make_unique<Connection>(arena_, directory_, group.peers[k]);
      if (connection->is_polled) ++polled_count_;
      if (SocketList* sockets = connection->peer->sockets(); sockets != nullptr && !remote_sockets_)
        remote_sockets_ = std::make_unique<SocketSleep>(*sockets);
    } else if (!connection->broken.ok()) {
      port.set_pending_cause(connection->broken);
    }
    port.connections[k] = connection.get();
  }
}

// The caller ends the group if this fails.
Status PointToPoint::start(Port& port, const TransferPtr& transfer, FinishedTransfers* finished) {
  if (!port.failure.ok()) {
    finish_transfer(transfer, port.failure, finished);
    return {};
  }
  if (transfer->sending) {
    DSCOMM_RETURN_IF_ERROR(port.group->failure());
    DSCOMM_RETURN_IF_ERROR(start_send(port, transfer));
    // To a peer without a doorbell, first only send, because polling its channel costs more.
    Connection& connection = *port.connections[transfer->peer];
    if (connection.is_polled) {
      if (progress_out(connection, finished)) polled_slice_ns_ = connection.polled_ns = 0;
      connection.in_flight = connection.channel->in_flight();
      in_flight_ |= connection.in_flight;
      if (transfer->is_finished) return {};
    }
  } else {
    DSCOMM_RETURN_IF_ERROR(start_receive(port, transfer, finished));
  }
  progress(finished, transfer.get());
  // Checked last, to receive the messages that a member sent before the group failed.
  return transfer->is_finished ? Status() : port.group->failure();
}

Status PointToPoint::start_send(Port& port, const TransferPtr& transfer) {
  const PointToPointGroup& group = *transfer->group;
  // Check first, because the ring would accept a message that a dead peer never reads.
  const PeerProcess& peer = *group.peers[transfer->peer];
  const MemberLife life = read_member_life([&] { return peer.alive(); },
                                           [&] { return group.has_left(transfer->peer); });
  if (life.gone())
    return describe_gone(true, life.died, transfer->describe() + ": ",
                         group.name_member(transfer->peer),
                         life.died ? Departure() : group.departure(transfer->peer));
  Connection& connection = *port.connections[transfer->peer];
  const bool in_place = can_read_in_place(group, connection, transfer->source, transfer->bytes,
                                          &transfer->pool_offset);
  DSCOMM_RETURN_IF_ERROR(
      connection.channel->open(channel_bytes_, in_place ? sizeof(uint64_t) : transfer->bytes));
  connection.outgoing.push_back(transfer);
  return {};
}

Status PointToPoint::start_receive(Port& port, const TransferPtr& transfer,
                                   FinishedTransfers* finished) {
  MessagePtr message = port.matching.find_message(transfer);
  if (message == nullptr) {
    port.matching.post(transfer);
    return {};
  }
  DSCOMM_RETURN_IF_ERROR(check_match(*transfer, *message));
  port.matching.erase_message(message);
  transfer->came_from = message->source;
  if (message->arrived > 0)
    std::memcpy(transfer->destination, message->heap.get(), message->arrived);
  release_charge(message.get());
  // The rest of the message goes directly to its destination.
  message->receive = transfer;
  if (message->arrived == message->bytes) finish_transfer(transfer, {}, finished);
  return {};
}

// Makes sure that a pending operation completes or fails in time.
Status PointToPoint::register_pending(const TransferPtr& transfer) {
  const int64_t now = monotonic_ns();
  if (pending_count_ == 1) last_check_ns_ = std::max(last_check_ns_, now - 1);  // no check was due
  transfer->end_ns = now + transfer->timeout_ms * 1'000'000;
  next_deadline_ns_ = std::min(next_deadline_ns_, transfer->end_ns);
  // Without slices, a sleeping thread would not notice an earlier deadline.
  if (asleep_ && slice_ns_ == 0) doorbell_->ring(doorbell_->token());
  return start_worker(*transfer->group);
}

// By value: the caller's pointer may lie in a container from which this function erases it.
void PointToPoint::finish_transfer(TransferPtr transfer, const Status& status,
                                   FinishedTransfers* finished) {
  transfer->is_finished = true;
  ports_.at(transfer->port)->pending.erase(transfer);
  --pending_count_;
  bool waited_for = transfer->waiting_threads > 0;
  finished->push_back({std::move(transfer), status});
  if (!waited_for) return;
  // Another thread may wait for this transfer and be asleep, because no peer has rung the doorbell.
  changed_.notify_all();
  if (asleep_) doorbell_->ring(doorbell_->token());
}

// Ends a group for all its members, with its first known cause.
void PointToPoint::fail_group(Port& port, const Status& cause, FinishedTransfers* finished) {
  if (!port.failure.ok()) return;
  Status first = port.group->failure();
  if (first.ok()) first = cause;
  port.group->abort(first);
  port.failure = first;
  if (!port.pending.empty()) port.group->note_failed_calls();
  end_port(port, first, finished);
  // Wake members that sleep on their doorbell: else they notice only at the end of their slice.
  for (const std::shared_ptr<PeerProcess>& peer : port.group->peers)
    if (peer->sleeps()) ring(*peer);
}

// Afterwards nothing of the port is pending or held. Only peers may still read a send in place.
void PointToPoint::end_port(Port& port, const Status& status, FinishedTransfers* finished) {
  while (!port.pending.empty()) finish_transfer(*port.pending.begin(), status, finished);
  port.matching.for_each_message([&](const MessagePtr& message) {
    release_charge(message.get());
    message->discarded = true;
  });
  port.matching.clear();
  for (auto& [id, connection] : connections_) {
    if (connection->begun && connection->outgoing.front()->port == port.number) {
      connection->begun = false;
      connection->must_report_abandoned = connection->broken.ok();
      if (connection->must_report_abandoned) ++unreported_count_;
      connection->abandoned_group = connection->outgoing.front()->group->id;
      connection->abandoned_port = connection->outgoing.front()->destination_port();
    }
    std::erase_if(connection->read_in_place,
                  [&](const auto& entry) { return entry.second->port == port.number; });
    std::erase_if(connection->outgoing,
                  [&](const TransferPtr& transfer) { return transfer->port == port.number; });
    if (connection->incoming != nullptr && connection->incoming->port == port.number) {
      connection->incoming->receive = nullptr;
      connection->incoming->discarded = true;
    }
  }
}

// Keeps the channel to a dead process while any group names the process: unread messages may lie in
// the channel, and a second one would read from the start. A group that still forms may name any.
void PointToPoint::drop_dead_channels() {
  for (const auto& [number, port] : ports_)
    if (port->group == nullptr) return;
  std::erase_if(connections_, [this](auto& entry) {
    Connection& connection = *entry.second;
    if (connection.peer->alive()) return false;
    for (const auto& [number, port] : ports_)
      if (port->names(entry.first)) return false;
    if (connection.must_report_abandoned) --unreported_count_;
    if (connection.is_polled) --polled_count_;
    connection.channel->drop();
    return true;
  });
}

}  // namespace dscomm
