#include "core/transport/networks.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <tuple>

namespace dscomm {
namespace {

// An address and how many of its leading bits are its network's. In the host's byte order.
struct Network {
  uint32_t address = 0;
  int prefix = 32;

  uint32_t mask() const { return prefix == 0 ? 0 : ~uint32_t{0} << (32 - prefix); }
  Network base() const { return {address & mask(), prefix}; }
  bool contains(uint32_t other) const { return ((address ^ other) & mask()) == 0; }
  bool link_local() const { return address >> 16 == (169u << 8 | 254u); }
  // Link-local last, the most specific first, then by number.
  auto order() const { return std::make_tuple(link_local(), -prefix, address); }
  bool operator<(const Network& other) const { return order() < other.order(); }
};

std::string address_text(uint32_t address) {
  in_addr network_order{htonl(address)};
  char text[INET_ADDRSTRLEN] = {};
  inet_ntop(AF_INET, &network_order, text, sizeof text);
  return text;
}

std::string text_of(const Network& network) {
  return address_text(network.address) + "/" + std::to_string(network.prefix);
}

// Nothing when it is not "address/prefix": other processes wrote it.
std::optional<Network> parse(const std::string& text) {
  size_t slash = text.find('/');
  if (slash == std::string::npos) return {};
  in_addr address;
  if (inet_pton(AF_INET, text.substr(0, slash).c_str(), &address) != 1) return {};
  int prefix = -1;
  const char* end = text.data() + text.size();
  auto [stop, error] = std::from_chars(text.data() + slash + 1, end, prefix);
  if (error != std::errc() || stop != end || prefix < 0 || prefix > 32) return {};
  return Network{ntohl(address.s_addr), prefix};
}

std::vector<Network> networks_of(const TransportMember& member) {
  std::vector<Network> networks;
  for (const std::string& text : member.networks)
    if (std::optional<Network> network = parse(text)) networks.push_back(*network);
  return networks;
}

// By host: members of one host see the same interfaces, or each a part of them.
using HostAddresses = std::map<int, std::set<uint32_t>>;

HostAddresses addresses_by_host(const std::vector<const TransportMember*>& members) {
  HostAddresses hosts;
  for (const TransportMember* member : members) {
    std::set<uint32_t>& addresses = hosts[member->host];
    for (const Network& network : networks_of(*member)) addresses.insert(network.address);
  }
  return hosts;
}

// How many hosts have an address in the network; nothing if two of them have the same one.
std::optional<size_t> hosts_in(const Network& network, const HostAddresses& hosts) {
  std::set<uint32_t> taken;
  size_t count = 0;
  for (const auto& [host, addresses] : hosts) {
    bool any = false;
    for (uint32_t address : addresses) {
      if (!network.contains(address)) continue;
      any = true;
      if (!taken.insert(address).second) return {};
    }
    if (any) ++count;
  }
  return count;
}

// The networks that the hosts share, in order.
std::set<Network> shared(const std::vector<const TransportMember*>& members) {
  const HostAddresses hosts = addresses_by_host(members);
  std::set<Network> candidates;
  for (const TransportMember* member : members)
    for (const Network& network : networks_of(*member)) candidates.insert(network.base());
  std::erase_if(candidates, [&](const Network& candidate) {
    return hosts_in(candidate, hosts) != hosts.size();
  });
  return candidates;
}

std::vector<const TransportMember*> pointers_to(const std::vector<TransportMember>& members) {
  std::vector<const TransportMember*> pointers;
  for (const TransportMember& member : members) pointers.push_back(&member);
  return pointers;
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

}  // namespace

std::vector<Interface> own_interfaces() {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) return {};
  std::vector<Interface> interfaces;
  for (const ifaddrs* entry = first; entry != nullptr; entry = entry->ifa_next) {
    // Running: a bridge without ports and a card without a cable are up, but lead nowhere.
    constexpr unsigned kNeeded = IFF_UP | IFF_RUNNING;
    if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != AF_INET ||
        entry->ifa_netmask == nullptr || (entry->ifa_flags & kNeeded) != kNeeded ||
        (entry->ifa_flags & IFF_LOOPBACK) != 0)
      continue;
    auto* address = reinterpret_cast<const sockaddr_in*>(entry->ifa_addr);
    auto* mask = reinterpret_cast<const sockaddr_in*>(entry->ifa_netmask);
    Network network{ntohl(address->sin_addr.s_addr), std::popcount(mask->sin_addr.s_addr)};
    // A second address has a label behind the name: "eth0:1".
    std::string name = entry->ifa_name;
    interfaces.push_back({name.substr(0, name.find(':')), text_of(network)});
  }
  freeifaddrs(first);
  return interfaces;
}

std::vector<std::string> own_networks() {
  std::vector<std::string> networks;
  for (Interface& interface : own_interfaces()) networks.push_back(std::move(interface.network));
  return networks;
}

Result<std::vector<std::string>> select_networks(const std::vector<Interface>& interfaces,
                                                 const std::string& wanted) {
  const std::vector<std::string> words = split(wanted, ',');
  std::string there;
  for (const Interface& interface : interfaces)
    there += (there.empty() ? "" : ", ") + interface.name + " (" + interface.network + ")";
  if (there.empty()) there = "none";
  for (const std::string& word : words)
    if (std::none_of(interfaces.begin(), interfaces.end(),
                     [&](const Interface& interface) { return matches(word, interface); }))
      return Status(
          Code::kInvalidArgument,
          "'" + word + "' is neither the name of an interface that is up nor a network " +
              "in which one has an address; those that are up and not loopback: " + there);
  std::vector<std::string> selected;
  for (const Interface& interface : interfaces)
    if (words.empty() || std::any_of(words.begin(), words.end(), [&](const std::string& word) {
          return matches(word, interface);
        }))
      selected.push_back(interface.network);
  return selected;
}

std::vector<std::string> common_networks(const std::vector<TransportMember>& members) {
  return texts_of(shared(pointers_to(members)));
}

std::vector<std::string> distinct_networks(const std::vector<TransportMember>& members, int own) {
  const HostAddresses hosts = addresses_by_host(pointers_to(members));
  std::set<Network> networks;
  for (const Network& network : networks_of(members[static_cast<size_t>(own)]))
    if (hosts_in(network.base(), hosts)) networks.insert(network.base());
  return texts_of(networks);
}

std::vector<std::string> reachable_addresses(const std::vector<TransportMember>& members, int from,
                                             int to) {
  const TransportMember& source = members[static_cast<size_t>(from)];
  const TransportMember& target = members[static_cast<size_t>(to)];
  if (std::all_of(members.begin(), members.end(),
                  [&](const TransportMember& member) { return member.host == target.host; }))
    return {"127.0.0.1"};
  std::vector<uint32_t> addresses;
  for (const Network& network : networks_of(target)) addresses.push_back(network.address);
  if (source.host != target.host) {
    // Those would lead to the source's own host.
    for (const Network& own : networks_of(source)) std::erase(addresses, own.address);
    const std::set<Network> everybodys = shared(pointers_to(members)),
                            theirs = shared({&source, &target});
    auto rank_of = [](const std::set<Network>& networks, uint32_t address) {
      auto found = std::find_if(networks.begin(), networks.end(),
                                [&](const Network& network) { return network.contains(address); });
      return std::distance(networks.begin(), found);
    };
    std::stable_sort(addresses.begin(), addresses.end(), [&](uint32_t a, uint32_t b) {
      return std::make_pair(rank_of(everybodys, a), rank_of(theirs, a)) <
             std::make_pair(rank_of(everybodys, b), rank_of(theirs, b));
    });
  }
  std::vector<std::string> texts;
  for (uint32_t address : addresses) {
    std::string text = address_text(address);
    if (std::find(texts.begin(), texts.end(), text) == texts.end())
      texts.push_back(std::move(text));
  }
  return texts;
}

}  // namespace dscomm
