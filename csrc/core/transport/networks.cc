#include "core/transport/networks.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <compare>
#include <cstring>
#include <map>
#include <set>
#include <tuple>

#include "core/base/format.h"

namespace dscomm {
namespace {

// In network byte order. IPv4 uses the first four bytes.
struct Address {
  bool is_v6 = false;
  std::array<uint8_t, 16> bytes{};

  int family() const { return is_v6 ? AF_INET6 : AF_INET; }
  size_t size() const { return is_v6 ? 16 : 4; }
  auto operator<=>(const Address&) const = default;
};

// An address, and how many of its leading bits are the network's.
struct Network {
  Address address;
  int prefix = 0;

  Network base() const {
    Network network = *this;
    for (size_t i = 0; i < address.bytes.size(); ++i) network.address.bytes[i] &= mask_byte(i);
    return network;
  }
  bool contains(const Address& other) const {
    if (other.is_v6 != address.is_v6) return false;
    for (size_t i = 0; i < address.size(); ++i)
      if (((address.bytes[i] ^ other.bytes[i]) & mask_byte(i)) != 0) return false;
    return true;
  }
  // 169.254.0.0/16. Link-local IPv6 is left out earlier: it means nothing without an interface.
  bool link_local() const {
    return !address.is_v6 && address.bytes[0] == 169 && address.bytes[1] == 254;
  }
  // Link-local last, IPv6 after IPv4, the most specific first, then by number.
  auto order() const { return std::make_tuple(link_local(), address.is_v6, -prefix, address); }
  bool operator<(const Network& other) const { return order() < other.order(); }

 private:
  uint8_t mask_byte(size_t i) const {
    const int bits = std::clamp(prefix - 8 * static_cast<int>(i), 0, 8);
    return static_cast<uint8_t>(0xff00 >> bits);
  }
};

std::string address_text(const Address& address) {
  char text[INET6_ADDRSTRLEN] = {};
  inet_ntop(address.family(), address.bytes.data(), text, sizeof text);
  return text;
}

std::optional<Address> parse_address(const std::string& text) {
  Address address;
  address.is_v6 = text.find(':') != std::string::npos;
  if (inet_pton(address.family(), text.c_str(), address.bytes.data()) != 1) return {};
  return address;
}

std::string text_of(const Network& network) {
  return format_text("{}/{}", address_text(network.address), network.prefix);
}

// Nothing if the text is not "address/prefix": other processes wrote it.
std::optional<Network> parse(const std::string& text) {
  const size_t slash = text.find('/');
  if (slash == std::string::npos) return {};
  const std::optional<Address> address = parse_address(text.substr(0, slash));
  if (!address) return {};
  int prefix = -1;
  const char* end = text.data() + text.size();
  auto [stop, error] = std::from_chars(text.data() + slash + 1, end, prefix);
  const int most = static_cast<int>(8 * address->size());
  if (error != std::errc() || stop != end || prefix < 0 || prefix > most) return {};
  return Network{*address, prefix};
}

std::vector<Network> networks_of(const TransportMember& member) {
  std::vector<Network> networks;
  for (const std::string& text : member.networks)
    if (std::optional<Network> network = parse(text)) networks.push_back(*network);
  return networks;
}

// By host, because the members of a host see the same interfaces, or each a part of them.
using HostAddresses = std::map<int, std::set<Address>>;

HostAddresses addresses_by_host(const std::vector<TransportMember>& members) {
  HostAddresses hosts;
  for (const TransportMember& member : members) {
    std::set<Address>& addresses = hosts[member.host];
    for (const Network& network : networks_of(member)) addresses.insert(network.address);
  }
  return hosts;
}

// How many hosts have an address in the network; nothing if two hosts have the same address.
std::optional<size_t> hosts_in(const Network& network, const HostAddresses& hosts) {
  std::set<Address> taken;
  size_t count = 0;
  for (const auto& [host, addresses] : hosts) {
    bool any = false;
    for (const Address& address : addresses) {
      if (!network.contains(address)) continue;
      any = true;
      if (!taken.insert(address).second) return {};
    }
    if (any) ++count;
  }
  return count;
}

// The networks that all hosts share.
std::set<Network> shared(const std::vector<TransportMember>& members) {
  const HostAddresses hosts = addresses_by_host(members);
  std::set<Network> candidates;
  for (const TransportMember& member : members)
    for (const Network& network : networks_of(member)) candidates.insert(network.base());
  std::erase_if(candidates, [&](const Network& candidate) {
    return hosts_in(candidate, hosts) != hosts.size();
  });
  return candidates;
}

std::vector<std::string> texts_of(const std::set<Network>& networks) {
  std::vector<std::string> texts;
  for (const Network& network : networks) texts.push_back(text_of(network));
  return texts;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> words;
  for (size_t start = 0; start <= text.size();) {
    size_t end = std::min(text.find(separator, start), text.size());
    if (end > start) words.push_back(text.substr(start, end - start));
    start = end + 1;
  }
  return words;
}

bool matches(const std::string& wanted, const Interface& interface) {
  if (wanted == interface.name) return true;
  std::optional<Network> network = parse(wanted), own = parse(interface.network);
  return network && own && network->contains(own->address);
}

// Interfaces that are up and connected.
std::vector<Interface> interfaces_here() {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) return {};
  std::vector<Interface> interfaces;
  for (const ifaddrs* entry = first; entry != nullptr; entry = entry->ifa_next) {
    // IFF_RUNNING: a bridge without ports and a card without a cable are up, but lead nowhere.
    constexpr unsigned kNeeded = IFF_UP | IFF_RUNNING;
    if (entry->ifa_addr == nullptr || entry->ifa_netmask == nullptr ||
        (entry->ifa_flags & kNeeded) != kNeeded)
      continue;
    Network network;
    const void* address = nullptr;
    const void* mask = nullptr;
    if (entry->ifa_addr->sa_family == AF_INET) {
      address = &reinterpret_cast<const sockaddr_in*>(entry->ifa_addr)->sin_addr;
      mask = &reinterpret_cast<const sockaddr_in*>(entry->ifa_netmask)->sin_addr;
    } else if (entry->ifa_addr->sa_family == AF_INET6) {
      const auto* of_v6 = reinterpret_cast<const sockaddr_in6*>(entry->ifa_addr);
      if (IN6_IS_ADDR_LINKLOCAL(&of_v6->sin6_addr)) continue;
      network.address.is_v6 = true;
      address = &of_v6->sin6_addr;
      mask = &reinterpret_cast<const sockaddr_in6*>(entry->ifa_netmask)->sin6_addr;
    } else {
      continue;
    }
    const size_t size = network.address.size();
    std::memcpy(network.address.bytes.data(), address, size);
    for (size_t i = 0; i < size; ++i)
      network.prefix += std::popcount(static_cast<const uint8_t*>(mask)[i]);
    // Further addresses of an interface have a label after its name: "eth0:1".
    std::string name = entry->ifa_name;
    interfaces.push_back(
        {name.substr(0, name.find(':')), text_of(network), (entry->ifa_flags & IFF_LOOPBACK) != 0});
  }
  freeifaddrs(first);
  return interfaces;
}

}  // namespace

std::vector<Interface> own_interfaces() {
  std::vector<Interface> interfaces = interfaces_here();
  std::erase_if(interfaces, [](const Interface& interface) { return interface.is_loopback; });
  return interfaces;
}

std::vector<std::string> own_addresses() {
  std::vector<std::string> addresses;
  for (const Interface& interface : interfaces_here())
    addresses.push_back(interface.network.substr(0, interface.network.find('/')));
  return addresses;
}

Result<std::vector<std::string>> select_networks(const std::vector<Interface>& interfaces,
                                                 const std::string& wanted) {
  const std::vector<std::string> words = split(wanted, ',');
  std::string there;
  for (const Interface& interface : interfaces)
    there += format_text("{}{} ({})", there.empty() ? "" : ", ", interface.name, interface.network);
  if (there.empty()) there = "none";
  for (const std::string& word : words)
    if (std::none_of(interfaces.begin(), interfaces.end(),
                     [&](const Interface& interface) { return matches(word, interface); }))
      return make_status(
          Code::kUnsupported,
          "DSCOMM_IFNAME: '{}' is neither the name of a usable interface nor the network of one; "
          "usable (up, connected, with an address, not loopback): {}",
          word, there);
  std::vector<std::string> selected;
  for (const Interface& interface : interfaces)
    if (words.empty() || std::any_of(words.begin(), words.end(), [&](const std::string& word) {
          return matches(word, interface);
        }))
      selected.push_back(interface.network);
  return selected;
}

std::vector<std::string> common_networks(const std::vector<TransportMember>& members) {
  return texts_of(shared(members));
}

std::vector<std::string> distinct_networks(const std::vector<TransportMember>& members, int own) {
  const HostAddresses hosts = addresses_by_host(members);
  std::set<Network> networks;
  for (const Network& network : networks_of(members[own]))
    if (hosts_in(network.base(), hosts)) networks.insert(network.base());
  return texts_of(networks);
}

std::vector<std::string> reachable_addresses(const std::vector<TransportMember>& members, int from,
                                             int to) {
  const TransportMember& source = members[from];
  const TransportMember& target = members[to];
  if (std::all_of(members.begin(), members.end(),
                  [&](const TransportMember& member) { return member.host == target.host; }))
    return {"127.0.0.1"};
  std::vector<Address> addresses;
  for (const Network& network : networks_of(target)) addresses.push_back(network.address);
  if (source.host != target.host) {
    // Addresses that the source also has would lead to its own host.
    for (const Network& own : networks_of(source)) std::erase(addresses, own.address);
    const std::set<Network> everybodys = shared(members), theirs = shared({source, target});
    auto rank_of = [](const std::set<Network>& networks, const Address& address) {
      auto found = std::find_if(networks.begin(), networks.end(),
                                [&](const Network& network) { return network.contains(address); });
      return std::distance(networks.begin(), found);
    };
    std::stable_sort(addresses.begin(), addresses.end(), [&](const Address& a, const Address& b) {
      return std::make_pair(rank_of(everybodys, a), rank_of(theirs, a)) <
             std::make_pair(rank_of(everybodys, b), rank_of(theirs, b));
    });
  }
  std::vector<std::string> texts;
  for (const Address& address : addresses) {
    std::string text = address_text(address);
    if (std::find(texts.begin(), texts.end(), text) == texts.end())
      texts.push_back(std::move(text));
  }
  return texts;
}

std::string endpoint_text(const std::string& address, uint16_t port) {
  const bool is_v6 = address.find(':') != std::string::npos;
  return is_v6 ? format_text("[{}]:{}", address, port) : format_text("{}:{}", address, port);
}

bool is_endpoint_at(const std::string& peer_process, const std::string& address) {
  const size_t colon = peer_process.rfind(':');
  return colon != std::string::npos &&
         peer_process.substr(0, colon) + ":0" == endpoint_text(address, 0);
}

std::optional<SocketAddress> socket_address(const std::string& address, uint16_t port) {
  const std::optional<Address> parsed = parse_address(address);
  if (!parsed) return {};
  SocketAddress result;
  if (parsed->is_v6) {
    auto* name = reinterpret_cast<sockaddr_in6*>(&result.storage);
    name->sin6_family = AF_INET6;
    name->sin6_port = htons(port);
    std::memcpy(&name->sin6_addr, parsed->bytes.data(), parsed->size());
    result.size = sizeof *name;
  } else {
    auto* name = reinterpret_cast<sockaddr_in*>(&result.storage);
    name->sin_family = AF_INET;
    name->sin_port = htons(port);
    std::memcpy(&name->sin_addr, parsed->bytes.data(), parsed->size());
    result.size = sizeof *name;
  }
  return result;
}

uint16_t port_of(const SocketAddress& address) {
  return ntohs(address.storage.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6*>(&address.storage)->sin6_port
                   : reinterpret_cast<const sockaddr_in*>(&address.storage)->sin_port);
}

}  // namespace dscomm
