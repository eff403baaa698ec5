#include "socket_team.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "core/reduce/reduce.h"
#include "core/team/mismatch.h"

namespace dscomm {
namespace {

// How long a wait sleeps before it looks at the deadline and the failure detector again.
constexpr int kSliceMs = 10;
// The failure detector reports a death within milliseconds, unless the machine is overloaded.
constexpr std::chrono::seconds kReasonLimit{2};

std::span<const std::byte> block_of(const void* data, size_t count, DType dtype) {
  return {static_cast<const std::byte*>(data), count * dtype_bytes(dtype)};
}

std::vector<std::span<const std::byte>> blocks_of(std::span<const void* const> ins,
                                                  std::span<const size_t> counts, DType dtype) {
  std::vector<std::span<const std::byte>> blocks;
  for (size_t k = 0; k < ins.size(); ++k) blocks.push_back(block_of(ins[k], counts[k], dtype));
  return blocks;
}

std::vector<size_t> lengths_of(std::span<const size_t> counts, DType dtype) {
  std::vector<size_t> lengths;
  for (size_t count : counts) lengths.push_back(count * dtype_bytes(dtype));
  return lengths;
}

void deliver(const std::vector<std::byte>& block, void* out) {
  if (!block.empty()) std::memcpy(out, block.data(), block.size());
}

struct Header {
  CallRecord call;
  uint64_t hash = 0;
  uint64_t bytes = 0;  // of the data that follows
};

}  // namespace

// To and from one rank.
struct SocketTeam::Message {
  int rank = 0;
  Header out, in;
  Block data;                     // follows `out`
  Bytes got;                      // follows `in`
  size_t sent = 0, received = 0;  // including the headers

  bool is_sent() const { return sent == sizeof out + data.size(); }
  bool is_received() const { return received == sizeof in + got.size(); }
};

SocketTeam::SocketTeam(FailureDetector& detector, uint64_t id, std::string group, int rank,
                       std::vector<SocketTeamMember> members)
    : detector_(detector),
      id_(id),
      group_(std::move(group)),
      rank_(static_cast<size_t>(rank)),
      members_(std::move(members)) {}

Status SocketTeam::begin_call(Call& call) {
  call_ = as_sub_call(call.record, *call.options);
  call_.sequence = ++sequence_;
  ends_ = parents_ends_ = {};
  return failure_in(call_.number()).ok() ? Status() : failure();
}

Status SocketTeam::run_all_reduce(const std::byte* in, std::byte* out, size_t count,
                                  const Reduction& reduction, const CallOptions& options) {
  const Block own = block_of(in, count, reduction.dtype);
  DSCOMM_ASSIGN_OR_RETURN(const std::vector<Bytes> blocks,
                          exchange(std::vector<Block>(members_.size(), own),
                                   std::vector<size_t>(members_.size(), own.size()), options));
  reduce_all(blocks, out, count, reduction);
  return {};
}

Status SocketTeam::run_broadcast(std::byte* buffer, size_t count, DType dtype, int root,
                                 const CallOptions& options) {
  const Block own = block_of(buffer, count, dtype);
  std::vector<size_t> expected(members_.size());
  expected[static_cast<size_t>(root)] = own.size();
  DSCOMM_ASSIGN_OR_RETURN(
      const std::vector<Bytes> blocks,
      exchange(std::vector<Block>(members_.size(), rank() == root ? own : Block()), expected,
               options));
  if (rank() != root) deliver(blocks[static_cast<size_t>(root)], buffer);
  return {};
}

Status SocketTeam::run_reduce(const std::byte* in, std::byte* out, size_t count,
                              const Reduction& reduction, int root, const CallOptions& options) {
  const Block own = block_of(in, count, reduction.dtype);
  std::vector<Block> sent(members_.size());
  sent[static_cast<size_t>(root)] = own;
  DSCOMM_ASSIGN_OR_RETURN(
      const std::vector<Bytes> blocks,
      exchange(sent, std::vector<size_t>(members_.size(), rank() == root ? own.size() : 0),
               options));
  if (rank() == root) reduce_all(blocks, out, count, reduction);
  return {};
}

Status SocketTeam::run_all_gather(const std::byte* in, size_t count, DType dtype, Outputs outs,
                                  Counts out_counts, const CallOptions& options) {
  DSCOMM_ASSIGN_OR_RETURN(const std::vector<Bytes> blocks,
                          exchange(std::vector<Block>(members_.size(), block_of(in, count, dtype)),
                                   lengths_of(out_counts, dtype), options));
  for (size_t k = 0; k < outs.size(); ++k) deliver(blocks[k], outs[k]);
  return {};
}

Status SocketTeam::run_reduce_scatter(Inputs ins, Counts counts, std::byte* out,
                                      const Reduction& reduction, const CallOptions& options) {
  const size_t own_bytes = counts[rank_] * dtype_bytes(reduction.dtype);
  DSCOMM_ASSIGN_OR_RETURN(const std::vector<Bytes> blocks,
                          exchange(blocks_of(ins, counts, reduction.dtype),
                                   std::vector<size_t>(members_.size(), own_bytes), options));
  reduce_all(blocks, out, counts[rank_], reduction);
  return {};
}

Status SocketTeam::run_gather(const std::byte* in, size_t count, DType dtype, Outputs outs,
                              Counts out_counts, int root, const CallOptions& options) {
  std::vector<Block> sent(members_.size());
  sent[static_cast<size_t>(root)] = block_of(in, count, dtype);
  std::vector<size_t> expected = lengths_of(out_counts, dtype);
  expected.resize(members_.size());
  DSCOMM_ASSIGN_OR_RETURN(const std::vector<Bytes> blocks, exchange(sent, expected, options));
  for (size_t k = 0; k < outs.size(); ++k) deliver(blocks[k], outs[k]);
  return {};
}

Status SocketTeam::run_scatter(Inputs ins, Counts in_counts, std::byte* out, size_t count,
                               DType dtype, int root, const CallOptions& options) {
  std::vector<Block> sent = blocks_of(ins, in_counts, dtype);
  sent.resize(members_.size());
  std::vector<size_t> expected(members_.size());
  expected[static_cast<size_t>(root)] = count * dtype_bytes(dtype);
  DSCOMM_ASSIGN_OR_RETURN(const std::vector<Bytes> blocks, exchange(sent, expected, options));
  deliver(blocks[static_cast<size_t>(root)], out);
  return {};
}

Status SocketTeam::run_all_to_all(Inputs ins, Counts in_counts, Outputs outs, Counts out_counts,
                                  DType dtype, const CallOptions& options) {
  DSCOMM_ASSIGN_OR_RETURN(
      const std::vector<Bytes> blocks,
      exchange(blocks_of(ins, in_counts, dtype), lengths_of(out_counts, dtype), options));
  for (size_t k = 0; k < outs.size(); ++k) deliver(blocks[k], outs[k]);
  return {};
}

Status SocketTeam::run_barrier(const CallOptions& options) {
  return exchange(std::vector<Block>(members_.size()), std::vector<size_t>(members_.size()),
                  options)
      .status();
}

void SocketTeam::reduce_all(const std::vector<Bytes>& blocks, void* out, size_t count,
                            const Reduction& reduction) const {
  std::vector<const void*> sources;  // in the order of the ranks: the same bits on every rank
  for (const Bytes& block : blocks) sources.push_back(block.data());
  if (count > 0) dscomm::reduce(out, sources.data(), size(), count, reduction, size());
}

Result<std::vector<SocketTeam::Bytes>> SocketTeam::exchange(const std::vector<Block>& sent,
                                                            const std::vector<size_t>& expected,
                                                            const CallOptions& options) {
  std::vector<Message> messages(members_.size());
  for (size_t k = 0; k < members_.size(); ++k) {
    Message& message = messages[k];
    message.rank = static_cast<int>(k);
    message.got.resize(expected[k]);
    message.data = sent[k];
    message.out = {call_, hash_call(id_, call_), sent[k].size()};
  }
  std::vector<pollfd> polled(members_.size());
  while (true) {
    bool is_done = true;
    std::string awaited;
    for (size_t k = 0; k < members_.size(); ++k) {
      const Message& message = messages[k];
      polled[k].fd = -1;  // poll() ignores it
      if (k == rank_ || (message.is_sent() && message.is_received())) continue;
      is_done = false;
      awaited += (awaited.empty() ? "" : "; ") + members_[k].name;
      polled[k].fd = members_[k].socket.get();
      polled[k].events = static_cast<short>((message.is_sent() ? 0 : POLLOUT) |
                                            (message.is_received() ? 0 : POLLIN));
    }
    if (is_done) break;
    if (options.deadline.expired())
      return fail(Code::kTimeout,
                  "timed out after " + options.deadline.timeout_text() + " waiting for " + awaited);
    const int64_t began_ns = monotonic_ns();
    poll(polled.data(), polled.size(), kSliceMs);
    options.deadline.note_slice(began_ns, kSliceMs * kMs);
    for (size_t k = 0; k < members_.size(); ++k)
      if (polled[k].fd >= 0 && polled[k].revents != 0)
        DSCOMM_RETURN_IF_ERROR(advance(messages[k], options));
    DSCOMM_RETURN_IF_ERROR(check_for_end(options));
  }
  std::vector<Bytes> blocks;
  for (Message& message : messages) blocks.push_back(std::move(message.got));
  blocks[rank_].assign(sent[rank_].begin(), sent[rank_].end());
  finished_calls_.store(sequence_);
  return blocks;
}

// Sends and receives as much as is possible without blocking.
Status SocketTeam::advance(Message& message, const CallOptions& options) {
  const SocketTeamMember& member = members_[static_cast<size_t>(message.rank)];
  while (!message.is_sent()) {
    Block rest = message.sent < sizeof(Header)
                     ? std::as_bytes(std::span(&message.out, 1)).subspan(message.sent)
                     : message.data.subspan(message.sent - sizeof(Header));
    const ssize_t bytes =
        send(member.socket.get(), rest.data(), rest.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (bytes < 0 && (errno == EAGAIN || errno == EINTR)) break;
    if (bytes < 0) return lost(member, options);
    message.sent += static_cast<size_t>(bytes);
  }
  while (!message.is_received()) {
    std::span<std::byte> rest =
        message.received < sizeof(Header)
            ? std::as_writable_bytes(std::span(&message.in, 1)).subspan(message.received)
            : std::span(message.got).subspan(message.received - sizeof(Header));
    const ssize_t bytes = recv(member.socket.get(), rest.data(), rest.size(), MSG_DONTWAIT);
    if (bytes < 0 && (errno == EAGAIN || errno == EINTR)) break;
    if (bytes <= 0) return lost(member, options);
    message.received += static_cast<size_t>(bytes);
    if (message.received == sizeof(Header) &&
        (message.in.hash != message.out.hash || message.in.bytes != message.got.size()))
      return fail(Code::kMismatch, describe_mismatch({rank(), call_, members_[rank_].name},
                                                     {message.rank, message.in.call, member.name}));
  }
  return {};
}

Status SocketTeam::check_for_end(const CallOptions& options) {
  const auto ask = [this](Team& team, AbortMonitor& monitor) {
    return monitor.check(call_.number(), [&team](uint64_t call) { return team.failure_in(call); });
  };
  Status found = ask(*this, ends_);
  if (found.ok() && options.parent != nullptr) found = ask(*options.parent, parents_ends_);
  if (found.ok()) found = death();
  if (!found.ok()) abort(found);
  return cause_.get();
}

Status SocketTeam::lost(const SocketTeamMember& member, const CallOptions& options) {
  for (Deadline limit = Deadline::after(kReasonLimit); !limit.expired();
       limit.nap(kSliceMs * kMs)) {
    // Read before check_for_end(), which reports a death: what is left then is a departure.
    const bool is_gone = !detector_.gone(member.transport_rank).ok();
    DSCOMM_RETURN_IF_ERROR(check_for_end(options));
    if (is_gone) break;
  }
  const Departure departure = detector_.departure(member.transport_rank);
  return fail(Code::kPeerLeft, member.name + " " + departure.how() + " before it made this call; " +
                                   departure.advice());
}

Status SocketTeam::fail(Code code, const std::string& cause) {
  // Another rank may have found the cause first, and this failure may only follow from it.
  Status first = detector_.ended(id_);
  if (first.ok())
    first = Status(code, cause + " (first seen by " + members_[rank_].name + " in " +
                             describe_call(call_) + " #" + std::to_string(call_.number()) +
                             " of group '" + group_ + "')");
  abort(first);
  return cause_.get();
}

void SocketTeam::abort(const Status& cause) {
  const Team& counts = counts_calls_ != nullptr ? *counts_calls_ : *this;
  detector_.end(id_, cause_.keep(cause), counts.finished_calls() + 1);
}

Status SocketTeam::failure() {
  const Status ended = failure_in(kAnyCall);
  return ended.ok() ? ended : cause_.keep(ended);
}

Status SocketTeam::failure_in(uint64_t call) {
  DSCOMM_RETURN_IF_ERROR(cause_.get());
  return detector_.count() == 0 ? Status() : detector_.ended(id_, call);
}

Status SocketTeam::death() {
  if (detector_.count() == 0) return {};
  for (const SocketTeamMember& member : members_) {
    Status gone = detector_.gone(member.transport_rank);
    if (gone.code() == Code::kPeerDied) return gone;
  }
  return {};
}

}  // namespace dscomm
