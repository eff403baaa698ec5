#include "core/detector/rendezvous.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "core/base/format.h"
#include "core/base/packer.h"
#include "core/detector/connector.h"
#include "core/detector/flooding.h"
#include "core/detector/links.h"
#include "core/detector/listener.h"
#include "core/store/store_exchange.h"
#include "core/transport/members.h"

namespace dscomm {
namespace {

// How often a member checks whether another one has given up.
constexpr int64_t kCheckFailureEveryNs = 200 * kMs;
// Pauses between looks for an invitation: the first one, and the longest.
constexpr int64_t kFirstInvitationPauseNs = kMs, kLongestInvitationPauseNs = 50 * kMs;
// A member with all of its connections waits this much beyond its deadline, because a member that
// lacks a connection reports why. The first member gets all reports, and waits half as long.
constexpr int64_t kLinkedGraceNs = 500 * kMs;
// How often a member reports missing members.
constexpr int64_t kTellEveryNs = 500 * kMs;
// Hosts are numbered in the order of their members, so rank 0 is the first of the first host.
constexpr int kFirst = 0;
// The most names in one message.
constexpr size_t kNames = 8;

std::string invitation_name(int rank) { return format_text("invitation/{}", rank); }

class Rendezvous {
 public:
  Rendezvous(const TransportRequest& request, Store& store, const Deadline& deadline)
      : request_(request),
        links_(make_links(request.members)[static_cast<size_t>(request.rank)]),
        exchange_(store, exchange_of(request), deadline),
        deadline_(deadline),
        linked_deadline_(deadline.later(links_.up.empty() ? kLinkedGraceNs / 2 : kLinkedGraceNs)),
        time_left_(deadline),
        linked_time_left_(linked_deadline_),
        listener_(request, links_.down.size()) {
    for (const std::vector<int>* ranks : {&links_.up, &links_.down})
      for (int rank : *ranks) peers_[rank].is_up = ranks == &links_.up;
  }

  Result<std::vector<Link>> run() {
    Status status = invite();
    while (status.ok() && !is_started_) status = run_once();
    if (!status.ok()) return give_up(status);
    // Sent before messages of the detector, so that the receiver has started when it reads those.
    send_to_all(Message::about(MessageKind::kStart, request_.rank, request_.id));
    std::vector<Link> links;
    for (auto& [rank, peer] : peers_) links.push_back({rank, std::move(peer.connection)});
    return links;
  }

 private:
  struct Peer {
    bool is_up = false;                    // this member connects to it
    bool is_ready = false;                 // it has said that it is ready
    std::unique_ptr<Connector> connector;  // while it is not connected
    Connection connection;
  };

  std::string name(int rank) const { return name_member(request_.members, rank); }
  Status error(const Status& status) const {
    return make_status(status.code(), "connecting the hosts of group '{}': {}", request_.name,
                       status.message());
  }

  Status invite();
  Status run_once();
  Status check();
  Status read_invitations();
  void say_ready();
  Status wait();
  Status listen_to(int rank, Peer& peer);
  Status handle(int rank, Peer& peer, const Message& message);
  Status timed_out();
  std::string missing() const;
  std::string awaited() const;
  void tell_who_is_missing();
  void send_to_all(const Message& message);
  void say(Peer& peer, const Message& message);
  Status give_up(const Status& status);

  bool is_linked() const {
    return std::all_of(peers_.begin(), peers_.end(),
                       [](const auto& entry) { return entry.second.connection.open(); });
  }
  int64_t left_ns() { return is_linked() ? linked_time_left_.ns() : time_left_.ns(); }

  const TransportRequest& request_;
  const Links links_;
  StoreExchange exchange_;
  const Deadline& deadline_;
  const Deadline linked_deadline_;  // of a member with all of its connections
  TimeLeft time_left_, linked_time_left_;
  Listener listener_;
  std::map<int, Peer> peers_;
  bool has_said_ready_ = false, is_started_ = false, is_over_ = false;
  bool has_failure_ = false;  // the cause of the failure came over a connection
  int64_t pause_ns_ = kFirstInvitationPauseNs, read_again_ns_ = 0;
  std::map<int, std::string> missing_;  // by connected member: the ranks that it waits for
  std::optional<std::pair<std::string, std::string>>
      last_report_;  // this member's last reports: to `up`, to `down`
  int64_t next_telling_ns_ = 0;
};

Status Rendezvous::invite() {
  if (links_.down.empty()) return {};
  if (Status status = listener_.open(); !status.ok()) return error(status);
  Status published =
      exchange_.publish(invitation_name(request_.rank), encode(listener_.invitation()));
  return published.ok() ? published : error(published);
}

Status Rendezvous::run_once() {
  DSCOMM_RETURN_IF_ERROR(check());
  if (!is_linked()) DSCOMM_RETURN_IF_ERROR(read_invitations());
  for (auto& [rank, peer] : peers_)
    if (peer.connector)
      if (Status status = peer.connector->begin(); !status.ok()) return error(status);
  tell_who_is_missing();
  say_ready();
  return is_started_ ? Status() : wait();
}

// Returns an error if this member must give up: another one failed, or the time is over.
Status Rendezvous::check() {
  const bool was_over = is_over_;  // at the last check; wait() has read once more since then
  is_over_ = left_ns() <= 0;
  // A member with all of its connections hears of failures over them, and does not ask the store.
  Status failure = is_linked() ? Status() : exchange_.check();
  // If the others have timed out, they waited for this member, whose own attempts say more.
  if (failure.code() == Code::kTimeout)
    for (const auto& [rank, peer] : peers_)
      if (peer.connector)
        return error(peer.connector->unreachable(Code::kTimeout, "could not connect in time"));
  DSCOMM_RETURN_IF_ERROR(failure);
  return was_over && is_over_ ? timed_out() : Status();
}

Status Rendezvous::read_invitations() {
  const int64_t now = monotonic_ns();
  if (now < read_again_ns_) return {};
  for (auto& [rank, peer] : peers_) {
    if (!peer.is_up || peer.connector || peer.connection.open()) continue;
    Result<std::optional<std::string>> bytes = exchange_.find(invitation_name(rank));
    if (!bytes.ok()) return error(bytes.status());
    if (!bytes.value()) continue;
    auto connector = std::make_unique<Connector>(request_, rank);
    if (Status status = connector->read(*bytes.value()); !status.ok()) return error(status);
    peer.connector = std::move(connector);
  }
  read_again_ns_ = now + pause_ns_;
  pause_ns_ = std::min(2 * pause_ns_, kLongestInvitationPauseNs);
  return {};
}

void Rendezvous::say_ready() {
  const bool is_ready =
      is_linked() && std::all_of(peers_.begin(), peers_.end(), [](const auto& entry) {
        return entry.second.is_up || entry.second.is_ready;
      });
  if (!is_ready || has_said_ready_) return;
  has_said_ready_ = true;
  if (links_.up.empty()) is_started_ = true;
  const Message message = Message::about(MessageKind::kReady, request_.rank, request_.id);
  for (auto& [rank, peer] : peers_)
    if (peer.is_up) say(peer, message);
}

Status Rendezvous::wait() {
  std::vector<pollfd> entries;
  int64_t wake_ns = monotonic_ns() + kCheckFailureEveryNs;
  const bool awaits_invitation = std::any_of(peers_.begin(), peers_.end(), [](const auto& entry) {
    return entry.second.is_up && !entry.second.connector && !entry.second.connection.open();
  });
  if (awaits_invitation) wake_ns = std::min(wake_ns, read_again_ns_);
  std::map<int, std::pair<size_t, size_t>> dials;  // by rank: first entry, number of entries
  for (auto& [rank, peer] : peers_) {
    if (peer.connector) {
      const size_t first = entries.size();
      peer.connector->add_to(&entries);
      dials[rank] = {first, entries.size() - first};
      wake_ns = std::min(wake_ns, peer.connector->next_attempt_ns());
    }
    if (!peer.connection.open()) continue;
    const bool sends = peer.connection.has_queued();
    entries.push_back(
        {peer.connection.fd(), static_cast<short>(sends ? POLLIN | POLLOUT : POLLIN), 0});
  }
  const size_t first_of_listener = entries.size();
  listener_.add_to(&entries);

  const int64_t began_ns = monotonic_ns();
  const int64_t asked_ns = std::max(std::min(wake_ns - began_ns, std::max(left_ns(), kMs)), kMs);
  const int ready = ::poll(entries.data(), entries.size(), static_cast<int>(asked_ns / kMs));
  const int reason = errno;
  deadline_.note_slice(began_ns, asked_ns);
  if (ready < 0) {
    if (reason == EINTR) return {};
    return error(make_status(Code::kResource, "{}: poll failed: {}", name(request_.rank),
                             std::strerror(reason)));
  }
  const std::span<const pollfd> all(entries);
  size_t next = 0;
  for (auto& [rank, peer] : peers_) {
    if (auto place = dials.find(rank); place != dials.end()) {
      next = place->second.first + place->second.second;
      if (peer.connector->handle(all.subspan(place->second.first, place->second.second))) {
        peer.connection = peer.connector->connection();
        peer.connector.reset();
        last_report_.reset();  // this peer has been told nothing
      }
    } else if (peer.connection.open()) {
      if (all[next++].revents != 0) DSCOMM_RETURN_IF_ERROR(listen_to(rank, peer));
    }
  }
  const Status status =
      listener_.handle(all.subspan(first_of_listener), [this](int rank, Connection&& connection) {
        auto peer = peers_.find(rank);
        // A member tries several addresses: the first connection counts.
        if (peer == peers_.end() || peer->second.is_up || peer->second.connection.open()) return;
        peer->second.connection = std::move(connection);
        peer->second.connection.queue(Message::about(MessageKind::kWelcome, rank, request_.id));
        peer->second.connection.flush();
        last_report_.reset();  // this peer has been told nothing
      });
  return status.ok() ? status : error(status);
}

Status Rendezvous::listen_to(int rank, Peer& peer) {
  peer.connection.flush();
  peer.connection.receive();
  Message message;
  while (!is_started_ && peer.connection.next(&message))
    DSCOMM_RETURN_IF_ERROR(handle(rank, peer, message));
  if (is_started_ || !peer.connection.ended()) return {};
  return error(describe_loss(name(rank), peer.connection.error()));
}

Status Rendezvous::handle(int rank, Peer& peer, const Message& message) {
  const bool is_ours = message.id == request_.id;
  if (is_ours && message.kind == MessageKind::kStart) {
    is_started_ = true;
  } else if (is_ours && message.kind == MessageKind::kReady && !peer.is_up) {
    peer.is_ready = true;
  } else if (is_ours && message.kind == MessageKind::kFail && message.code != Code::kOk) {
    has_failure_ = true;
    return message.status();
  } else if (is_ours && message.kind == MessageKind::kMissing && message.rank >= 0 &&
             message.rank < static_cast<int>(request_.members.size())) {
    missing_[rank] = message.text;
  } else {
    return error(malformed_value("message from " + name(rank)));
  }
  return {};
}

Status Rendezvous::timed_out() {
  const std::string after = "timed out after " + deadline_.timeout_text();
  for (const auto& [rank, peer] : peers_)
    if (peer.connector)
      return error(
          peer.connector->unreachable(Code::kTimeout, after + ", in which it could not connect"));
  std::string who = awaited();
  if (who.empty())
    who = name(kFirst) + " to report that all are connected; see whether it is stopped";
  return error(Status(Code::kTimeout, after + " waiting for " + who));
}

// The ranks that this member waits for; empty if it waits for the first member to start all.
std::string Rendezvous::awaited() const {
  if (std::string own = missing(); !own.empty()) return own;
  for (const auto& [rank, text] : missing_)
    if (!text.empty()) return text;
  for (const auto& [rank, peer] : peers_)
    if (!peer.is_up && !peer.is_ready)
      return name(rank) +
             ", which is connected, but does not say that it is ready; see whether it is stopped";
  return "";
}

// The ranks that this member lacks, and what it awaits of them.
std::string Rendezvous::missing() const {
  std::string not_here, silent;
  size_t count = 0;
  for (const auto& [rank, peer] : peers_) {
    if (peer.connection.open() || peer.connector || ++count > kNames) continue;
    std::string& names = peer.is_up ? silent : not_here;
    names += (names.empty() ? "" : ", ") + name(rank);
  }
  if (count == 0) return "";
  std::string text = not_here;
  if (!not_here.empty())
    text += format_text(" to connect to {} at {}", name(request_.rank), listener_.endpoints());
  if (!silent.empty())
    text += format_text("{}{} to say where it listens", text.empty() ? "" : "; ", silent);
  if (count > kNames) text += format_text(", and {} more ranks", count - kNames);
  return text + "; see whether they run, and let TCP through between the hosts";
}

// Connected members may have to give up before this one does, and then must name the missing ones.
// Reports of others are passed on only towards the first member, or they would circulate for ever.
void Rendezvous::tell_who_is_missing() {
  if (monotonic_ns() < next_telling_ns_) return;
  const bool is_first = next_telling_ns_ == 0;
  next_telling_ns_ = monotonic_ns() + kTellEveryNs;
  if (is_first) return;  // too early: hardly any member is connected
  Message message = Message::about(MessageKind::kMissing, request_.rank, request_.id);
  const std::string up = awaited(), down = missing();
  if (last_report_ == std::pair(up, down)) return;
  last_report_ = {up, down};
  for (auto& [rank, peer] : peers_) {
    message.text = peer.is_up ? up : down;
    say(peer, message);
  }
}

void Rendezvous::send_to_all(const Message& message) {
  for (auto& [rank, peer] : peers_) say(peer, message);
}

void Rendezvous::say(Peer& peer, const Message& message) {
  if (!peer.connection.open()) return;
  peer.connection.queue(message);
  peer.connection.flush();
}

// Tells connected members over their connections and, unless it gives up because of another's
// failure, the others through the store, which decides which cause was first. After a timeout, it
// tells connected members first: the deadline passes for many members at once, and exchange_.fail()
// waits, to let rank 0 go first. A member that times out although it has all of its connections
// does not tell the store: others are the cause, and the store may not answer.
Status Rendezvous::give_up(const Status& status) {
  Status cause = status;
  const bool is_known = has_failure_ || exchange_.has_read_failure();
  const bool is_late = status.code() == Code::kTimeout, was_linked = is_linked();
  if (!is_known && !is_late) cause = exchange_.fail(status);
  const Message last_message =
      Message::about(MessageKind::kFail, request_.rank, request_.id, cause);
  send_to_all(last_message);
  for (auto& [rank, peer] : peers_) {
    if (peer.connector) peer.connector->hang_up(last_message);
    peer.connection.hang_up();
  }
  if (!is_known && is_late && !was_linked) cause = exchange_.fail(status);
  if (listener_.is_open()) exchange_.remove(invitation_name(request_.rank));
  return cause;
}

}  // namespace

void remove_invitation(const TransportRequest& request, Store& store, const Deadline& deadline) {
  if (make_links(request.members)[static_cast<size_t>(request.rank)].down.empty()) return;
  StoreExchange(store, exchange_of(request), deadline).remove(invitation_name(request.rank));
}

Result<std::vector<Link>> connect_members(const TransportRequest& request, Store& store,
                                          const Deadline& deadline) {
  return Rendezvous(request, store, deadline).run();
}

}  // namespace dscomm
