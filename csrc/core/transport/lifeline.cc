#include "core/transport/lifeline.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <limits>
#include <utility>

#include "core/base/log.h"
#include "core/base/thread.h"
#include "core/transport/rendezvous.h"

namespace dscomm {
namespace {

// For the goodbye to get through where the other end is busy, or stopped.
constexpr std::chrono::milliseconds kLeaveLimit{1000};
// Of a sleep meanwhile, so that time in which the process is stopped shows.
constexpr int kLeaveSliceMs = 100;
// A rank that waits is to give up at its timeout, before the kernel gives up the connection.
constexpr std::chrono::minutes kBeyondTimeout{1};

// What a connection that ended without a goodbye says of the process at its other end.
Status describe_loss(const std::string& name, int error) {
  switch (error) {
    case 0:
    case EPIPE:
    case ECONNRESET:
      return Status(Code::kPeerDied,
                    name +
                        " died or exited without leaving; look for its own error, a signal or "
                        "the out-of-memory killer in its output and the system log");
    case EPROTO:
      return Status(Code::kPeerDied, name +
                                         " sent what is no message of dscomm, so that its "
                                         "connection was closed; this is a defect of dscomm");
    default:
      return Status(Code::kPeerDied,
                    name + " cannot be reached any more (" + std::strerror(error) +
                        "); see whether its host is down or the network between the hosts is cut");
  }
}

Status describe_leave(const std::string& name, const Departure& departure) {
  const std::string how = departure.exception ? departure.how() : "has left: it ended in order";
  return Status(Code::kPeerLeft, name + " " + how + "; " + departure.advice());
}

}  // namespace

Lifeline::Lifeline(const TransportRequest& request)
    : rank_(request.rank),
      members_(request.members),
      made_in_pid_(getpid()),
      gone_(request.members.size()),
      departures_(request.members.size()) {}

Result<std::unique_ptr<Lifeline>> Lifeline::connect(const TransportRequest& request, Store& store,
                                                    const Deadline& deadline) {
  std::unique_ptr<Lifeline> lifeline(new Lifeline(request));
  // The thread first: once the others count on this process, nothing is left that can fail.
  Status begun = lifeline->begin();
  if (!begun.ok()) {
    begun =
        Status(begun.code(), name_member(request.members, request.rank) + ": " + begun.message());
    decline_to_meet(request, store, begun);
    return begun;
  }
  Result<std::vector<Connection>> connections = meet(request, store, deadline);
  if (!connections.ok()) return connections.status();
  lifeline->start(std::move(connections).value());
  return lifeline;
}

Status Lifeline::begin() {
  wake_ = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_.valid())
    return make_status(Code::kResource, "eventfd failed: %s", std::strerror(errno));
  Result<std::thread> service = start_thread("the news between hosts", [this] { serve(); });
  if (!service.ok()) return service.status();
  service_ = std::move(service).value();
  return {};
}

void Lifeline::start(std::vector<Connection> connections) {
  {
    std::lock_guard lock(mutex_);
    connections_ = std::move(connections);
    started_ = true;
  }
  wake();
}

void Lifeline::wake() {
  uint64_t one = 1;
  // Fails only when it has been written 2^64 times: then the thread is awake.
  [[maybe_unused]] ssize_t written = ::write(wake_.get(), &one, sizeof one);
}

Lifeline::~Lifeline() {
  if (getpid() == made_in_pid_) {
    leave();
  } else if (service_.joinable()) {
    service_.detach();  // a forked child has none of its parent's threads
  }
}

void Lifeline::leave() {
  std::lock_guard one_at_a_time(leave_mutex_);
  if (!service_.joinable()) return;
  {
    std::lock_guard lock(mutex_);
    leaving_ = true;
  }
  wake();
  service_.join();
}

void Lifeline::close_descriptors() {
  wake_.reset();
  for (Connection& connection : connections_) connection.close_descriptors();
}

Status Lifeline::gone(int rank) const {
  std::lock_guard lock(mutex_);
  return gone_[static_cast<size_t>(rank)];
}

Status Lifeline::cut_off(int64_t grace_ns) const {
  std::lock_guard lock(mutex_);
  const Status& gone = gone_[static_cast<size_t>(hub())];
  if (gone.code() != Code::kPeerDied || monotonic_ns() - hub_gone_ns_ < grace_ns) return {};
  return gone;
}

Departure Lifeline::departure(int rank) const {
  std::lock_guard lock(mutex_);
  return departures_[static_cast<size_t>(rank)];
}

void Lifeline::note_end(const std::string& exception) {
  std::lock_guard lock(mutex_);
  if (!own_.exception) own_.exception = exception;
}

Status Lifeline::ended(uint64_t team_id) const {
  std::lock_guard lock(mutex_);
  auto found = ended_.find(team_id);
  return found == ended_.end() ? Status() : found->second;
}

void Lifeline::end(uint64_t team_id, const Status& cause) {
  const Status known = cause.ok() ? Status(Code::kInternal, "it was ended without a cause") : cause;
  if (!note_ended(team_id, known)) return;
  {
    std::lock_guard lock(mutex_);
    if (leaving_) return;
    outgoing_.push_back(encode(Message::about(MessageKind::kEnd, rank_, team_id, known)));
  }
  wake();
}

void Lifeline::outlast(std::chrono::milliseconds timeout) {
  {
    std::lock_guard lock(mutex_);
    // The sum of the longest timeout and a minute would overflow.
    if (timeout >= std::chrono::milliseconds::max() - kBeyondTimeout) timeout -= kBeyondTimeout;
    if (timeout + kBeyondTimeout <= silence_ || leaving_) return;
    silence_ = timeout + kBeyondTimeout;
    silence_is_new_ = true;
  }
  wake();
}

// The first thing that is heard stays. True when this was it.
bool Lifeline::note_gone(int rank, const Status& status, const Departure& departure) {
  std::function<void()> on_death;
  {
    std::lock_guard lock(mutex_);
    Status& known = gone_[static_cast<size_t>(rank)];
    if (!known.ok()) return false;
    known = status;
    departures_[static_cast<size_t>(rank)] = departure;
    if (rank == hub()) hub_gone_ns_ = monotonic_ns();
    note_news();
    if (status.code() == Code::kPeerDied) on_death = std::exchange(on_death_, nullptr);
  }
  if (on_death) on_death();
  return true;
}

void Lifeline::on_death(std::function<void()> body) {
  {
    std::lock_guard lock(mutex_);
    if (std::none_of(gone_.begin(), gone_.end(),
                     [](const Status& status) { return status.code() == Code::kPeerDied; })) {
      on_death_ = std::move(body);
      return;
    }
  }
  body();
}

bool Lifeline::note_ended(uint64_t team_id, const Status& cause) {
  std::lock_guard lock(mutex_);
  // As it travels, so that all have the same text.
  if (!ended_.try_emplace(team_id, cause.code(), bounded_text(cause.message())).second)
    return false;
  note_news();
  return true;
}

void Lifeline::note_news() {
  // One thread at a time: under mutex_. Release pairs with the acquire in count().
  count_.store(count_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

// The thread.
void Lifeline::serve() {
  if (!await_start()) return;
  // What came together with the start.
  for (size_t rank = 0; rank < connections_.size(); ++rank)
    if (connections_[rank].open()) listen_to(static_cast<int>(rank));
  std::vector<pollfd> entries;
  std::vector<int> ranks;
  std::optional<TimeLeft> time_left;  // to leave
  int64_t turn_ns = monotonic_ns();
  int timeout_ms = -1;
  while (true) {
    if (timeout_ms > 0) leave_by_->note_slice(turn_ns, int64_t{timeout_ms} * 1'000'000);
    turn_ns = monotonic_ns();
    take_orders();
    flush_all();
    entries.assign(1, {wake_.get(), POLLIN, 0});
    ranks.clear();
    for (size_t rank = 0; rank < connections_.size(); ++rank) {
      const Connection& connection = connections_[rank];
      if (!connection.open()) continue;
      const bool sends = connection.has_queued();
      entries.push_back(
          {connection.fd(), static_cast<short>(sends ? POLLIN | POLLOUT : POLLIN), 0});
      ranks.push_back(static_cast<int>(rank));
    }
    timeout_ms = -1;  // ends: leave() wakes it, or the process ends it
    if (leave_by_) {
      if (!time_left) time_left.emplace(*leave_by_);
      const int64_t left_ns = time_left->ns();
      if (left_ns <= 0 || ranks.empty()) break;
      timeout_ms = static_cast<int>(std::min<int64_t>(left_ns / 1'000'000 + 1, kLeaveSliceMs));
    }
    if (::poll(entries.data(), entries.size(), timeout_ms) < 0) continue;
    if (entries[0].revents != 0) sleep_again();
    for (size_t i = 0; i < ranks.size(); ++i)
      if (entries[i + 1].revents != 0) listen_to(ranks[i]);
  }
  for (Connection& connection : connections_) connection.hang_up();
}

// False when there will be no start.
bool Lifeline::await_start() {
  while (true) {
    {
      std::lock_guard lock(mutex_);
      // First: who leaves at once has a goodbye to say all the same.
      if (started_) return true;
      if (leaving_) return false;
    }
    // Ends: start() or leave() wakes it; connect() calls one of them soon after its deadline.
    pollfd entry{wake_.get(), POLLIN, 0};
    if (::poll(&entry, 1, -1) > 0) sleep_again();
  }
}

void Lifeline::sleep_again() {
  uint64_t times;
  [[maybe_unused]] ssize_t count = ::read(wake_.get(), &times, sizeof times);
}

// What other threads want.
void Lifeline::take_orders() {
  std::vector<std::string> messages;
  bool leaving, silence_is_new;
  std::chrono::milliseconds silence;
  Departure departure;
  {
    std::lock_guard lock(mutex_);
    messages.swap(outgoing_);
    leaving = leaving_;
    silence_is_new = std::exchange(silence_is_new_, false);
    silence = silence_;
    departure = own_;
  }
  if (silence_is_new) {
    for (Connection& connection : connections_)
      if (connection.open()) connection.outlast(silence);
    // The other end must outlast it too. Member 0 tells nobody: each member of its groups has the
    // same timeout.
    if (rank_ != 0)
      tell_all_but(rank_, encode(Message::about(MessageKind::kOutlast, rank_,
                                                static_cast<uint64_t>(silence.count()))));
  }
  for (const std::string& message : messages) tell_all_but(rank_, message);
  if (!leaving || leave_by_) return;
  tell_all_but(rank_, encode(Message::about_departure(MessageKind::kGoodbye, rank_, departure)));
  leave_by_ = Deadline::after(kLeaveLimit);
}

void Lifeline::flush_all() {
  for (Connection& connection : connections_) {
    if (!connection.open()) continue;
    connection.flush();
    // After the goodbye: the other end reads it, closes, and by that ends this one.
    if (leave_by_ && !connection.has_queued()) connection.finish();
  }
}

// To those that are connected: all others on member 0, and member 0 on all others.
void Lifeline::tell_all_but(int rank, const std::string& message) {
  if (leave_by_) return;  // the goodbye was the last
  for (size_t other = 0; other < connections_.size(); ++other)
    if (connections_[other].open() && static_cast<int>(other) != rank)
      connections_[other].queue(message);
}

void Lifeline::listen_to(int rank) {
  Connection& connection = connections_[static_cast<size_t>(rank)];
  connection.receive();
  Message message;
  while (connection.open() && connection.next(&message))
    if (!take(rank, message)) lose(rank, EPROTO);
  if (connection.open() && connection.ended()) lose(rank, connection.error());
}

// False when it cannot be meant.
bool Lifeline::take(int from, const Message& message) {
  switch (message.kind) {
    case MessageKind::kEnd:
      if (message.code == Code::kOk) return false;
      if (note_ended(message.id, message.status()) && rank_ == 0)
        tell_all_but(from, encode(message));
      return true;
    case MessageKind::kGone:
      if (rank_ == 0 || message.rank < 0 || message.rank >= static_cast<int>(members_.size()) ||
          message.code == Code::kOk)
        return false;
      if (message.code == Code::kPeerLeft)
        note_gone(message.rank,
                  describe_leave(name_member(members_, message.rank), message.departure()),
                  message.departure());
      else
        note_gone(message.rank, message.status(), {});
      return true;
    case MessageKind::kOutlast:
      if (rank_ != 0) return false;
      connections_[static_cast<size_t>(from)].outlast(std::chrono::milliseconds(
          std::min<uint64_t>(message.id, std::numeric_limits<int64_t>::max())));
      return true;
    case MessageKind::kGoodbye:
      let_go(from, describe_leave(name_member(members_, from), message.departure()),
             message.departure());
      return true;
    default:
      return false;
  }
}

// A connection has ended without a goodbye.
void Lifeline::lose(int rank, int error) {
  if (!leave_by_) return let_go(rank, describe_loss(name_member(members_, rank), error));
  connections_[static_cast<size_t>(rank)].hang_up();  // it answers the own goodbye: no news
}

void Lifeline::let_go(int rank, const Status& status, const Departure& departure) {
  connections_[static_cast<size_t>(rank)].hang_up();
  if (!note_gone(rank, status, departure)) return;
  if (rank_ == 0)
    tell_all_but(rank, encode(status.code() == Code::kPeerLeft
                                  ? Message::about_departure(MessageKind::kGone, rank, departure)
                                  : Message::about(MessageKind::kGone, rank, 0, status)));
  else
    log_line(LogLevel::kInfo,
             "%s; it passed on the news of the others, which are noticed at deadlines from now on",
             status.message().c_str());
}

}  // namespace dscomm
