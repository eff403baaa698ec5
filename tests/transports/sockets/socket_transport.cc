// SocketTransport: a Transport over TCP, and the module that load_transport() finds by its name. It
// needs no library, so it has no libdscomm_sockets.txt. It carries no messages, and trusts all that
// can connect.
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <cstring>
#include <memory>
#include <utility>

#include "core/base/log.h"
#include "core/detector/tcp_failure_detector.h"
#include "core/transport/load.h"
#include "core/transport/members.h"
#include "core/transport/networks.h"
#include "socket_team.h"

namespace dscomm {
namespace {

constexpr int kSliceMs = 5;

// The first bytes of a connection.
struct Greeting {
  uint64_t transport_id = 0, team_id = 0, rank = 0;
};

class SocketTransport final : public Transport {
 public:
  static Result<std::shared_ptr<Transport>> make(const TransportRequest& request,
                                                 std::shared_ptr<Store> store,
                                                 const Deadline& deadline, const std::string&) {
    set_log_level(request.settings.debug);  // the module has its own copy of the core
    DSCOMM_ASSIGN_OR_RETURN(std::unique_ptr<TcpFailureDetector> detector,
                            TcpFailureDetector::connect(request, *store, deadline));
    return std::shared_ptr<Transport>(
        new SocketTransport(request, std::move(store), std::move(detector)));
  }

  int rank_of(const ArenaId& id) const override {
    for (size_t rank = 0; rank < request_.members.size(); ++rank)
      if (request_.members[rank].id == id) return static_cast<int>(rank);
    return -1;
  }

  Result<std::unique_ptr<Team>> make_team(const TransportTeam& team,
                                          const Deadline& deadline) override {
    Made made;
    const Status status = connect_all(team, deadline, &made);
    if (status.ok())
      return std::unique_ptr<Team>(std::make_unique<SocketTeam>(
          *detector_, team.id, team.name, made.rank, std::move(made.members)));
    detector_->end(team.id, status);
    return Status(status.code(), "connecting group '" + team.name + "': " + status.message());
  }

  std::shared_ptr<PeerProcess> peer_process(int rank) override {
    return std::make_shared<SocketPeerProcess>(*this, rank);
  }
  FailureDetector& detector() override { return *detector_; }
  void tolerate_silence(std::chrono::milliseconds timeout) override {
    detector_->tolerate_silence(timeout);
  }
  void leave(bool) override { detector_->leave(); }
  void close_descriptors() override { detector_->close_descriptors(); }

 private:
  struct Made {
    int rank = 0;
    std::vector<SocketTeamMember> members;
  };

  // Refuses every message.
  class NoChannel final : public CellChannel {
   public:
    Status open(size_t, uint64_t) override {
      return Status(Code::kUnsupported, "sockets carry no messages between hosts");
    }
    size_t cell_bytes(uint64_t) const override { return 1; }
    std::byte* vacant_cell(size_t) override { return nullptr; }
    bool publish(const CellHeader&, bool) override { return false; }
    Result<std::optional<ArrivedCell>> next_cell() override { return std::optional<ArrivedCell>(); }
    bool consume(bool) override { return false; }
    bool in_flight() override { return false; }
    void drop() override {}
  };

  class SocketPeerProcess final : public PeerProcess {
   public:
    SocketPeerProcess(const SocketTransport& transport, int rank)
        : transport_(transport), rank_(rank) {}
    const ArenaId& id() const override { return member().id; }
    bool alive(bool) const override {
      return transport_.detector_->gone(rank_).code() != Code::kPeerDied;
    }
    std::string describe() const override {
      return "pid " + std::to_string(member().pid) + " on host " + member().host_name;
    }
    std::string state_text() const override { return alive(false) ? "on another host" : "gone"; }
    const ArenaId* doorbell() const override { return nullptr; }
    bool sleeps() const override { return false; }
    std::unique_ptr<CellChannel> make_channel(const std::shared_ptr<Arena>&,
                                              ChannelDirectory&) override {
      return std::make_unique<NoChannel>();
    }

   private:
    const TransportMember& member() const {
      return transport_.request_.members[static_cast<size_t>(rank_)];
    }
    const SocketTransport& transport_;
    const int rank_;
  };

  SocketTransport(const TransportRequest& request, std::shared_ptr<Store> store,
                  std::unique_ptr<TcpFailureDetector> detector)
      : request_(request), store_(std::move(store)), detector_(std::move(detector)) {}

  std::string key_of(const TransportTeam& team, int rank) const {
    return request_.prefix + "sockets/" + std::to_string(team.id) + "/" + std::to_string(rank);
  }

  // Each member listens for those after it in the Team, and connects to those before it.
  Status connect_all(const TransportTeam& team, const Deadline& deadline, Made* made) {
    for (size_t k = 0; k < team.ranks.size(); ++k) {
      if (team.ranks[k] == request_.rank) made->rank = static_cast<int>(k);
      made->members.push_back({team.ranks[k], name_member(request_.members, team.ranks[k]), {}});
    }
    UniqueFd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    SocketAddress own = *socket_address("0.0.0.0", 0);
    if (!listener.valid() || bind(listener.get(), own.get(), own.size) != 0 ||
        listen(listener.get(), SOMAXCONN) != 0 ||
        getsockname(listener.get(), own.get(), &own.size) != 0)
      return system_error("listening");
    const std::string key = key_of(team, request_.rank);
    DSCOMM_RETURN_IF_ERROR(store_->set(key, std::to_string(port_of(own))));
    const auto own_rank = static_cast<size_t>(made->rank);
    for (size_t k = 0; k < own_rank; ++k)
      DSCOMM_RETURN_IF_ERROR(connect_to(team, deadline, &made->members[k]));
    for (size_t missing = made->members.size() - own_rank - 1; missing > 0; --missing)
      DSCOMM_RETURN_IF_ERROR(accept_one(listener.get(), team, deadline, made));
    return store_->remove(key);  // all that read it have connected
  }

  Status connect_to(const TransportTeam& team, const Deadline& deadline, SocketTeamMember* member) {
    std::optional<std::string> port;
    while (!port) {
      DSCOMM_RETURN_IF_ERROR(check_connection(team, deadline, *member));
      DSCOMM_ASSIGN_OR_RETURN(port, store_->find(key_of(team, member->transport_rank)));
      if (!port) deadline.nap(kSliceMs * kMs);
    }
    const auto number = static_cast<uint16_t>(std::stoi(*port));
    for (const std::string& address :
         reachable_addresses(request_.members, request_.rank, member->transport_rank)) {
      const std::optional<SocketAddress> peer = socket_address(address, number);
      if (!peer || peer->get()->sa_family != AF_INET) continue;
      UniqueFd made(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
      set_limit(made.get(), deadline);
      const Greeting greeting{request_.id, team.id, static_cast<uint64_t>(request_.rank)};
      if (connect(made.get(), peer->get(), peer->size) == 0 &&
          send(made.get(), &greeting, sizeof greeting, MSG_NOSIGNAL) == sizeof greeting) {
        member->socket = std::move(made);
        return {};
      }
    }
    DSCOMM_RETURN_IF_ERROR(check_connection(team, deadline, *member));
    return Status(Code::kUnsupported, member->name + " cannot be reached by TCP over IPv4");
  }

  Status accept_one(int listener, const TransportTeam& team, const Deadline& deadline, Made* made) {
    while (true) {
      for (size_t k = static_cast<size_t>(made->rank) + 1; k < made->members.size(); ++k)
        if (!made->members[k].socket.valid())
          DSCOMM_RETURN_IF_ERROR(check_connection(team, deadline, made->members[k]));
      pollfd polled{listener, POLLIN, 0};
      if (poll(&polled, 1, kSliceMs) <= 0) continue;
      UniqueFd socket(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
      set_limit(socket.get(), deadline);
      Greeting greeting;
      if (recv(socket.get(), &greeting, sizeof greeting, MSG_WAITALL) != sizeof greeting ||
          greeting.transport_id != request_.id || greeting.team_id != team.id)
        continue;  // a stranger
      for (SocketTeamMember& member : made->members)
        if (static_cast<uint64_t>(member.transport_rank) == greeting.rank) {
          member.socket = std::move(socket);
          return {};
        }
    }
  }

  // Why the connection with this member cannot be made, as far as is known.
  Status check_connection(const TransportTeam& team, const Deadline& deadline,
                          const SocketTeamMember& member) {
    DSCOMM_RETURN_IF_ERROR(detector_->ended(team.id, 0));
    DSCOMM_RETURN_IF_ERROR(detector_->gone(member.transport_rank));
    if (!deadline.expired()) return {};
    return Status(Code::kTimeout, "timed out after " + deadline.timeout_text() + " waiting for " +
                                      member.name + " to connect");
  }

  // Bounds the blocking calls of a connection that is being made.
  static void set_limit(int socket, const Deadline& deadline) {
    const int64_t left_us = std::max<int64_t>(deadline.remaining_ns() / 1000, 1);
    const timeval limit{static_cast<time_t>(left_us / 1'000'000),
                        static_cast<suseconds_t>(left_us % 1'000'000)};
    setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  }

  const TransportRequest request_;
  const std::shared_ptr<Store> store_;
  const std::unique_ptr<TcpFailureDetector> detector_;
};

}  // namespace
}  // namespace dscomm

extern "C" __attribute__((visibility("default")))
const dscomm::TransportModule dscomm_transport_module = {dscomm::kTransportVersion,
                                                         &dscomm::SocketTransport::make};
