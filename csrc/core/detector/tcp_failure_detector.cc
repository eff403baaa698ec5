#include "core/detector/tcp_failure_detector.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <utility>

#include "core/base/log.h"
#include "core/base/thread.h"
#include "core/detector/links.h"
#include "core/transport/members.h"

namespace dscomm {
namespace {

// How long the goodbye may wait while no other end reads, and in all.
constexpr std::chrono::milliseconds kLeaveLimit{1000};
constexpr int64_t kLongestLeaveNs = 30'000'000'000;
// The longest sleep during the goodbye, so that a stop of the process is noticed.
constexpr int kLeaveSliceMs = 100;
// Added to the longest timeout, so that ranks give up before the kernel gives up a connection.
constexpr std::chrono::minutes kBeyondTimeout{1};

std::vector<int> all_links(const TransportRequest& request) {
  Links links = make_links(request.members)[static_cast<size_t>(request.rank)];
  links.up.insert(links.up.end(), links.down.begin(), links.down.end());
  return std::move(links.up);
}

}  // namespace

TcpFailureDetector::TcpFailureDetector(const TransportRequest& request)
    : rank_(request.rank),
      made_in_pid_(getpid()),
      members_(request.members),
      flooding_(rank_, members_, all_links(request)) {}

Result<std::unique_ptr<TcpFailureDetector>> TcpFailureDetector::connect(
    const TransportRequest& request, Store& store, const Deadline& deadline) {
  std::unique_ptr<TcpFailureDetector> detector(new TcpFailureDetector(request));
  // Start the thread first: once the others count on this process, nothing may fail any more.
  Status begun = detector->begin();
  if (!begun.ok()) {
    begun =
        Status(begun.code(), name_member(request.members, request.rank) + ": " + begun.message());
    decline_transport(request, store, begun);
    return begun;
  }
  DSCOMM_ASSIGN_OR_RETURN(std::vector<Link> links, connect_members(request, store, deadline));
  detector->start(std::move(links));
  remove_invitation(request, store, deadline);
  return detector;
}

Status TcpFailureDetector::begin() {
  wake_ = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_.valid()) return system_error("eventfd");
  DSCOMM_ASSIGN_OR_RETURN(service_, start_thread("the failure detector", [this] { serve(); }));
  return {};
}

void TcpFailureDetector::start(std::vector<Link> links) {
  {
    std::scoped_lock lock(links_mutex_, mutex_);
    links_ = std::move(links);
    started_ = true;
  }
  wake();
}

void TcpFailureDetector::wake() {
  ::eventfd_write(wake_.get(), 1);  // fails only after 2^64 writes: then the thread is awake
}

TcpFailureDetector::~TcpFailureDetector() {
  if (getpid() == made_in_pid_) {
    leave();
  } else if (service_.joinable()) {
    service_.detach();  // a forked child has none of its parent's threads
  }
}

void TcpFailureDetector::leave() {
  std::lock_guard one_at_a_time(leave_mutex_);
  if (!service_.joinable()) return;
  {
    std::lock_guard lock(mutex_);
    leaving_ = true;
  }
  wake();
  service_.join();
}

void TcpFailureDetector::close_descriptors() {
  wake_.reset();
  for (Link& link : links_) link.connection.close_descriptors();
}

Status TcpFailureDetector::gone(int rank) const {
  std::lock_guard lock(mutex_);
  return flooding_.gone(rank);
}

Departure TcpFailureDetector::departure(int rank) const {
  std::lock_guard lock(mutex_);
  return flooding_.departure(rank);
}

Status TcpFailureDetector::death_if_cut_off(const std::vector<int>& ranks, int64_t grace_ns) const {
  std::lock_guard lock(mutex_);
  if (!flooding_.is_cut_off() || monotonic_ns() - cut_off_ns_ < grace_ns) return {};
  for (int rank : ranks)
    if (flooding_.gone(rank).code() == Code::kPeerDied) return flooding_.gone(rank);
  return {};
}

void TcpFailureDetector::note_end(const std::string& exception) {
  std::lock_guard lock(mutex_);
  if (!own_.exception) own_.exception = exception;
}

Status TcpFailureDetector::ended(uint64_t team_id, uint64_t call) const {
  std::lock_guard lock(mutex_);
  return flooding_.ended(team_id, call);
}

void TcpFailureDetector::end(uint64_t team_id, const Status& cause, uint64_t unfinished_call) {
  {
    std::lock_guard lock(mutex_);
    const Status known =
        cause.ok() ? Status(Code::kInternal, "it was ended without a cause") : cause;
    if (!flooding_.end(team_id, known, unfinished_call)) return;
    publish();
  }
  send_now();
}

void TcpFailureDetector::note_position(uint64_t team_id, uint64_t position) {
  std::lock_guard lock(mutex_);
  flooding_.note_position(team_id, position);
}

void TcpFailureDetector::forget(uint64_t team_id) {
  std::lock_guard lock(mutex_);
  flooding_.forget(team_id);
}

uint64_t TcpFailureDetector::ask(uint64_t team_id, uint64_t position) {
  uint64_t question;
  {
    std::lock_guard lock(mutex_);
    question = flooding_.ask(team_id, position);
  }
  send_now();
  return question;
}

std::vector<Answer> TcpFailureDetector::answers(uint64_t question) const {
  std::lock_guard lock(mutex_);
  return flooding_.answers(question);
}

void TcpFailureDetector::close_question(uint64_t question) {
  std::lock_guard lock(mutex_);
  flooding_.close_question(question);
}

void TcpFailureDetector::note_call(uint64_t team_id, const CallRecord& call,
                                   const CallerName& caller) {
  {
    std::lock_guard lock(mutex_);
    if (!flooding_.note_call(team_id, call, caller)) return;
    publish();
  }
  send_now();
}

void TcpFailureDetector::compare_calls(uint64_t team_id, bool always) {
  {
    std::lock_guard lock(mutex_);
    flooding_.compare_calls(team_id, always);
  }
  send_now();
}

void TcpFailureDetector::tolerate_silence(std::chrono::milliseconds timeout) {
  {
    std::lock_guard lock(mutex_);
    // The sum of the longest timeout and a minute would overflow.
    if (timeout >= std::chrono::milliseconds::max() - kBeyondTimeout) timeout -= kBeyondTimeout;
    if (leaving_) return;
  }
  raise_silence(timeout + kBeyondTimeout);
  wake();
}

// Has the thread pass a longer silence on to the linked members, so all members get the longest.
void TcpFailureDetector::raise_silence(std::chrono::milliseconds silence) {
  std::lock_guard lock(mutex_);
  if (silence <= silence_) return;
  silence_ = silence;
  silence_is_new_ = true;
}

void TcpFailureDetector::on_death(std::function<void(const Status&)> body) {
  Status death;
  {
    std::lock_guard lock(mutex_);
    death = flooding_.first_death();
    if (death.ok()) {
      on_death_ = std::move(body);
      return;
    }
  }
  body(death);
}

// Call with mutex_ held, after anything that may have changed what flooding_ knows.
void TcpFailureDetector::publish() {
  if (cut_off_ns_ == 0 && flooding_.is_cut_off()) cut_off_ns_ = monotonic_ns();
  // Under mutex_, so one thread at a time. Release pairs with the acquire in count().
  count_.store(flooding_.count(), std::memory_order_release);
}

// The body of the thread.
void TcpFailureDetector::serve() {
  if (!await_start()) return;
  {
    std::lock_guard lock(links_mutex_);
    for (Link& link : links_) listen_to(link);  // messages that came together with kStart
  }
  std::vector<pollfd> entries;
  std::vector<Link*> polled;
  std::optional<TimeLeft> time_left;  // for the goodbye
  size_t unsent = 0;
  int64_t wake_ns = monotonic_ns(), leaving_since_ns = 0;
  int timeout_ms = -1;
  while (true) {
    if (timeout_ms > 0) leave_by_->note_slice(wake_ns, int64_t{timeout_ms} * 1'000'000);
    wake_ns = monotonic_ns();
    std::unique_lock lock(links_mutex_);
    handle_requests();
    flush_all();
    entries.assign(1, {wake_.get(), POLLIN, 0});
    polled.clear();
    for (Link& link : links_) {
      if (!link.connection.open()) continue;
      const bool sends = link.connection.has_queued();
      entries.push_back(
          {link.connection.fd(), static_cast<short>(sends ? POLLIN | POLLOUT : POLLIN), 0});
      polled.push_back(&link);
    }
    timeout_ms = -1;  // no limit: leave() wakes the thread, or the process ends
    if (leave_by_) {
      if (!time_left) leaving_since_ns = wake_ns;
      const size_t before = std::exchange(unsent, 0);
      for (const Link* link : polled) unsent += link->connection.unsent();
      // As long as bytes are taken, others are slow, as on a busy machine, but not stopped.
      if (!time_left || (unsent < before && wake_ns - leaving_since_ns < kLongestLeaveNs))
        time_left.emplace(leave_by_.emplace(Deadline::after(kLeaveLimit)));
      const int64_t left_ns = time_left->ns();
      if (left_ns <= 0 || polled.empty()) break;
      timeout_ms = static_cast<int>(std::min<int64_t>(left_ns / 1'000'000 + 1, kLeaveSliceMs));
    }
    lock.unlock();
    if (::poll(entries.data(), entries.size(), timeout_ms) < 0) continue;
    if (entries[0].revents != 0) clear_wakeup();
    lock.lock();
    for (size_t i = 0; i < polled.size(); ++i)
      if (entries[i + 1].revents != 0) listen_to(*polled[i]);
  }
  std::lock_guard lock(links_mutex_);
  for (Link& link : links_) link.connection.hang_up();
}

// Waits for start(). False if leave() was called instead.
bool TcpFailureDetector::await_start() {
  while (true) {
    {
      std::lock_guard lock(mutex_);
      // Checked first, because a process that leaves at once must still say goodbye.
      if (started_) return true;
      if (leaving_) return false;
    }
    // Ends when connect() calls start() or leave(), soon after its deadline at the latest.
    pollfd entry{wake_.get(), POLLIN, 0};
    if (::poll(&entry, 1, -1) > 0) clear_wakeup();
  }
}

void TcpFailureDetector::clear_wakeup() {
  eventfd_t times;
  ::eventfd_read(wake_.get(), &times);
}

// Handles requests of other threads.
void TcpFailureDetector::handle_requests() {
  std::optional<std::chrono::milliseconds> silence;
  bool leaves;
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(silence_is_new_, false)) {
      silence = silence_;
      flooding_.send_to_links(Message::about(MessageKind::kTolerateSilence, rank_,
                                             static_cast<uint64_t>(silence_.count())));
    }
    leaves = leaving_ && !leave_by_;
    if (leaves)
      flooding_.send_to_links(Message::about_departure(MessageKind::kGoodbye, rank_, own_));
  }
  for (Link& link : links_)
    if (silence && link.connection.open()) link.connection.tolerate_silence(*silence);
  send_outbox();
  if (leaves) leave_by_ = Deadline::after(kLeaveLimit);
}

void TcpFailureDetector::send_outbox() {
  std::vector<std::pair<int, std::string>> outbox;
  {
    std::lock_guard lock(mutex_);
    if (!started_) return;
    outbox = flooding_.take_outbox();
  }
  if (leave_by_) return;  // the goodbye was the last message
  for (const auto& [rank, bytes] : outbox)
    for (Link& link : links_)
      if (link.rank == rank && link.connection.open()) link.connection.queue(bytes);
}

// Called by other threads: sends what the sockets accept; the detector's thread sends the rest.
void TcpFailureDetector::send_now() {
  {
    std::lock_guard lock(links_mutex_);
    send_outbox();
    flush_all();
  }
  wake();
}

void TcpFailureDetector::flush_all() {
  for (Link& link : links_) {
    if (!link.connection.open()) continue;
    link.connection.flush();
    // After the goodbye: the other end reads it and closes, which ends this connection.
    if (leave_by_ && !link.connection.has_queued()) link.connection.finish();
  }
}

void TcpFailureDetector::listen_to(Link& link) {
  if (!link.connection.open()) return;
  link.connection.receive();
  Message message;
  while (link.connection.open() && link.connection.next(&message)) {
    if (message.kind == MessageKind::kTolerateSilence) {
      raise_silence(std::chrono::milliseconds(
          std::min<uint64_t>(message.id, std::numeric_limits<int64_t>::max())));
      continue;
    }
    bool is_meant;
    std::function<void(const Status&)> on_death;
    {
      std::lock_guard lock(mutex_);
      is_meant = flooding_.handle(link.rank, message);
      publish();
      if (!flooding_.first_death().ok()) on_death = std::exchange(on_death_, nullptr);
    }
    if (on_death) on_death(flooding_.first_death());
    if (message.kind == MessageKind::kGoodbye || message.kind == MessageKind::kFail)
      link.connection.hang_up();
    if (!is_meant) lose(link, EPROTO);
  }
  if (link.connection.open() && link.connection.ended()) lose(link, link.connection.error());
}

// Handles the end of a connection that said no goodbye.
void TcpFailureDetector::lose(Link& link, int error) {
  link.connection.hang_up();
  if (leave_by_) return;  // the answer to this process's goodbye
  std::function<void(const Status&)> on_death;
  {
    std::lock_guard lock(mutex_);
    flooding_.lose(link.rank, describe_loss(name_member(members_, link.rank), error));
    publish();
    if (!flooding_.first_death().ok()) on_death = std::exchange(on_death_, nullptr);
  }
  if (on_death) on_death(flooding_.first_death());
}

}  // namespace dscomm
