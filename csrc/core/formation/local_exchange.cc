#include "core/formation/local_exchange.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

#include "core/base/format.h"
#include "core/base/packer.h"
#include "core/shm/mailbox/layout.h"
#include "core/shm/memory/abstract_socket.h"
#include "core/team/departure.h"

namespace dscomm {
namespace {

// How long a rank looks for a leader, which may be on another host, or unable to listen.
constexpr int64_t kJoinNs = 1'000'000'000;
// How long a leader may take to say which cause came first.
constexpr int64_t kAnswerNs = 1'000'000'000;
// How long members may take to read the leader's last message.
constexpr std::chrono::milliseconds kFailureFlushLimit{1000};
// How long a member waits beyond its deadline: its leader may have begun a second later, and waits
// another second for last messages.
constexpr int64_t kBeyondDeadlineNs = 2'500'000'000;
constexpr int64_t kFirstJoinPauseNs = 1'000'000, kLongestJoinPauseNs = 50'000'000;

AbstractAddress address_of(const LocalRanks& local) {
  ArenaId token{0xcbf29ce484222325, 0x84222325cbf29ce4};
  for (char letter : local.group) {
    token.high = (token.high ^ static_cast<unsigned char>(letter)) * 0x100000001b3;
    token.low = (token.low ^ static_cast<unsigned char>(letter)) * 0x10000000233;
  }
  return AbstractAddress(token);
}

std::string pack(const LocalEntry& entry) {
  return Packer()
      .number(kArenaMagic + kLayoutVersion)
      .fields(entry.rank, entry.name, entry.size, entry.members, entry.body.common, entry.body.own)
      .take();
}

// False also for an entry of another version of dscomm.
bool unpack(const std::string& bytes, LocalEntry* entry) {
  Unpacker unpacker(bytes);
  const bool is_ours = unpacker.number() == kArenaMagic + kLayoutVersion;
  unpacker.fields(entry->rank, entry->name, entry->size, entry->members, entry->body.common,
                  entry->body.own);
  return is_ours && unpacker.whole();
}

UniqueFd make_socket() {
  return UniqueFd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

std::string pack_cause(const Status& cause) { return Packer().status(cause).take(); }

Status unpack_cause(const std::string& text) {
  Unpacker unpacker(text);
  Status cause;
  if (!unpacker.status(cause).whole() || cause.ok())
    return malformed_value("failure of another rank of this host");
  return cause;
}

Status death_of(const std::string& name) {
  return Status(Code::kPeerDied, name + " died or exited" + kDeathAdvice);
}

}  // namespace

// --- the leader

std::unique_ptr<LocalLeader> LocalLeader::listen(const LocalRanks& local, const LocalEntry& own) {
  UniqueFd listener = make_socket();
  const AbstractAddress name = address_of(local);
  if (!listener.valid() || ::bind(listener.get(), name.get(), name.bytes) != 0 ||
      ::listen(listener.get(), SOMAXCONN) != 0)
    return nullptr;
  return std::unique_ptr<LocalLeader>(new LocalLeader(local, own, std::move(listener)));
}

LocalLeader::LocalLeader(const LocalRanks& local, const LocalEntry& own, UniqueFd listener)
    : own_(own), listener_(std::move(listener)), awaited_(local.ranks.begin(), local.ranks.end()) {
  awaited_.erase(own.rank);
}

Status LocalLeader::handle_messages() {
  accept_all();
  for (Member& member : members_) {
    const bool is_open = member.socket.exchange();
    while (std::optional<LocalMessage> message = member.socket.next()) handle(member, *message);
    if (!is_open) member.socket.close();
  }
  // Deaths count after all messages: a member may have died because of another's failure.
  for (const Member& member : members_)
    if (!member.socket.open() && member.is_member && failure_.ok())
      failure_ = death_of(member.entry.name);
  std::erase_if(members_, [](const Member& member) { return !member.socket.open(); });
  return failure_;
}

Status LocalLeader::await_messages(int64_t ns, const Deadline& deadline) {
  std::vector<pollfd> entries{{listener_.get(), POLLIN, 0}};
  for (const Member& member : members_)
    entries.push_back({member.socket.fd(), member.socket.events(), 0});
  const int64_t began_ns = monotonic_ns();
  ::poll(entries.data(), entries.size(), static_cast<int>(ns / 1'000'000));
  deadline.note_slice(began_ns, ns);
  return handle_messages();
}

void LocalLeader::accept_all() {
  while (true) {
    UniqueFd connection(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!connection.valid()) {
      // Out of descriptors: stops listening. Ranks that find no leader speak for themselves.
      if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) listener_.reset();
      return;
    }
    if (is_same_user(connection.get()))
      members_.push_back({LocalSocket(std::move(connection)), {}, false, false});
  }
}

void LocalLeader::handle(Member& member, const LocalMessage& message) {
  if (message.kind == LocalMessageKind::kEntry && !member.is_asked)
    return take_entry(member, message.text);
  if (message.kind == LocalMessageKind::kConfirmed && member.is_asked) return confirm(member);
  if (!member.is_member) return;
  Unpacker unpacker(message.text);
  const uint64_t table = unpacker.number();
  const std::string text = unpacker.text();
  if (table != table_ && table != 0) return;  // on a superseded table
  if (message.kind == LocalMessageKind::kReport) reports_[member.entry.rank] = text;
  if (message.kind == LocalMessageKind::kFailure && failure_.ok()) failure_ = unpack_cause(text);
}

bool LocalLeader::has_asked(int rank) const {
  return std::any_of(members_.begin(), members_.end(), [&](const Member& member) {
    return member.is_asked && member.entry.rank == rank;
  });
}

void LocalLeader::stop_awaiting(int rank) {
  if (!has_asked(rank)) changes_ += awaited_.erase(rank);
}

void LocalLeader::confirm(Member& member) {
  if (member.is_member || awaited_.erase(member.entry.rank) == 0) return;
  member.is_member = true;
  entries_[member.entry.rank] = member.entry.body;
  ++changes_;
}

void LocalLeader::take_entry(Member& member, const std::string& text) {
  LocalEntry entry;
  if (!unpack(text, &entry)) return member.socket.send(LocalMessageKind::kRefused, "");
  if (const Status mismatch = compare(entry); !mismatch.ok()) {
    if (failure_.ok()) failure_ = mismatch;
    return member.socket.send(LocalMessageKind::kFailure, pack_cause(mismatch));
  }
  if (awaited_.count(entry.rank) == 0 || has_asked(entry.rank))
    return member.socket.send(LocalMessageKind::kRefused, "");
  member.entry = std::move(entry);
  member.is_asked = true;
  member.socket.send(LocalMessageKind::kTaken, own_.name);
}

Status members_differ(const MembersView& one, const MembersView& other) {
  // The default group is made without a list of members.
  if (one.members.empty() && other.members.empty())
    return make_status(Code::kMismatch,
                       "world sizes differ: {} has {}, {} has {}; start all ranks with the "
                       "same world size",
                       one.rank, one.size, other.rank, other.size);
  const auto view = [](const MembersView& seen) {
    return format_text("{} made it of {} ranks (global ranks {})", seen.rank, seen.size,
                       seen.members);
  };
  return Status(Code::kMismatch, "the ranks passed different members to it: " + view(one) + ", " +
                                     view(other) + "; pass the same list on every rank");
}

Status LocalLeader::compare(const LocalEntry& other) const {
  if (other.size == own_.size && other.members == own_.members) return {};
  return members_differ({own_.name, own_.size, own_.members},
                        {other.name, other.size, other.members});
}

void LocalLeader::send_to_all(LocalMessageKind kind, const std::string& text) {
  for (Member& member : members_)
    if (member.is_member) member.socket.send(kind, text);
}

void LocalLeader::send_table(uint64_t number, const std::string& table) {
  table_ = number;
  reports_.clear();
  send_to_all(LocalMessageKind::kTable, Packer().number(number).text(table).take());
}

void LocalLeader::send_failure(const Status& cause) {
  // Also to members that have not confirmed yet: they read this after kTaken.
  for (Member& member : members_) member.socket.send(LocalMessageKind::kFailure, pack_cause(cause));
  // Waits until all is sent: a member may still be receiving a table, which comes first.
  const Deadline deadline = Deadline::after(kFailureFlushLimit);
  const auto sends = [](const Member& member) { return (member.socket.events() & POLLOUT) != 0; };
  while (std::any_of(members_.begin(), members_.end(), sends) && !deadline.expired())
    static_cast<void>(await_messages(10 * kMs, deadline));
}

std::string LocalLeader::without_report() const {
  std::string names;
  for (const Member& member : members_)
    if (member.is_member && reports_.count(member.entry.rank) == 0)
      names += (names.empty() ? "" : ", ") + member.entry.name;
  return names;
}

// --- a member

LocalMember::LocalMember(const LocalRanks& local) : local_(local) {}

void LocalMember::call_leader() {
  UniqueFd socket = make_socket();
  const AbstractAddress name = address_of(local_);
  if (socket.valid() && ::connect(socket.get(), name.get(), name.bytes) == 0 &&
      is_same_user(socket.get()))
    socket_ = LocalSocket(std::move(socket));
}

Result<bool> LocalMember::join_leader(const LocalEntry& own, const GiveUpCheck& check,
                                      const Deadline& deadline) {
  const int64_t end_ns = monotonic_ns() + kJoinNs;
  const std::string entry = pack(own);
  for (int64_t pause_ns = kFirstJoinPauseNs; monotonic_ns() < end_ns && !deadline.expired();
       pause_ns = std::min(2 * pause_ns, kLongestJoinPauseNs)) {
    if (!socket_.open()) {
      call_leader();
      if (socket_.open()) socket_.send(LocalMessageKind::kEntry, entry);
    }
    std::optional<LocalMessage> message = receive(pause_ns, deadline);
    if (message && message->kind == LocalMessageKind::kTaken) {
      leader_ = message->text;
      socket_.send(LocalMessageKind::kConfirmed, "");
      return true;
    }
    if (message && message->kind == LocalMessageKind::kFailure) {
      leader_has_failed_ = true;
      return unpack_cause(message->text);
    }
    if (message) return false;
    DSCOMM_RETURN_IF_ERROR(check());
  }
  return false;  // has sent no kConfirmed, so no leader speaks for this rank
}

Result<LocalMessage> LocalMember::await(const GiveUpCheck& check, const Deadline& deadline) {
  const Deadline last = deadline.later(kBeyondDeadlineNs);
  TimeLeft time_left(last);
  Status reason;
  int64_t answer_by_ns = 0;
  while (true) {
    if (reason.ok() && !(reason = check()).ok()) {
      report_failure(reason);
      answer_by_ns = monotonic_ns() + kAnswerNs;
    }
    const bool is_over = time_left.is_over();  // but reads once more
    std::optional<LocalMessage> message = receive(kLongestJoinPauseNs, last);
    if (message && message->kind == LocalMessageKind::kFailure) return unpack_cause(message->text);
    if (message && message->kind == LocalMessageKind::kTable)
      table_ = Unpacker(message->text).number();
    if (message) return std::move(*message);
    if (!socket_.open()) {
      has_ended_ = true;
      return reason.ok() ? death_of(leader_) : reason;
    }
    if (!reason.ok() && monotonic_ns() >= answer_by_ns) return reason;
    if (!is_over) continue;
    if (!reason.ok()) return reason;
    reason = make_status(Code::kTimeout, "timed out after {} waiting for {}; see if it is stopped",
                         deadline.timeout_text(), leader_);
    report_failure(reason);
    return reason;
  }
}

Result<LocalMessage> LocalMember::fail(const Status& cause, const Deadline& deadline) {
  Result<LocalMessage> answer = await([&] { return cause; }, deadline);
  if (answer.ok() && answer.value().kind != LocalMessageKind::kTable) return cause;
  return answer;
}

void LocalMember::report(const std::string& text) {
  socket_.send(LocalMessageKind::kReport, Packer().number(table_).text(text).take());
}

void LocalMember::report_failure(const Status& cause) {
  socket_.send(LocalMessageKind::kFailure, Packer().number(table_).text(pack_cause(cause)).take());
}

// The leader's next message, if it comes within `ns`. Without a socket, only waits.
std::optional<LocalMessage> LocalMember::receive(int64_t ns, const Deadline& deadline) {
  if (socket_.open()) {
    if (std::optional<LocalMessage> message = socket_.next()) return message;
    pollfd entry{socket_.fd(), socket_.events(), 0};
    const int64_t began_ns = monotonic_ns();
    ::poll(&entry, 1, static_cast<int>(ns / 1'000'000));
    deadline.note_slice(began_ns, ns);
    const bool is_open = socket_.exchange();
    std::optional<LocalMessage> message = socket_.next();
    if (!is_open && !message) socket_.close();
    return message;
  }
  deadline.nap(ns);
  return std::nullopt;
}

}  // namespace dscomm
