#include "core/detector/connector.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <sstream>

#include "core/base/deadline.h"
#include "core/base/format.h"
#include "core/base/packer.h"
#include "core/transport/members.h"

namespace dscomm {
namespace {

// A firewall may drop packets without an answer, so the next address is tried in parallel after
// this time (RFC 8305 recommends 250 ms).
constexpr int64_t kNextAddressNs = 250 * kMs;
// The pause between rounds over all addresses. A member listens before it publishes its addresses,
// so an address that refuses in ten rounds (two seconds) will never accept.
constexpr int64_t kPauseNs = 200 * kMs;

std::string error_text(int error) {
  return error == 0 ? "it closed the connection" : std::strerror(error);
}

}  // namespace

std::string Connector::name() const { return name_member(request_.members, rank_); }
std::string Connector::own_name() const { return name_member(request_.members, request_.rank); }

Status Connector::read(const std::string& bytes) {
  Message invitation;
  if (!decode(bytes, &invitation) || invitation.id != request_.id ||
      invitation.kind != MessageKind::kInvitation)
    return malformed_value("invitation of " + name());
  std::istringstream words(invitation.text);
  words >> token_;
  const std::vector<std::string> offered{std::istream_iterator<std::string>(words),
                                         std::istream_iterator<std::string>()};
  for (const std::string& address : reachable_addresses(request_.members, request_.rank, rank_))
    for (const std::string& endpoint : offered)
      if (is_endpoint_at(endpoint, address)) add_endpoint(endpoint, address);
  if (!endpoints_.empty()) return {};
  return make_status(Code::kUnsupported,
                     "{} listens at {}, and cannot be reached there from {}: both hosts have these "
                     "addresses; name the network that joins them in DSCOMM_IFNAME",
                     name(),
                     invitation.text.substr(std::min(token_.size() + 1, invitation.text.size())),
                     own_name());
}

void Connector::add_endpoint(const std::string& text, const std::string& address) {
  const int port = std::atoi(text.c_str() + text.rfind(':') + 1);
  if (port <= 0 || port > 65535) return;
  const std::optional<SocketAddress> there = socket_address(address, static_cast<uint16_t>(port));
  if (!there) return;
  Endpoint endpoint;
  endpoint.address = *there;
  endpoint.text = text;
  endpoints_.push_back(std::move(endpoint));
}

Status Connector::begin() {
  while (true) {
    const int64_t now = monotonic_ns();
    while (next_ < endpoints_.size() && is_tried(next_)) ++next_;
    if (next_ < endpoints_.size()) {
      if (now < start_next_ns_) return {};
      DSCOMM_ASSIGN_OR_RETURN(bool begun, begin_attempt(next_++));
      start_next_ns_ = begun ? now + kNextAddressNs : now;
      continue;
    }
    const bool is_connecting =
        std::any_of(attempts_.begin(), attempts_.end(),
                    [](const Attempt& attempt) { return !attempt.connected; });
    // A connected address may never answer, so the others are tried again in parallel.
    if (is_connecting || attempts_.size() == endpoints_.size()) return {};
    DSCOMM_RETURN_IF_ERROR(end_round());
    next_ = 0;
    start_next_ns_ = now + kPauseNs;
  }
}

int64_t Connector::next_attempt_ns() const {
  return next_ < endpoints_.size() ? start_next_ns_ : monotonic_ns() + kNextAddressNs;
}

void Connector::add_to(std::vector<pollfd>* entries) const {
  for (const Attempt& attempt : attempts_) {
    const bool sends = !attempt.connected || attempt.connection.has_queued();
    entries->push_back(
        {attempt.connection.fd(), static_cast<short>(sends ? POLLIN | POLLOUT : POLLIN), 0});
  }
}

bool Connector::handle(std::span<const pollfd> entries) {
  // Backwards, because attempts are erased.
  for (size_t i = attempts_.size(); i-- > 0;) {
    if (entries[i].revents == 0 || !is_over(attempts_[i])) continue;
    if (connection_.open()) {
      attempts_.clear();
      return true;
    }
    attempts_.erase(attempts_.begin() + static_cast<ptrdiff_t>(i));
    start_next_ns_ = monotonic_ns();
  }
  return false;
}

void Connector::hang_up(const Message& last_message) {
  for (Attempt& attempt : attempts_) {
    if (attempt.connected) attempt.connection.queue(last_message);
    attempt.connection.flush();
    attempt.connection.hang_up();
  }
  attempts_.clear();
}

bool Connector::is_tried(size_t endpoint) const {
  return std::any_of(attempts_.begin(), attempts_.end(),
                     [&](const Attempt& attempt) { return attempt.endpoint == endpoint; });
}

// False if connect() failed at once, so the next address need not wait.
Result<bool> Connector::begin_attempt(size_t index) {
  Endpoint& endpoint = endpoints_[index];
  endpoint.outcome = "no answer";
  endpoint.refused = false;
  UniqueFd socket(
      ::socket(endpoint.address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid())
    return make_status(
        Code::kResource,
        "{} cannot open a socket: {}; if it has too many open files, raise its limit (ulimit -n)",
        own_name(), std::strerror(errno));
  if (::connect(socket.get(), endpoint.address.get(), endpoint.address.size) != 0 &&
      errno != EINPROGRESS) {
    endpoint.outcome = error_text(errno);
    endpoint.refused = true;
    return false;
  }
  attempts_.push_back({Connection(std::move(socket)), index, false});
  return true;
}

// Advances an attempt. Returns whether it is over: it has failed, or has become connection_.
bool Connector::is_over(Attempt& attempt) {
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
    // An event without an error means that the socket is connected.
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
    if (answer.kind == MessageKind::kWelcome && answer.id == request_.id) {
      connection_ = std::move(attempt.connection);
    } else {
      endpoint.outcome = "another service answered";
      endpoint.refused = true;
    }
    return true;
  }
  if (!attempt.connection.ended()) return false;
  endpoint.outcome = attempt.connection.error() == EPROTO ? "another service answered"
                                                          : error_text(attempt.connection.error());
  endpoint.refused = attempt.connection.error() == EPROTO;
  return true;
}

// Call after all addresses have been tried.
Status Connector::end_round() {
  const bool refused = std::all_of(endpoints_.begin(), endpoints_.end(),
                                   [](const Endpoint& endpoint) { return endpoint.refused; });
  refused_rounds_ = refused ? refused_rounds_ + 1 : 0;
  if (refused_rounds_ < refusals_) return {};
  return unreachable(Code::kUnsupported, "cannot connect");
}

Status Connector::unreachable(Code code, const std::string& how) const {
  std::string tried;
  for (const Endpoint& endpoint : endpoints_)
    tried += format_text("{}{} ({})", tried.empty() ? "" : ", ", endpoint.text,
                         endpoint.outcome.empty() ? "not tried" : endpoint.outcome);
  return make_status(code,
                     "{} {} to {} at {}; see whether {} runs, and let TCP through "
                     "between the hosts",
                     own_name(), how, name(), tried, name());
}

}  // namespace dscomm
