#include "core/transport/rendezvous.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <sstream>

#include "core/base/log.h"
#include "core/store/store_exchange.h"
#include "core/transport/networks.h"

namespace dscomm {
namespace {

constexpr int64_t kMs = 1'000'000;

// Between two looks whether somebody has given up.
constexpr int64_t kLookEveryNs = 200 * kMs;
// An address that drops what it does not let through answers nothing: the next one is tried beside
// it (RFC 8305 recommends 250 ms).
constexpr int64_t kNextAddressNs = 250 * kMs;
// Between rounds over all addresses. Member 0 listens before it publishes, so what is refused in
// every round of two seconds stays refused.
constexpr int64_t kPauseNs = 200 * kMs;
constexpr int kRefusedRounds = 10;
// Member 0 has the last word; it gets this long past the deadline of who waits for it.
constexpr int64_t kVerdictNs = 500 * kMs;
// Whoever connects shows the token at once. This many more than members may be waiting to.
constexpr int64_t kHelloNs = 10'000 * kMs;
constexpr size_t kStrangers = 64;
// Between two looks at the members, at most.
constexpr int kAcceptedAtOnce = 256;

// Names in one message, at most.
constexpr size_t kNames = 8;
// How often the members hear who is missing, where that changes.
constexpr int64_t kTellEveryNs = 500 * kMs;

// poll() for `left_ns`, but one millisecond at least and kLookEveryNs at most. Time in which the
// process was stopped meanwhile is left out of the deadline.
int poll_slice(std::vector<pollfd>* entries, int64_t left_ns, const Deadline& deadline) {
  const int64_t asked_ns = std::clamp(left_ns, kMs, kLookEveryNs);
  const int64_t began_ns = monotonic_ns();
  const int ready = ::poll(entries->data(), entries->size(), static_cast<int>(asked_ns / kMs));
  const int error = errno;
  deadline.note_slice(began_ns, asked_ns);
  errno = error;
  return ready;
}

std::string error_text(int error) {
  return error == 0 ? "it closed the connection" : std::strerror(error);
}

constexpr const char* kInvitation = "invitation";
// Of the longest endpoint, " [address]:port" of IPv6, and the blank after the token.
constexpr size_t kEndpointBytes = 1 + 1 + 39 + 1 + 1 + 5 + 1;

ExchangeRequest exchange_request(const TransportRequest& request) {
  ExchangeRequest exchange;
  char id[32];
  std::snprintf(id, sizeof id, "%016" PRIx64 "/", request.id);
  exchange.prefix = request.prefix + "lifeline/" + id;
  exchange.rank = request.rank;
  exchange.size = static_cast<int>(request.members.size());
  exchange.name = [&request](int rank) { return name_member(request.members, rank); };
  return exchange;
}

// Both sides of a meeting.
class Party {
 public:
  Party(const TransportRequest& request, Store& store, const Deadline& deadline)
      : request_(request),
        exchange_(store, exchange_request(request), deadline),
        deadline_(deadline) {}

 protected:
  int size() const { return static_cast<int>(request_.members.size()); }
  std::string name(int rank) const { return name_member(request_.members, rank); }

  Status error(Code code, const std::string& text) const {
    return Status(code, "connecting the hosts of group '" + request_.name + "': " + text);
  }

  Status ended_early(int rank) const {
    return error(Code::kPeerDied,
                 name(rank) +
                     " died or exited while the members connected; look for its own "
                     "error, a signal or the out-of-memory killer in its output and the "
                     "system log");
  }

  Status timed_out(const std::string& waiting_for) const {
    return error(Code::kTimeout, "timed out after " + std::to_string(deadline_.timeout_ms()) +
                                     " ms waiting for " + waiting_for);
  }

  // Whether `message` belongs to this meeting.
  bool is_ours(const Message& message, MessageKind kind) const {
    return message.kind == kind && message.id == request_.id;
  }

  const TransportRequest& request_;
  StoreExchange exchange_;
  const Deadline& deadline_;
};

// Member 0.
class Host : Party {
 public:
  using Party::Party;

  Result<std::vector<Connection>> run() {
    members_.resize(static_cast<size_t>(size()));
    if (size() == 1) return std::move(members_);
    Status status = invite();
    if (status.ok()) status = collect();
    const Message verdict = Message::about(status.ok() ? MessageKind::kStart : MessageKind::kFail,
                                           0, request_.id, status);
    for (Connection& member : members_) {
      if (!member.open()) continue;
      member.queue(verdict);
      member.flush();
      if (!status.ok()) member.hang_up();
    }
    // Over the store for those that were not connected yet.
    if (!status.ok()) return exchange_.fail(status);
    exchange_.remove(kInvitation);
    return std::move(members_);
  }

 private:
  // A connection that has not shown who it is.
  struct Arrival {
    Connection connection;
    int64_t since_ns = 0;
  };

  Status invite();
  Status listen_at(const std::string& address);
  Status collect();
  Status wait_for_news(int64_t left_ns);
  Status accept_from(int listener);
  bool admit(Connection* connection);
  Status listen_to(int rank);
  void tell_who_is_missing();
  std::string missing() const;

  std::string token_;
  std::string endpoints_;  // "10.0.0.1:4444 10.1.0.1:5555"
  std::vector<UniqueFd> listeners_;
  std::vector<Arrival> arrivals_;
  std::vector<Connection> members_;
  int connected_ = 0;
  std::string told_;  // who is missing, as the members were told last
  int64_t next_telling_ns_ = 0;
};

Status Host::invite() {
  uint64_t token[2];
  if (getrandom(token, sizeof token, 0) != static_cast<ssize_t>(sizeof token))
    return error(Code::kResource, name(0) + " got no random numbers: " + std::strerror(errno));
  char text[40];
  std::snprintf(text, sizeof text, "%016" PRIx64 "%016" PRIx64, token[0], token[1]);
  token_ = text;
  // At all its addresses and no other: where a user has chosen among them, the rest stay closed.
  Status last =
      error(Code::kUnsupported, name(0) +
                                    " has no network at which other hosts could reach it: no "
                                    "interface but loopback is up, or none was allowed");
  for (const std::string& address : reachable_addresses(request_.members, 0, 0))
    if (Status status = listen_at(address); !status.ok()) last = status;
  if (listeners_.empty()) return last;
  Message invitation = Message::about(MessageKind::kInvitation, 0, request_.id);
  invitation.text = token_ + " " + endpoints_;
  log_line(LogLevel::kDebug, "listening for the members of '%s' at %s", request_.name.c_str(),
           endpoints_.c_str());
  Status published = exchange_.publish(kInvitation, encode(invitation));
  return published.ok() ? published : error(published.code(), published.message());
}

Status Host::listen_at(const std::string& address) {
  // All of them must fit in one message.
  if (endpoints_.size() + token_.size() + kEndpointBytes > kMessageTextBytes) return {};
  auto failed = [&](const char* what) {
    return error(Code::kResource, name(0) + " cannot listen at " + address + ": " + what + ": " +
                                      std::strerror(errno));
  };
  std::optional<SocketAddress> name = socket_address(address, 0);
  if (!name) return error(Code::kInternal, "'" + address + "' is no address");
  UniqueFd listener(socket(name->storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener.valid()) return failed("no socket (ulimit -n?)");
  if (bind(listener.get(), name->get(), name->size) != 0) return failed("bind");
  if (listen(listener.get(), SOMAXCONN) != 0) return failed("listen");
  if (getsockname(listener.get(), name->get(), &name->size) != 0) return failed("getsockname");
  if (!endpoints_.empty()) endpoints_ += " ";
  endpoints_ += endpoint_text(address, port_of(*name));
  listeners_.push_back(std::move(listener));
  return {};
}

Status Host::collect() {
  TimeLeft time_left(deadline_);
  while (connected_ + 1 < size()) {
    const int64_t left_ns = time_left.ns();
    if (left_ns <= 0) return timed_out(missing());
    DSCOMM_RETURN_IF_ERROR(exchange_.look());
    tell_who_is_missing();
    DSCOMM_RETURN_IF_ERROR(wait_for_news(left_ns));
  }
  return {};
}

Status Host::wait_for_news(int64_t left_ns) {
  std::vector<pollfd> entries;
  std::vector<int> ranks;
  for (int rank = 1; rank < size(); ++rank) {
    const Connection& member = members_[static_cast<size_t>(rank)];
    if (!member.open()) continue;
    entries.push_back({member.fd(), POLLIN, 0});
    ranks.push_back(rank);
  }
  for (const Arrival& arrival : arrivals_) entries.push_back({arrival.connection.fd(), POLLIN, 0});
  for (const UniqueFd& listener : listeners_) entries.push_back({listener.get(), POLLIN, 0});
  if (poll_slice(&entries, left_ns, deadline_) < 0) {
    if (errno == EINTR) return {};
    return error(Code::kResource, name(0) + ": poll failed: " + std::strerror(errno));
  }
  const pollfd* entry = entries.data();
  for (int rank : ranks)
    if ((entry++)->revents != 0) DSCOMM_RETURN_IF_ERROR(listen_to(rank));
  const int64_t now = monotonic_ns();
  std::erase_if(arrivals_, [&](Arrival& arrival) {
    if ((entry++)->revents == 0) return now - arrival.since_ns > kHelloNs;
    arrival.connection.receive();
    return admit(&arrival.connection) || arrival.connection.ended();
  });
  for (const UniqueFd& listener : listeners_)
    if ((entry++)->revents != 0) DSCOMM_RETURN_IF_ERROR(accept_from(listener.get()));
  return {};
}

Status Host::accept_from(int listener) {
  for (int i = 0; i < kAcceptedAtOnce; ++i) {
    UniqueFd socket(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.valid()) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)
        return error(Code::kResource,
                     name(0) + " cannot take the connections of " + std::to_string(size() - 1) +
                         " others: " + std::strerror(errno) + "; raise its limit (ulimit -n)");
      return {};  // nobody waits any more, or whoever did has gone
    }
    // A member that is turned away comes again.
    if (arrivals_.size() >= static_cast<size_t>(size()) + kStrangers)
      arrivals_.erase(arrivals_.begin());
    arrivals_.push_back({Connection(std::move(socket)), monotonic_ns()});
  }
  return {};
}

// Whether who connected has said enough to be taken from the arrivals: into the members when it is
// one, away when it is not.
bool Host::admit(Connection* connection) {
  Message hello;
  if (!connection->next(&hello)) return false;
  if (!is_ours(hello, MessageKind::kHello) || hello.text != token_ || hello.rank <= 0 ||
      hello.rank >= size()) {
    log_line(LogLevel::kInfo, "a stranger connected, and was turned away");
    return true;
  }
  Connection& member = members_[static_cast<size_t>(hello.rank)];
  // A member tries several addresses: the first that gets through counts.
  if (member.open()) return true;
  member = std::move(*connection);
  member.queue(Message::about(MessageKind::kWelcome, hello.rank, request_.id));
  member.flush();
  told_.clear();  // this one has been told nothing
  ++connected_;
  return true;
}

// A member has nothing to say yet, unless it gives up.
Status Host::listen_to(int rank) {
  Connection& member = members_[static_cast<size_t>(rank)];
  member.receive();
  Message message;
  if (member.next(&message)) {
    if (is_ours(message, MessageKind::kFail) && message.code != Code::kOk) return message.status();
    return error(Code::kInternal, name(rank) + " said something before all were connected");
  }
  return member.ended() ? ended_early(rank) : Status();
}

// Those that are connected may have to give up before this member does, and then name them.
void Host::tell_who_is_missing() {
  if (monotonic_ns() < next_telling_ns_) return;
  next_telling_ns_ = monotonic_ns() + kTellEveryNs;
  Message message = Message::about(MessageKind::kMissing, 0, request_.id);
  message.text = missing();
  if (message.text == told_) return;
  told_ = message.text;
  for (Connection& member : members_) {
    if (!member.open()) continue;
    member.queue(message);
    member.flush();
  }
}

std::string Host::missing() const {
  std::string names;
  size_t count = 0;
  for (int rank = 1; rank < size(); ++rank) {
    if (members_[static_cast<size_t>(rank)].open() || ++count > kNames) continue;
    names += (names.empty() ? "" : ", ") + name(rank);
  }
  if (count > kNames) names += " and " + std::to_string(count - kNames) + " more";
  return names + " to connect to " + name(0) + " at " + endpoints_ +
         "; see whether they run, and let TCP through between the hosts";
}

// Any other member.
class Guest : Party {
 public:
  using Party::Party;

  Result<std::vector<Connection>> run() {
    std::vector<Connection> connections(static_cast<size_t>(size()));
    Status status = read_invitation();
    if (status.ok()) status = connect_to_host();
    if (status.ok()) status = await_start();
    if (!status.ok()) {
      tell(status);
      return status;
    }
    connections[0] = std::move(host_);
    return connections;
  }

 private:
  struct Endpoint {
    SocketAddress address;
    std::string text;     // "10.0.0.1:4444"
    std::string outcome;  // of the last attempt
    bool refused = false;
  };
  struct Attempt {
    Connection connection;
    size_t endpoint = 0;
    bool connected = false;
  };

  Status read_invitation();
  void add_endpoint(const std::string& text, const std::string& address);
  Status connect_to_host();
  bool is_tried(size_t endpoint) const;
  Result<bool> begin_attempt(size_t endpoint);
  bool is_over(Attempt& attempt);
  Status end_round();
  Status unreachable(Code code, const std::string& how) const;
  Status await_start();
  void tell(const Status& status);

  std::string token_;
  std::vector<Endpoint> endpoints_;  // the most promising first
  std::vector<Attempt> attempts_;
  int refused_rounds_ = 0;
  Connection host_;
  bool told_ = false;  // the cause came from the others
};

Status Guest::read_invitation() {
  Result<std::string> bytes = exchange_.await(kInvitation, deadline_);
  if (exchange_.is_told()) return bytes.status();
  if (!bytes.ok())
    return error(bytes.status().code(),
                 name(0) + " has not said where it listens: " + bytes.status().message());
  Message invitation;
  if (!decode(bytes.value(), &invitation) || invitation.id != request_.id)
    return error(Code::kInternal, "what " + name(0) + " published is no message");
  if (invitation.kind != MessageKind::kInvitation)
    return error(Code::kInternal, "what " + name(0) + " published is no invitation");
  std::istringstream words(invitation.text);
  words >> token_;
  const std::vector<std::string> offered{std::istream_iterator<std::string>(words),
                                         std::istream_iterator<std::string>()};
  for (const std::string& address : reachable_addresses(request_.members, request_.rank, 0))
    for (const std::string& endpoint : offered)
      if (is_endpoint_at(endpoint, address)) add_endpoint(endpoint, address);
  if (endpoints_.empty())
    return error(Code::kUnsupported,
                 name(0) + " listens at " +
                     invitation.text.substr(std::min(token_.size() + 1, invitation.text.size())) +
                     ", none of which leads there from " + name(request_.rank) +
                     ": both hosts have these addresses themselves");
  return {};
}

void Guest::add_endpoint(const std::string& text, const std::string& address) {
  const int port = std::atoi(text.c_str() + text.rfind(':') + 1);
  if (port <= 0 || port > 65535) return;
  const std::optional<SocketAddress> there = socket_address(address, static_cast<uint16_t>(port));
  if (!there) return;
  Endpoint endpoint;
  endpoint.address = *there;
  endpoint.text = text;
  endpoints_.push_back(std::move(endpoint));
}

Status Guest::connect_to_host() {
  size_t next = 0;            // of the endpoints, in this round
  int64_t start_next_ns = 0;  // when it is tried
  TimeLeft time_left(deadline_);
  while (true) {
    Status failure = exchange_.look();
    const int64_t left_ns = time_left.ns();
    // Where the others have given up waiting, it was for this one: what it tried says more.
    if (failure.code() == Code::kTimeout || left_ns <= 0)
      return unreachable(Code::kTimeout, "timed out after " +
                                             std::to_string(deadline_.timeout_ms()) +
                                             " ms, in which it could not connect");
    if (!failure.ok()) return failure;
    int64_t now = monotonic_ns();
    while (next < endpoints_.size() && is_tried(next)) ++next;
    if (next < endpoints_.size() && now >= start_next_ns) {
      Result<bool> begun = begin_attempt(next++);
      if (!begun.ok()) return begun.status();
      start_next_ns = begun.value() ? now + kNextAddressNs : now;
      continue;
    }
    const bool connecting = std::any_of(attempts_.begin(), attempts_.end(),
                                        [](const Attempt& attempt) { return !attempt.connected; });
    // Who has been connected may be kept waiting for an answer; the other addresses are tried
    // again.
    if (next == endpoints_.size() && !connecting && attempts_.size() < endpoints_.size()) {
      DSCOMM_RETURN_IF_ERROR(end_round());
      next = 0;
      start_next_ns = now + kPauseNs;
    }
    const int64_t start_in_ns = next < endpoints_.size() ? start_next_ns - now : kNextAddressNs;
    std::vector<pollfd> entries;
    for (const Attempt& attempt : attempts_) {
      const bool sends = !attempt.connected || attempt.connection.has_queued();
      entries.push_back(
          {attempt.connection.fd(), static_cast<short>(sends ? POLLIN | POLLOUT : POLLIN), 0});
    }
    if (poll_slice(&entries, std::min(left_ns, start_in_ns), deadline_) < 0) {
      if (errno == EINTR) continue;
      return error(Code::kResource, name(request_.rank) + ": poll failed: " + std::strerror(errno));
    }
    // From behind, so that attempts can be taken out.
    for (size_t i = attempts_.size(); i-- > 0;) {
      if (entries[i].revents == 0 || !is_over(attempts_[i])) continue;
      if (host_.open()) return {};
      attempts_.erase(attempts_.begin() + static_cast<ptrdiff_t>(i));
      start_next_ns = now;
    }
  }
}

bool Guest::is_tried(size_t endpoint) const {
  return std::any_of(attempts_.begin(), attempts_.end(),
                     [&](const Attempt& attempt) { return attempt.endpoint == endpoint; });
}

// False when the address can be seen not to work.
Result<bool> Guest::begin_attempt(size_t index) {
  Endpoint& endpoint = endpoints_[index];
  endpoint.outcome = "no answer";
  endpoint.refused = false;
  UniqueFd socket(
      ::socket(endpoint.address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid())
    return error(Code::kResource, name(request_.rank) + " got no socket: " + std::strerror(errno) +
                                      "; raise its limit (ulimit -n)");
  if (::connect(socket.get(), endpoint.address.get(), endpoint.address.size) != 0 &&
      errno != EINPROGRESS) {
    endpoint.outcome = error_text(errno);
    endpoint.refused = true;
    return false;
  }
  attempts_.push_back({Connection(std::move(socket)), index, false});
  return true;
}

// Takes an attempt as far as it goes now. It is over when it has failed, and when it has become
// host_.
bool Guest::is_over(Attempt& attempt) {
  Endpoint& endpoint = endpoints_[attempt.endpoint];
  if (!attempt.connected) {
    int result = 0;
    socklen_t length = sizeof result;
    if (getsockopt(attempt.connection.fd(), SOL_SOCKET, SO_ERROR, &result, &length) != 0)
      result = errno;
    if (result != 0) {
      endpoint.outcome = error_text(result);
      endpoint.refused = result != ETIMEDOUT;
      return true;
    }
    // An event without an error means that it is connected.
    attempt.connected = true;
    endpoint.outcome = "connected, but it did not answer";
    Message hello = Message::about(MessageKind::kHello, request_.rank, request_.id);
    hello.text = token_;
    attempt.connection.queue(hello);
  }
  attempt.connection.flush();
  attempt.connection.receive();
  Message answer;
  if (attempt.connection.next(&answer)) {
    if (is_ours(answer, MessageKind::kWelcome)) {
      host_ = std::move(attempt.connection);
    } else {
      endpoint.outcome = "somebody else answered";
      endpoint.refused = true;
    }
    return true;
  }
  if (!attempt.connection.ended()) return false;
  endpoint.outcome = attempt.connection.error() == EPROTO ? "somebody else answered"
                                                          : error_text(attempt.connection.error());
  endpoint.refused = attempt.connection.error() == EPROTO;
  return true;
}

// All addresses have been tried.
Status Guest::end_round() {
  const bool refused = std::all_of(endpoints_.begin(), endpoints_.end(),
                                   [](const Endpoint& endpoint) { return endpoint.refused; });
  refused_rounds_ = refused ? refused_rounds_ + 1 : 0;
  if (refused_rounds_ < kRefusedRounds) return {};
  return unreachable(Code::kUnsupported, "cannot connect");
}

Status Guest::unreachable(Code code, const std::string& how) const {
  std::string tried;
  for (const Endpoint& endpoint : endpoints_)
    tried += (tried.empty() ? "" : ", ") + endpoint.text + " (" +
             (endpoint.outcome.empty() ? "not tried" : endpoint.outcome) + ")";
  return error(code, name(request_.rank) + " " + how + " to " + name(0) + " at " + tried +
                         "; see whether it runs, and let TCP through between the hosts");
}

Status Guest::await_start() {
  attempts_.clear();
  std::string missing = name(0) + " to say that all members are connected";
  TimeLeft time_left(deadline_);
  while (true) {
    host_.receive();
    Message message;
    if (host_.next(&message)) {
      if (is_ours(message, MessageKind::kStart)) return {};
      if (is_ours(message, MessageKind::kFail) && message.code != Code::kOk) {
        told_ = true;
        return message.status();
      }
      if (!is_ours(message, MessageKind::kMissing))
        return error(Code::kInternal, name(0) + " said something before all were connected");
      missing = message.text;
      continue;
    }
    if (host_.ended()) return ended_early(0);
    const int64_t left_ns = time_left.ns() + kVerdictNs;
    if (left_ns <= 0) return timed_out(missing);
    std::vector<pollfd> entries{{host_.fd(), POLLIN, 0}};
    if (poll_slice(&entries, left_ns, deadline_) < 0 && errno != EINTR)
      return error(Code::kResource, name(request_.rank) + ": poll failed: " + std::strerror(errno));
  }
}

// Over the connection when there is one: member 0 tells the others. Otherwise it looks in the
// store, but for a deadline that passes for all.
void Guest::tell(const Status& status) {
  if (told_ || exchange_.is_told()) return;
  if (!host_.open()) {
    if (status.code() != Code::kTimeout) static_cast<void>(exchange_.fail(status));
    return;
  }
  host_.queue(Message::about(MessageKind::kFail, request_.rank, request_.id, status));
  host_.flush();
  host_.hang_up();
}

}  // namespace

Result<std::vector<Connection>> meet(const TransportRequest& request, Store& store,
                                     const Deadline& deadline) {
  if (request.rank != 0) return Guest(request, store, deadline).run();
  return Host(request, store, deadline).run();
}

void decline_to_meet(const TransportRequest& request, Store& store, const Status& cause) {
  const Deadline deadline = Deadline::after(std::chrono::milliseconds(0));
  static_cast<void>(StoreExchange(store, exchange_request(request), deadline).fail(cause));
}

std::string name_member(const std::vector<TransportMember>& members, int rank) {
  const TransportMember& member = members[static_cast<size_t>(rank)];
  return "rank " + std::to_string(member.global_rank >= 0 ? member.global_rank : rank) + " (pid " +
         std::to_string(member.pid) + " on host " + member.host_name + ")";
}

}  // namespace dscomm
