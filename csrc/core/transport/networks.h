// The addresses at which a process can be reached, and the networks that hosts share. Members
// publish "address/prefix" of IPv4 or IPv6, without link-local addresses of IPv6.
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

// Interfaces that are up and connected, without loopback, in the kernel's order.
std::vector<Interface> own_interfaces();

// All addresses from which processes of this network namespace may connect, loopback included.
std::vector<std::string> own_addresses();

// The networks that a user allows, as "address/prefix", in the order of `interfaces`. `wanted` is
// DSCOMM_IFNAME: interfaces ("eth0") and networks ("10.0.0.0/16"), separated by commas; empty
// allows all. kUnsupported, with the available interfaces, if an entry of `wanted` matches none.
Result<std::vector<std::string>> select_networks(const std::vector<Interface>& interfaces,
                                                 const std::string& wanted);

// The networks, as "network/prefix", in which every host has an address and no two hosts have the
// same one. (A bridge of containers has the same address on every host, and leads nowhere.) The
// order: IPv4 first, then the most specific, then by number; link-local (169.254.0.0/16) last.
// Depends only on `members`, because all members must agree on it.
std::vector<std::string> common_networks(const std::vector<TransportMember>& members);

// For hosts without common networks, which routers may connect: the networks of member `own` in
// which no two hosts have the same address. In the form and the order of common_networks().
std::vector<std::string> distinct_networks(const std::vector<TransportMember>& members, int own);

// Addresses at which member `from` may reach member `to`, the best first: in networks that all
// hosts share, then in those that the hosts of these two share, then the rest. Addresses that both
// members have are left out, unless they are on one host. 127.0.0.1 if all members are on one host.
std::vector<std::string> reachable_addresses(const std::vector<TransportMember>& members, int from,
                                             int to);

// "10.0.0.1:4444", "[fd00::1]:4444".
std::string endpoint_text(const std::string& address, uint16_t port);
// Whether the endpoint `peer_process` is at `address`; its port does not matter.
bool is_endpoint_at(const std::string& peer_process, const std::string& address);

// An address for the socket calls.
struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
};
// Nothing if `address` is invalid.
std::optional<SocketAddress> socket_address(const std::string& address, uint16_t port);
uint16_t port_of(const SocketAddress& address);

}  // namespace dscomm
