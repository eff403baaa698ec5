#include "core/detector/listener.h"

#include <sys/random.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "core/base/deadline.h"
#include "core/base/format.h"
#include "core/base/log.h"
#include "core/transport/members.h"
#include "core/transport/networks.h"

namespace dscomm {
namespace {

// kHelloNs: how long a connection may stay unidentified. kStrangers: how many more connections than
// expected may be unidentified at a time.
constexpr int64_t kHelloNs = 10'000'000'000;
constexpr size_t kStrangers = 64;
// The most connections that are accepted before the members are polled again.
constexpr int kAcceptedAtOnce = 256;
// The longest endpoint, " [address]:port" of IPv6, and the blank after the token.
constexpr size_t kEndpointBytes = 1 + 1 + 39 + 1 + 1 + 5 + 1;

}  // namespace

std::string Listener::own_name() const { return name_member(request_.members, request_.rank); }

Status Listener::open() {
  uint64_t token[2];
  if (getrandom(token, sizeof token, 0) != static_cast<ssize_t>(sizeof token))
    return Status(Code::kResource, own_name() + " got no random numbers: " + std::strerror(errno));
  token_ = format_text("{:016x}{:016x}", token[0], token[1]);
  Status last(Code::kUnsupported, own_name() +
                                      " has no network at which other hosts could reach "
                                      "it: no interface but loopback is up and has an address");
  if (auto allowed = select_networks(own_interfaces(), request_.settings.ifname); !allowed.ok())
    last = Status(allowed.status().code(), own_name() + ": " + allowed.status().message());
  for (const std::string& address :
       reachable_addresses(request_.members, request_.rank, request_.rank))
    if (Status status = listen_at(address); !status.ok()) last = status;
  if (listeners_.empty()) return last;
  log_line(LogLevel::kDebug, "listening for other members of '{}' at {}", request_.name,
           endpoints_);
  return {};
}

Message Listener::invitation() const {
  Message invitation = Message::about(MessageKind::kInvitation, request_.rank, request_.id);
  invitation.text = token_ + " " + endpoints_;
  return invitation;
}

Status Listener::listen_at(const std::string& address) {
  // All endpoints must fit into one message.
  if (endpoints_.size() + token_.size() + kEndpointBytes > kMessageTextBytes) return {};
  auto failed = [&](const char* what) {
    return make_status(Code::kResource, "{} cannot listen at {}: {}: {}", own_name(), address, what,
                       std::strerror(errno));
  };
  const PortRange ports = parse_ports(request_.settings.ports).value_or(PortRange{});
  std::optional<SocketAddress> name = socket_address(address, ports.first);
  if (!name) return Status(Code::kInternal, "'" + address + "' is no address");
  UniqueFd listener;
  for (int port = ports.first;; ++port) {
    listener =
        UniqueFd(socket(name->storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!listener.valid()) return failed("no socket (if too many files are open, raise ulimit -n)");
    // Allows a port that connections of an ended job keep busy for a minute. With this option two
    // ranks may bind the same port; listen() then fails on the second one, which tries the next.
    const int on = 1;
    (void)setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listener.get(), name->get(), name->size) == 0 &&
        listen(listener.get(), SOMAXCONN) == 0)
      break;
    if (errno != EADDRINUSE || ports.is_any()) return failed("bind and listen");
    if (port >= ports.last)
      return failed(("no port of DSCOMM_PORTS=" + request_.settings.ports + " is free").c_str());
    name = socket_address(address, static_cast<uint16_t>(port + 1));
  }
  if (getsockname(listener.get(), name->get(), &name->size) != 0) return failed("getsockname");
  if (!endpoints_.empty()) endpoints_ += " ";
  endpoints_ += endpoint_text(address, port_of(*name));
  listeners_.push_back(std::move(listener));
  return {};
}

void Listener::add_to(std::vector<pollfd>* entries) const {
  for (const PendingConnection& arrival : pending_)
    entries->push_back({arrival.connection.fd(), POLLIN, 0});
  for (const UniqueFd& listener : listeners_) entries->push_back({listener.get(), POLLIN, 0});
}

Status Listener::handle(std::span<const pollfd> entries, const Admit& admit) {
  const pollfd* entry = entries.data();
  const int64_t now = monotonic_ns();
  std::erase_if(pending_, [&](PendingConnection& arrival) {
    if ((entry++)->revents == 0) return now - arrival.since_ns > kHelloNs;
    arrival.connection.receive();
    return is_settled(&arrival.connection, admit) || arrival.connection.ended();
  });
  for (const UniqueFd& listener : listeners_)
    if ((entry++)->revents != 0) DSCOMM_RETURN_IF_ERROR(accept_from(listener.get()));
  return {};
}

Status Listener::accept_from(int listener) {
  for (int i = 0; i < kAcceptedAtOnce; ++i) {
    UniqueFd socket(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.valid()) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)
        return make_status(Code::kResource,
                           "{} cannot take the connections of {} other ranks: {}; if it has too "
                           "many open files, raise its limit (ulimit -n)",
                           own_name(), expected_, std::strerror(errno));
      return {};  // no connection is waiting
    }
    // Drops the oldest. If it came from a member, the member tries again.
    if (pending_.size() >= expected_ + kStrangers) pending_.erase(pending_.begin());
    pending_.push_back({Connection(std::move(socket)), monotonic_ns()});
  }
  return {};
}

// Whether the peer was admitted or rejected, and so leaves pending_.
bool Listener::is_settled(Connection* connection, const Admit& admit) {
  Message hello;
  if (!connection->next(&hello)) return false;
  if (hello.kind == MessageKind::kHello && hello.id == request_.id && hello.text == token_)
    admit(hello.rank, std::move(*connection));
  if (connection->open()) log_line(LogLevel::kInfo, "a stranger connected, and was turned away");
  return true;
}

}  // namespace dscomm
