// At which addresses a process can be reached, and which networks all hosts of a transport share.
// What a member says of itself is "address/prefix", of IPv4 or IPv6; link-local addresses of IPv6
// are left out.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/transport/transport.h"

namespace dscomm {

// An interface of this network namespace with one of its addresses.
struct Interface {
  std::string name;     // "eth0"
  std::string network;  // "10.0.0.7/24"
  bool is_loopback = false;
};

// Those that are up and connected, loopback left out, in the kernel's order.
std::vector<Interface> own_interfaces();

// All addresses of this network namespace, those of loopback too: from which its processes may
// come.
std::vector<std::string> own_addresses();

// The networks of own_interfaces() alone: "address/prefix".
std::vector<std::string> own_networks();

// What a user allows: `wanted` names interfaces ("eth0") and networks ("10.0.0.0/16"), separated by
// commas; empty allows all. The networks of `interfaces` that are named, in the order of
// `interfaces`. kInvalidArgument says what there is when a name matches none.
Result<std::vector<std::string>> select_networks(const std::vector<Interface>& interfaces,
                                                 const std::string& wanted);

// The networks, as "network/prefix", in which every host has an address and no two hosts have the
// same one: a bridge of containers has the same address on every host and leads nowhere. Those of
// IPv4 first; of these the most specific, then by number; and link-local ones (169.254.0.0/16)
// after all others. Members must agree on it, so it depends on nothing but `members`.
std::vector<std::string> common_networks(const std::vector<TransportMember>& members);

// The networks of member `own`, as "network/prefix", in which no two hosts have the same address,
// in the order of common_networks(). Routers may join them to the networks of other hosts.
std::vector<std::string> distinct_networks(const std::vector<TransportMember>& members, int own);

// Where member `from` may try to reach member `to`, the most promising first: addresses in networks
// that all hosts share, then in those that these two share, then the rest. Addresses that both have
// are left out, unless the two are on one host. 127.0.0.1 where all members are on one host.
std::vector<std::string> reachable_addresses(const std::vector<TransportMember>& members, int from,
                                             int to);

// "10.0.0.1:4444", "[fd00::1]:4444".
std::string endpoint_text(const std::string& address, uint16_t port);
// Whether an endpoint is at that address, whatever its port.
bool is_endpoint_at(const std::string& endpoint, const std::string& address);

// What the socket calls take.
struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
};
// Nothing where `address` is none.
std::optional<SocketAddress> socket_address(const std::string& address, uint16_t port);
uint16_t port_of(const SocketAddress& address);

}  // namespace dscomm
