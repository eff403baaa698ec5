#include "core/messages/point_to_point.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <new>
#include <unordered_set>
#include <utility>

#include "core/base/deadline.h"
#include "core/base/thread.h"
#include "core/team/first_cause.h"

namespace dscomm {
namespace {

// How many cells one connection may move before the others get their turn: two ringfuls, so that a
// pass empties a ring even when its sender refills it meanwhile.
constexpr int kMostCellsInTurn = 2 * kChannelCells;

// What a held message costs beside its data, so that empty ones are bounded too.
constexpr uint64_t kMessageOverheadBytes = 256;

// A look asks every member of every group with something pending; as often as the first slice of a
// futex wait.
constexpr int64_t kLookNs = 1'000'000;
// A thorough look costs a system call for each member.
constexpr int64_t kThoroughLookNs = 100'000'000;

// How long a wait sleeps where a peer rings no doorbell: short beside what the wire takes.
constexpr int64_t kPolledSliceNs = 50'000;

// The worker looks this often whether somebody waits himself; it takes over when nobody did for one
// tick, and parks after this many in which it had nothing to do.
constexpr std::chrono::milliseconds kWorkerTick{1};
constexpr int kTicksBeforeParking = 10;

constexpr int64_t kLongestTimeoutMs = int64_t{1}
                                      << 40;  // some 35 years; keeps nanoseconds in range

std::string describe_data(DType dtype, uint64_t count, int tag) {
  return std::string(dtype_name(dtype)) + "[" + std::to_string(count) + "] tag " +
         std::to_string(tag);
}

Status check_arguments(const PointToPointGroup& group, const char* what, const void* data,
                       size_t count, DType dtype, int peer, bool any_allowed) {
  int size = static_cast<int>(group.peers.size());
  const char* side = any_allowed ? "source" : "destination";
  if (dtype_bytes(dtype) == 0)
    return make_status(Code::kInvalidArgument, "%s: %s is not a dtype that dscomm carries", what,
                       dtype_name(dtype));
  if (any_allowed && peer == -1 && size > 1) {
    // Any member but this one.
  } else if (peer < 0 || peer >= size) {
    return make_status(Code::kInvalidArgument,
                       "%s: %s %d is not a rank of group '%s', which has %d", what, side, peer,
                       group.name.c_str(), size);
  } else if (peer == group.rank) {
    return make_status(Code::kInvalidArgument, "%s: %s %d is this rank itself", what, side, peer);
  }
  if (count > SIZE_MAX / dtype_bytes(dtype))
    return make_status(Code::kInvalidArgument, "%s: %zu elements of %s are more than memory holds",
                       what, count, dtype_name(dtype));
  if (data == nullptr && count > 0)
    return make_status(Code::kInvalidArgument, "%s: %zu elements at a null address", what, count);
  return {};
}

// Whether a message that came from a process is from the rank that it names.
Status check_source(const PointToPointGroup& group, const ArenaId& from, int source) {
  if (source >= 0 && source < static_cast<int>(group.peers.size()) &&
      group.peers[static_cast<size_t>(source)]->id() == from)
    return {};
  return make_status(Code::kInternal,
                     "a message in group '%s' says that it is from rank %d, but it is not",
                     group.name.c_str(), source);
}

}  // namespace

// A send or a receive. Everything but the constants is guarded by PointToPoint's mutex.
class PointToPoint::Transfer final : public Operation {
 public:
  Transfer(PointToPoint* engine, GroupPtr of, const void* from, void* to, size_t elements,
           DType type, int other, int label, std::shared_ptr<void> owner,
           std::chrono::milliseconds timeout)
      : group(std::move(of)),
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
  uint64_t sent_bytes = 0;  // of a send: in cells
  int came_from = -1;       // of a receive: the rank
  int waiting_threads = 0;
  bool settled = false;  // its end is decided; finish() follows with the mutex free

 protected:
  void help(std::chrono::milliseconds limit) override { engine_->help(*this, limit); }

 private:
  PointToPoint* const engine_;
};

// A message on its way in.
struct PointToPoint::Message {
  ArenaId from;
  uint64_t group = 0;
  int source = -1;
  int tag = 0;
  DType dtype = DType::kUInt8;
  uint64_t count = 0;
  uint64_t bytes = 0;
  uint64_t arrived = 0;
  TransferPtr receive;                // where it goes, once a receive has matched
  std::unique_ptr<std::byte[]> heap;  // where it goes until then
  uint64_t charge = 0;                // of unexpected_used_
  bool discarded = false;
};

// Of one tag in one group. In order of posting, and of arrival; never a pair that matches.
struct PointToPoint::Bucket {
  std::deque<TransferPtr> posted;
  std::deque<MessagePtr> unexpected;
};

struct PointToPoint::GroupState {
  GroupPtr group;  // null until this rank sends or receives in it
  Status failure;  // what ended it; every later operation fails with the same
  std::map<int, Bucket> buckets;
  std::unordered_set<TransferPtr> pending;
  Status suspicion;  // ends the group unless its cause is heard of soon
  int64_t suspected_ns = 0;

  void suspect(const Status& consequence) {
    if (!suspicion.ok()) return;
    suspicion = consequence;
    suspected_ns = monotonic_ns();
  }
};

// Everything between this process and another one, whatever the group.
struct PointToPoint::Connection {
  Connection(const std::shared_ptr<Arena>& arena, ChannelDirectory& directory,
             std::shared_ptr<Endpoint> endpoint)
      : peer(std::move(endpoint)), channel(peer->make_channel(arena, directory)) {}

  const std::shared_ptr<Endpoint> peer;
  const std::unique_ptr<CellChannel> channel;
  Status broken;  // why nothing that comes from there can be believed, or read

  std::deque<TransferPtr> outgoing;
  uint64_t sent_messages = 0;
  bool begun = false;       // the first of outgoing has a cell out
  bool abandoning = false;  // the message that had begun was given up; a cell has to say so
  uint64_t abandoned_group = 0;

  MessagePtr incoming;  // begun and not complete
  uint64_t received_messages = 0;
  bool unread = false;  // the last pass left cells in the ring
};

struct PointToPoint::Settled {
  TransferPtr transfer;
  Status status;
};

PointToPoint::PointToPoint(std::shared_ptr<Arena> arena, const Settings& settings,
                           std::unique_ptr<Doorbell> doorbell)
    : arena_(std::move(arena)),
      doorbell_(std::move(doorbell)),
      channel_bytes_(static_cast<size_t>(settings.channel_bytes)),
      unexpected_bytes_(static_cast<uint64_t>(settings.unexpected_bytes)),
      slice_ns_(settings.sleep_slice_ms * 1'000'000),
      directory_(arena_) {}

PointToPoint::~PointToPoint() {
  Outcome outcome;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    worker_wake_.notify_all();
    doorbell_->ring(doorbell_->token());
    for (auto& [id, state] : groups_)
      end_group(*state, Status(Code::kAborted, "this process has ended its communication"),
                &outcome);
  }
  deliver(std::move(outcome));
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

void PointToPoint::forget(uint64_t group_id) {
  Outcome outcome;
  {
    std::lock_guard lock(mutex_);
    forgotten_.insert(group_id);
    if (auto found = groups_.find(group_id); found != groups_.end()) {
      GroupState& state = *found->second;
      Status status = state.failure;
      if (status.ok() && state.group != nullptr) {
        status = state.group->failure();
        if (status.ok())
          status = Status(Code::kAborted, "group '" + state.group->name +
                                              "' was closed before this operation was done");
      }
      end_group(state, status, &outcome);
      groups_.erase(found);
    }
    drop_dead_channels();
    // The peers of half-sent messages hear that no more will come, from the worker if not now.
    progress(&outcome);
    if (has_work() && helpers_ == 0) unpark_worker();
  }
  deliver(std::move(outcome));
}

void PointToPoint::flush(std::chrono::milliseconds limit) {
  const Deadline deadline = Deadline::after(limit);
  std::unique_lock lock(mutex_);
  Outcome outcome;
  while (in_flight_ && !deadline.expired()) {
    progress(&outcome);
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::nanoseconds(kPolledSliceNs));
    lock.lock();
  }
  lock.unlock();
  deliver(std::move(outcome));
}

OperationPtr PointToPoint::submit(const TransferPtr& transfer) {
  Outcome outcome;
  {
    std::lock_guard lock(mutex_);
    if (stopping_ || forgotten_.contains(transfer->group->id)) {
      transfer->settled = true;
      outcome.push_back({transfer, Status(Code::kAborted, "group '" + transfer->group->name +
                                                              "' has been closed on this rank")});
    } else {
      GroupState& state = state_of(transfer->group);
      state.pending.insert(transfer);
      ++pending_count_;
      Status status = start(state, transfer, &outcome);
      if (status.ok() && !transfer->settled) status = attend(transfer);
      // Sent, but not through: nobody will wait for it, so the worker sees to it.
      if (transfer->settled && in_flight_) {
        status = start_worker(*transfer->group);
        if (status.ok() && helpers_ == 0) unpark_worker();
      }
      if (!transfer->settled && !status.ok()) fail_group(state, status, &outcome);
    }
  }
  deliver(std::move(outcome));
  return transfer;
}

// Finishes what was settled, on a thread that holds no lock.
void PointToPoint::deliver(Outcome outcome) {
  // All are done before any calls back: a callback may wait for another one of them.
  std::vector<std::vector<Operation::Callback>> callbacks;
  for (Settled& settled : outcome) {
    settled.transfer->keep.reset();
    callbacks.push_back(settled.transfer->complete(
        settled.status, settled.status.ok() ? settled.transfer->came_from : -1));
  }
  for (size_t k = 0; k < outcome.size(); ++k) Operation::call_back(callbacks[k], outcome[k].status);
}

Status PointToPoint::nonsense(const Connection& connection, const char* what) {
  return Status(Code::kInternal, "a cell from " + connection.peer->describe() + " " + what);
}

PointToPoint::GroupState& PointToPoint::state_of(const GroupPtr& group) {
  std::unique_ptr<GroupState>& state = groups_[group->id];
  if (state == nullptr) state = std::make_unique<GroupState>();
  if (state->group != nullptr) return *state;
  // From now on this process reads what any member sends, also while it waits for something else.
  state->group = group;
  for (size_t k = 0; k < group->peers.size(); ++k) {
    if (static_cast<int>(k) == group->rank) continue;
    std::unique_ptr<Connection>& connection = connections_[group->peers[k]->id()];
    if (connection != nullptr) {
      if (!connection->broken.ok()) state->suspect(connection->broken);
      continue;
    }
    connection = std::make_unique<Connection>(arena_, directory_, group->peers[k]);
    if (connection->peer->doorbell() == nullptr) ++polled_count_;
  }
  return *state;
}

PointToPoint::Connection& PointToPoint::connection_to(const PointToPointGroup& group,
                                                      int peer) const {
  return *connections_.at(group.peers[static_cast<size_t>(peer)]->id());
}

// An error ends the group.
Status PointToPoint::start(GroupState& state, const TransferPtr& transfer, Outcome* outcome) {
  if (!state.failure.ok()) {
    settle(transfer, state.failure, outcome);
    return {};
  }
  DSCOMM_RETURN_IF_ERROR(state.group->failure());
  DSCOMM_RETURN_IF_ERROR(transfer->sending ? start_send(transfer)
                                           : start_receive(state, transfer, outcome));
  progress(outcome);
  return {};
}

Status PointToPoint::start_send(const TransferPtr& transfer) {
  const PointToPointGroup& group = *transfer->group;
  // The ring would take the message of a peer that will never read it.
  std::string what = "send of " + describe_data(transfer->dtype, transfer->count, transfer->tag) +
                     " in group '" + group.name + "': ";
  if (group.has_left(transfer->peer))
    return Status(Code::kPeerLeft, what + group.name_member(transfer->peer) + " left the group");
  if (!group.peers[static_cast<size_t>(transfer->peer)]->alive())
    return Status(Code::kPeerDied, what + group.name_member(transfer->peer) +
                                       " died or exited without leaving the group");
  Connection& connection = connection_to(group, transfer->peer);
  DSCOMM_RETURN_IF_ERROR(connection.channel->open(channel_bytes_));
  connection.outgoing.push_back(transfer);
  return {};
}

Status PointToPoint::start_receive(GroupState& state, const TransferPtr& transfer,
                                   Outcome* outcome) {
  Bucket& bucket = state.buckets[transfer->tag];
  auto fits = [&](const MessagePtr& message) {
    return transfer->peer == -1 || transfer->peer == message->source;
  };
  auto found = std::find_if(bucket.unexpected.begin(), bucket.unexpected.end(), fits);
  if (found == bucket.unexpected.end()) {
    bucket.posted.push_back(transfer);
    return {};
  }
  MessagePtr message = *found;
  DSCOMM_RETURN_IF_ERROR(check_match(*transfer, *message));
  bucket.unexpected.erase(found);
  if (bucket.unexpected.empty() && bucket.posted.empty()) state.buckets.erase(transfer->tag);
  transfer->came_from = message->source;
  if (message->arrived > 0)
    std::memcpy(transfer->destination, message->heap.get(), message->arrived);
  refund(message.get());
  // What is still to come goes straight to its place.
  message->receive = transfer;
  if (message->arrived == message->bytes) settle(transfer, {}, outcome);
  return {};
}

// Sees to it that an operation which could not be done at once gets done or fails in time.
Status PointToPoint::attend(const TransferPtr& transfer) {
  transfer->end_ns = monotonic_ns() + transfer->timeout_ms * 1'000'000;
  next_deadline_ns_ = std::min(next_deadline_ns_, transfer->end_ns);
  // Without slices the sleeper would not learn of an earlier deadline.
  if (asleep_ && slice_ns_ == 0) doorbell_->ring(doorbell_->token());
  DSCOMM_RETURN_IF_ERROR(start_worker(*transfer->group));
  if (helpers_ == 0) unpark_worker();
  return {};
}

Status PointToPoint::start_worker(const PointToPointGroup& group) {
  if (worker_.joinable()) return {};
  Result<std::thread> worker = start_thread("point-to-point", [this] { work(); });
  if (!worker.ok())
    return Status(worker.status().code(), "rank " + std::to_string(group.rank) + " of group '" +
                                              group.name + "': " + worker.status().message());
  worker_ = std::move(worker).value();
  return {};
}

void PointToPoint::unpark_worker() {
  if (!worker_parked_) return;
  worker_parked_ = false;
  worker_wake_.notify_all();
}

// Moves what can be moved now. Does not block.
bool PointToPoint::progress(Outcome* outcome) {
  bool moved = false;
  in_flight_ = false;
  for (auto& [id, connection] : connections_) {
    moved |= progress_in(*connection, outcome);
    moved |= progress_out(*connection, outcome);
    in_flight_ |= connection->channel->in_flight();
  }
  return moved;
}

bool PointToPoint::progress_in(Connection& connection, Outcome* outcome) {
  connection.unread = false;
  if (!connection.broken.ok()) return false;
  for (int taken = 0;; ++taken) {
    Result<std::optional<ArrivedCell>> cell = connection.channel->next_cell();
    if (!cell.ok()) return break_connection(connection, cell.status());
    if (!cell.value().has_value()) return taken > 0;
    if (taken == kMostCellsInTurn || !take_cell(connection, *cell.value(), outcome)) {
      connection.unread = true;
      return taken > 0;
    }
    if (connection.channel->consume()) ring(*connection.peer);
  }
}

// Copies a cell to where it belongs. False when it has to stay in the ring.
bool PointToPoint::take_cell(Connection& connection, const ArrivedCell& cell, Outcome* outcome) {
  const CellHeader& header = cell.header;
  bool first = (header.flags & kFirstCell) != 0;
  bool continues = connection.incoming != nullptr;
  if (header.sequence != connection.received_messages + 1 || first == continues ||
      (continues && header.group != connection.incoming->group))
    return break_connection(connection, nonsense(connection, "came out of order"));
  if (!continues) connection.incoming = begin_message(connection, header, outcome);
  if (connection.incoming == nullptr) return false;
  MessagePtr message = connection.incoming;
  if ((header.flags & kAbandoned) != 0) {
    connection.incoming = nullptr;
    ++connection.received_messages;
    end_abandoned(message, outcome);
    return true;
  }
  uint64_t left = message->bytes - message->arrived;
  if (header.cell_bytes > left || (header.cell_bytes == 0 && left > 0))
    return break_connection(connection, nonsense(connection, "does not fit its message"));
  if (header.cell_bytes > 0 && !message->discarded) {
    std::byte* base = message->receive ? message->receive->destination : message->heap.get();
    std::memcpy(base + message->arrived, cell.data, header.cell_bytes);
  }
  message->arrived += header.cell_bytes;
  if (message->arrived == message->bytes) {
    connection.incoming = nullptr;
    ++connection.received_messages;
    if (message->receive) settle(message->receive, {}, outcome);
  }
  return true;
}

// Finds the receive of a message, or a place to keep it. Null when there is no room for it now.
PointToPoint::MessagePtr PointToPoint::begin_message(Connection& connection,
                                                     const CellHeader& header, Outcome* outcome) {
  auto make_message = [&] {
    auto message = std::make_shared<Message>();
    message->from = connection.peer->id();
    message->group = header.group;
    message->source = header.source;
    message->tag = header.tag;
    message->dtype = static_cast<DType>(header.dtype);
    message->count = header.count;
    message->bytes = header.bytes;
    return message;
  };
  auto found = groups_.find(header.group);
  GroupState* state = found == groups_.end() ? nullptr : found->second.get();
  if (forgotten_.contains(header.group) || (state != nullptr && !state->failure.ok())) {
    MessagePtr message = make_message();
    message->discarded = true;
    return message;
  }
  if (state != nullptr && state->group != nullptr) {
    const ArenaId& from = connection.peer->id();
    if (Status status = check_source(*state->group, from, header.source); !status.ok()) {
      fail_group(*state, status, outcome);
      MessagePtr message = make_message();
      message->discarded = true;
      return message;
    }
    if (auto at = state->buckets.find(header.tag); at != state->buckets.end()) {
      std::deque<TransferPtr>& posted = at->second.posted;
      auto fits = [&](const TransferPtr& receive) {
        return receive->peer == -1 || receive->peer == header.source;
      };
      if (auto receive = std::find_if(posted.begin(), posted.end(), fits);
          receive != posted.end()) {
        MessagePtr message = make_message();
        if (Status status = check_match(**receive, *message); !status.ok()) {
          fail_group(*state, status, outcome);
          message->discarded = true;
          return message;
        }
        message->receive = *receive;
        message->receive->came_from = header.source;
        posted.erase(receive);
        if (posted.empty() && at->second.unexpected.empty()) state->buckets.erase(at);
        return message;
      }
    }
  }
  uint64_t room = unexpected_bytes_ - unexpected_used_;
  if (room < kMessageOverheadBytes || header.bytes > room - kMessageOverheadBytes) return nullptr;
  std::unique_ptr<std::byte[]> heap(new (std::nothrow)
                                        std::byte[std::max<uint64_t>(header.bytes, 1)]);
  if (heap == nullptr) return nullptr;  // as if the limit were that low
  MessagePtr message = make_message();
  message->heap = std::move(heap);
  message->charge = header.bytes + kMessageOverheadBytes;
  unexpected_used_ += message->charge;
  if (state == nullptr) {
    std::unique_ptr<GroupState>& fresh = groups_[header.group];
    fresh = std::make_unique<GroupState>();
    state = fresh.get();
  }
  state->buckets[header.tag].unexpected.push_back(message);
  return message;
}

// The sender has given up a message in the middle.
void PointToPoint::end_abandoned(const MessagePtr& message, Outcome* outcome) {
  if (message->discarded) return;
  message->discarded = true;
  refund(message.get());
  auto found = groups_.find(message->group);
  if (found == groups_.end()) return;
  GroupState& state = *found->second;
  if (TransferPtr receive = std::move(message->receive)) {
    if (Status cause = state.group->failure(); !cause.ok()) {
      fail_group(state, cause, outcome);
    } else {
      // Why it did is on its way, or not: it may come through a process that has died meanwhile.
      state.suspect(Status(
          Code::kAborted,
          "receive of " + describe_data(receive->dtype, receive->count, receive->tag) +
              " in group '" + receive->group->name +
              "': " + receive->group->name_member(message->source) + " gave up its send half-way"));
    }
    return;
  }
  if (auto at = state.buckets.find(message->tag); at != state.buckets.end())
    std::erase(at->second.unexpected, message);
}

// Nothing more is read from there; the groups that talk to it end, with the reason why it broke
// where that is heard of soon. Returns false, for nothing was taken.
bool PointToPoint::break_connection(Connection& connection, const Status& cause) {
  connection.broken = cause;
  if (connection.abandoning) --abandoning_count_;  // it can be told no more
  connection.abandoning = false;
  const ArenaId& peer = connection.peer->id();
  for (auto& [id, state] : groups_) {
    if (state->group == nullptr || !state->failure.ok()) continue;
    bool member = std::any_of(state->group->peers.begin(), state->group->peers.end(),
                              [&](const auto& other) { return other->id() == peer; });
    if (member) state->suspect(connection.broken);
  }
  return false;
}

bool PointToPoint::progress_out(Connection& connection, Outcome* outcome) {
  // What is pending waits for the reason why.
  if (!connection.broken.ok()) return false;
  int filled = 0;
  for (; filled < kMostCellsInTurn; ++filled) {
    if (connection.outgoing.empty() && !connection.abandoning) break;
    std::byte* cell = connection.channel->vacant_cell();
    if (cell == nullptr) break;
    CellHeader header{};
    header.sequence = connection.sent_messages + 1;
    TransferPtr done;
    if (connection.abandoning) {
      header.group = connection.abandoned_group;
      header.flags = kAbandoned;
      connection.abandoning = false;
      --abandoning_count_;
      ++connection.sent_messages;
    } else {
      const TransferPtr& transfer = connection.outgoing.front();
      size_t bytes = std::min<uint64_t>(connection.channel->capacity(),
                                        transfer->bytes - transfer->sent_bytes);
      header.group = transfer->group->id;
      header.count = transfer->count;
      header.bytes = transfer->bytes;
      header.cell_bytes = static_cast<uint32_t>(bytes);
      header.tag = transfer->tag;
      header.source = transfer->group->rank;
      header.dtype = static_cast<uint8_t>(transfer->dtype);
      header.flags = connection.begun ? 0 : kFirstCell;
      if (bytes > 0)
        std::memcpy(cell + sizeof header, transfer->source + transfer->sent_bytes, bytes);
      transfer->sent_bytes += bytes;
      connection.begun = transfer->sent_bytes < transfer->bytes;
      if (!connection.begun) {
        done = transfer;
        connection.outgoing.pop_front();
        ++connection.sent_messages;
      }
    }
    std::memcpy(cell, &header, sizeof header);
    if (connection.channel->publish()) ring(*connection.peer);
    if (Status sent = connection.channel->failure(); !sent.ok())
      return break_connection(connection, sent);
    if (done != nullptr) settle(done, {}, outcome);
  }
  return filled > 0;
}

Status PointToPoint::check_match(const Transfer& transfer, const Message& message) const {
  const PointToPointGroup& group = *transfer.group;
  DSCOMM_RETURN_IF_ERROR(check_source(group, message.from, message.source));
  if (transfer.dtype == message.dtype && transfer.count == message.count &&
      transfer.bytes == message.bytes)
    return {};
  return Status(Code::kMismatch,
                "send and receive differ in group '" + group.name +
                    "': " + group.name_member(message.source) + " made a send of " +
                    describe_data(message.dtype, message.count, message.tag) + " to " +
                    group.name_member(group.rank) + ", which made a receive of " +
                    describe_data(transfer.dtype, transfer.count, transfer.tag) +
                    "; both sides must name the same dtype and number of elements");
}

void PointToPoint::refund(Message* message) {
  unexpected_used_ -= std::exchange(message->charge, 0);
  message->heap.reset();
}

// By value: the caller's pointer may be the one in a queue that this erases.
void PointToPoint::settle(TransferPtr transfer, const Status& status, Outcome* outcome) {
  transfer->settled = true;
  groups_.at(transfer->group->id)->pending.erase(transfer);
  --pending_count_;
  bool waited_for = transfer->waiting_threads > 0;
  outcome->push_back({std::move(transfer), status});
  if (!waited_for) return;
  // The thread that waits for it may be another one than this, and asleep: a peer would have rung,
  // but not who forgets or fails a group.
  changed_.notify_all();
  if (asleep_) doorbell_->ring(doorbell_->token());
}

// Ends a group for all its members, with the first cause that is known.
void PointToPoint::fail_group(GroupState& state, const Status& cause, Outcome* outcome) {
  if (!state.failure.ok()) return;
  Status first = state.group->failure();
  if (first.ok()) first = cause;
  state.group->abort(first);
  state.failure = first;
  end_group(state, first, outcome);
  // Members that sleep on their doorbell need not wait for the end of a slice.
  for (const std::shared_ptr<Endpoint>& peer : state.group->peers)
    if (peer->sleeps()) ring(*peer);
}

// Nothing of the group is pending or kept afterwards, and nothing is written to its users' memory.
void PointToPoint::end_group(GroupState& state, const Status& status, Outcome* outcome) {
  while (!state.pending.empty()) settle(*state.pending.begin(), status, outcome);
  for (auto& [tag, bucket] : state.buckets)
    for (const MessagePtr& message : bucket.unexpected) {
      refund(message.get());
      message->discarded = true;
    }
  state.buckets.clear();
  if (state.group == nullptr) return;
  const uint64_t group_id = state.group->id;
  for (auto& [id, connection] : connections_) {
    if (connection->begun && connection->outgoing.front()->group->id == group_id) {
      connection->begun = false;
      connection->abandoning = connection->broken.ok();
      if (connection->abandoning) ++abandoning_count_;
      connection->abandoned_group = group_id;
    }
    std::erase_if(connection->outgoing,
                  [&](const TransferPtr& transfer) { return transfer->group->id == group_id; });
    if (connection->incoming != nullptr && connection->incoming->group == group_id) {
      connection->incoming->receive = nullptr;
      connection->incoming->discarded = true;
    }
  }
}

// Asks, not more often than it pays, whether waiting still makes sense.
void PointToPoint::look_when_due(Outcome* outcome) {
  int64_t now = monotonic_ns();
  if (now < last_look_ns_ + kLookNs && now < next_deadline_ns_) return;
  last_look_ns_ = now;
  bool thoroughly = now >= last_thorough_look_ns_ + kThoroughLookNs;
  if (thoroughly) last_thorough_look_ns_ = now;
  next_deadline_ns_ = INT64_MAX;
  for (auto& [id, state] : groups_) {
    if (state->group == nullptr || !state->failure.ok()) continue;
    // A group without anything pending may still hold up a channel with a message that nobody
    // wants.
    if (state->pending.empty() && state->buckets.empty()) continue;
    Status status = look_at(*state, now, thoroughly, outcome);
    if (!status.ok()) fail_group(*state, status, outcome);
  }
}

Status PointToPoint::look_at(GroupState& state, int64_t now, bool thoroughly, Outcome* outcome) {
  DSCOMM_RETURN_IF_ERROR(state.group->failure());
  if (state.pending.empty()) return {};
  DSCOMM_RETURN_IF_ERROR(look_for_gone(state, thoroughly, outcome));
  if (!state.suspicion.ok() && now - state.suspected_ns >= kCauseGraceNs) return state.suspicion;
  for (const TransferPtr& transfer : state.pending) {
    if (transfer->end_ns <= now) return Status(Code::kTimeout, timeout_text(*transfer));
    next_deadline_ns_ = std::min(next_deadline_ns_, transfer->end_ns);
  }
  return {};
}

// Whether something is pending that a member will never do any more.
Status PointToPoint::look_for_gone(GroupState& state, bool thoroughly, Outcome* outcome) {
  const PointToPointGroup& group = *state.group;
  int size = static_cast<int>(group.peers.size());
  std::vector<bool> died(static_cast<size_t>(size)), left(static_cast<size_t>(size));
  bool some = false;
  for (int member = 0; member < size; ++member) {
    size_t k = static_cast<size_t>(member);
    if (member == group.rank) continue;
    left[k] = group.has_left(member);
    died[k] = !left[k] && !group.peers[k]->alive(thoroughly);
    some |= left[k] || died[k];
  }
  if (!some) return {};
  // What it published before it went counts: those were acquire loads. And it may have said why.
  progress(outcome);
  if (!state.failure.ok()) return {};
  DSCOMM_RETURN_IF_ERROR(group.failure());

  auto all_read = [&](int member) { return !connection_to(group, member).unread; };
  for (const TransferPtr& transfer : state.pending) {
    std::string what = std::string(transfer->sending ? "send of " : "receive of ") +
                       describe_data(transfer->dtype, transfer->count, transfer->tag) +
                       " in group '" + group.name + "': ";
    auto dead = [&](int member) {
      return Status(
          Code::kPeerDied,
          what + group.name_member(member) +
              " died or exited without leaving the group; look for its own error, a signal or "
              "the out-of-memory killer in its output and the system log");
    };
    if (!state.suspicion.ok())  // for which any death is a reason
      for (int member = 0; member < size; ++member)
        if (died[static_cast<size_t>(member)]) return dead(member);
    if (transfer->peer >= 0) {
      size_t k = static_cast<size_t>(transfer->peer);
      if (died[k]) return dead(transfer->peer);
      if (left[k] && (transfer->sending || all_read(transfer->peer)))
        return Status(Code::kPeerLeft,
                      what + group.name_member(transfer->peer) +
                          (transfer->sending ? " left the group without receiving it"
                                             : " left the group without sending it"));
      continue;
    }
    bool all_left = true;
    for (int member = 0; member < size; ++member) {
      if (member == group.rank) continue;
      size_t k = static_cast<size_t>(member);
      if (died[k]) return dead(member);
      all_left &= left[k] && all_read(member);
    }
    if (all_left)
      return Status(Code::kPeerLeft, what + "every other rank left the group without sending it");
  }
  return {};
}

std::string PointToPoint::timeout_text(const Transfer& transfer) const {
  const PointToPointGroup& group = *transfer.group;
  std::string text = std::string(transfer.sending ? "send of " : "receive of ") +
                     describe_data(transfer.dtype, transfer.count, transfer.tag) + " in group '" +
                     group.name + "' timed out after " + std::to_string(transfer.timeout_ms) +
                     " ms waiting for ";
  std::string held_up;
  for (int member = 0; member < static_cast<int>(group.peers.size()); ++member) {
    if (member == group.rank || (transfer.peer >= 0 && transfer.peer != member)) continue;
    if (text.back() != ' ') text += "; ";
    text +=
        group.name_member(member) + ", " + group.peers[static_cast<size_t>(member)]->state_text();
    if (connection_to(group, member).unread && !transfer.sending)
      held_up =
          "; messages that nobody has received fill DSCOMM_UNEXPECTED_BYTES and hold up what comes "
          "after them: receive them, or raise it";
  }
  text += held_up;
  return text + "; if that is only slow, raise the timeout";
}

// A channel to a dead process lasts as long as a group names it.
void PointToPoint::drop_dead_channels() {
  std::erase_if(connections_, [this](auto& entry) {
    Connection& connection = *entry.second;
    if (connection.peer->alive()) return false;
    for (const auto& [id, state] : groups_) {
      if (state->group == nullptr) continue;
      for (const std::shared_ptr<Endpoint>& peer : state->group->peers)
        if (peer->id() == entry.first) return false;
    }
    // No group names it, so what was on its way in belongs to a group that this rank never used.
    if (MessagePtr message = std::move(connection.incoming)) {
      Outcome none;
      end_abandoned(message, &none);
    }
    if (connection.abandoning) --abandoning_count_;
    if (connection.peer->doorbell() == nullptr) --polled_count_;
    connection.channel->drop();
    return true;
  });
}

void PointToPoint::help(Transfer& transfer, std::chrono::milliseconds limit) {
  const int64_t end_ns = limit.count() > 0 ? monotonic_ns() + limit.count() * 1'000'000 : INT64_MAX;
  const WaitPolicy& policy = transfer.group->wait;
  int pauses = 0;
  int64_t yield_end_ns = 0;  // 0: not yielding yet
  std::unique_lock lock(mutex_);
  ++helpers_;
  ++helper_visits_;
  ++transfer.waiting_threads;
  while (!transfer.settled) {
    Outcome outcome;
    bool moved = progress(&outcome);
    if (moved) look_when_due(&outcome);
    bool settled = transfer.settled;
    deliver_as_helper(lock, std::move(outcome));
    lock.unlock();
    if (moved || settled) {
      pauses = 0;
      yield_end_ns = 0;
      if (!settled && end_ns != INT64_MAX && monotonic_ns() >= end_ns) break;
    } else if (pauses < policy.spin_pauses) {
      ++pauses;
      pause_core();
    } else {
      int64_t now = monotonic_ns();
      if (now >= end_ns) break;
      if (yield_end_ns == 0) yield_end_ns = now + policy.yield_ns;
      if (now < yield_end_ns) {
        sched_yield();
      } else {
        lock.lock();
        if (!transfer.settled) {
          Outcome after = sleep_once(lock, end_ns);
          deliver_as_helper(lock, std::move(after));
        }
        continue;
      }
    }
    lock.lock();
  }
  if (!lock.owns_lock()) lock.lock();
  --transfer.waiting_threads;
  --helpers_;
  if (helpers_ == 0 && has_work()) unpark_worker();
}

// With the mutex free. What calls back may take its time: meanwhile this thread helps nobody.
void PointToPoint::deliver_as_helper(std::unique_lock<std::mutex>& lock, Outcome outcome) {
  if (outcome.empty()) return;
  --helpers_;
  if (helpers_ == 0 && has_work()) unpark_worker();
  lock.unlock();
  deliver(std::move(outcome));
  lock.lock();
  ++helpers_;
  ++helper_visits_;
}

PointToPoint::Outcome PointToPoint::sleep_once(std::unique_lock<std::mutex>& lock, int64_t end_ns) {
  Outcome outcome;
  auto timeout_ns = [&] {
    int64_t now = monotonic_ns();
    int64_t end = std::min(end_ns, next_deadline_ns_);
    if (slice_ns_ > 0) end = std::min(end, now + slice_ns_);
    if (polled_count_ > 0) end = std::min(end, now + kPolledSliceNs);
    return end == INT64_MAX ? int64_t{-1} : std::max<int64_t>(end - now, 0);
  };
  if (polling_) {
    // Ends: the other thread notifies after its progress, and settle() for what this one waits for.
    int64_t most_ns = timeout_ns();
    if (most_ns < 0)
      changed_.wait(lock);
    else
      changed_.wait_for(lock, std::chrono::nanoseconds(most_ns));
  } else {
    polling_ = true;
    std::atomic<uint32_t>& sleepers = arena_->header().doorbell_sleepers;
    // Dekker: this side adds itself and then looks at the channels, a peer publishes or consumes
    // and then loads the counter. All are seq_cst, so the cell is seen here or the sleeper there.
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    if (!progress(&outcome) && outcome.empty() && !stopping_) {
      int64_t most_ns = timeout_ns();
      asleep_ = true;
      lock.unlock();
      doorbell_->sleep(most_ns);
      lock.lock();
      asleep_ = false;
      doorbell_->clear();
    }
    sleepers.fetch_sub(1, std::memory_order_relaxed);  // a late ring by a peer is harmless
    progress(&outcome);
    polling_ = false;
    changed_.notify_all();
  }
  look_when_due(&outcome);
  return outcome;
}

// The worker: attends to what is pending while no thread waits for anything. A thread that calls
// and waits at once is better served by itself, so the worker takes over only after a tick without
// one.
void PointToPoint::work() {
  std::unique_lock lock(mutex_);
  uint64_t seen_visits = helper_visits_;
  int idle_ticks = 0;
  worker_wake_.wait_for(lock, kWorkerTick, [this] { return stopping_; });
  while (!stopping_) {
    bool attended = helpers_ > 0 || polling_ || helper_visits_ != seen_visits;
    seen_visits = helper_visits_;
    if (has_work() && !attended) {
      idle_ticks = 0;
      Outcome outcome = sleep_once(lock, INT64_MAX);
      lock.unlock();
      deliver(std::move(outcome));
      lock.lock();
      continue;
    }
    if (++idle_ticks < kTicksBeforeParking || (has_work() && helpers_ == 0)) {
      worker_wake_.wait_for(lock, kWorkerTick, [this] { return stopping_; });
      continue;
    }
    // Ends: the next operation that is left pending, or the last helper that leaves some behind.
    worker_parked_ = true;
    worker_wake_.wait(lock, [this] { return stopping_ || !worker_parked_; });
    idle_ticks = 0;
  }
}

}  // namespace dscomm
