#include "core/transport/networks.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace dscomm::test {
namespace {

using Texts = std::vector<std::string>;

TransportMember on_host(int host, Texts networks) {
  TransportMember member;
  member.host = host;
  member.networks = std::move(networks);
  return member;
}

TEST(Networks, OwnNetworksHavePrefixAndNoLoopback) {
  for (const auto& [name, network, is_loopback] : own_interfaces()) {
    EXPECT_FALSE(is_loopback) << name;
    EXPECT_NE(network.find('/'), std::string::npos) << network;
    EXPECT_FALSE(network.starts_with("127.")) << network;
    // It can read its own output.
    EXPECT_EQ(common_networks({on_host(0, {network})}).size(), 1u) << network;
  }
}

TEST(Networks, OwnAddressesIncludeLoopback) {
  const Texts addresses = own_addresses();
  EXPECT_NE(std::find(addresses.begin(), addresses.end(), "127.0.0.1"), addresses.end());
  for (const Interface& interface : own_interfaces()) {
    const std::string address = interface.network.substr(0, interface.network.find('/'));
    EXPECT_NE(std::find(addresses.begin(), addresses.end(), address), addresses.end()) << address;
  }
}

TEST(Networks, BridgeWithSameAddressOnAllHostsIsNotCommon) {
  EXPECT_EQ(common_networks({on_host(0, {"172.17.0.1/16", "10.77.0.1/24"}),
                             on_host(1, {"172.17.0.1/16", "10.77.0.2/24"})}),
            Texts{"10.77.0.0/24"});
}

TEST(Networks, CommonNetworkNeedsAnAddressOfEachHost) {
  EXPECT_EQ(
      common_networks({on_host(0, {"10.0.0.1/24", "10.1.0.1/24"}),
                       on_host(1, {"10.0.0.2/24", "10.1.0.2/24"}), on_host(2, {"10.0.0.3/24"})}),
      Texts{"10.0.0.0/24"});
  EXPECT_EQ(common_networks({on_host(0, {"10.0.0.1/24"}), on_host(1, {"10.0.1.1/24"})}), Texts{});
  EXPECT_EQ(common_networks({on_host(0, {"10.0.0.1/32"}), on_host(1, {"10.0.0.2/32"})}), Texts{});
  EXPECT_EQ(common_networks({on_host(0, {}), on_host(1, {"10.0.0.2/24"})}), Texts{});
}

TEST(Networks, DistinctNetworksLeaveOutSharedAddresses) {
  const std::vector<TransportMember> routed{
      on_host(0, {"172.17.0.1/16", "10.1.0.7/24", "192.168.5.1/24"}),
      on_host(1, {"172.17.0.1/16", "10.2.0.7/24"}),
      on_host(1, {"172.17.0.1/16", "10.2.0.7/24"}),
  };
  EXPECT_EQ(common_networks(routed), Texts{});
  EXPECT_EQ(distinct_networks(routed, 0), (Texts{"10.1.0.0/24", "192.168.5.0/24"}));
  EXPECT_EQ(distinct_networks(routed, 1), Texts{"10.2.0.0/24"});
  EXPECT_EQ(distinct_networks(routed, 2), Texts{"10.2.0.0/24"});
  EXPECT_EQ(distinct_networks({on_host(0, {"10.0.0.1"}), on_host(1, {})}, 0), Texts{});
}

TEST(Networks, IPv6NetworksAreListedAfterIPv4) {
  const std::vector<TransportMember> members{
      on_host(0, {"fd77::1/64", "2001:db8:1::5/48", "10.0.0.1/24"}),
      on_host(1, {"fd77::2/64", "2001:db8:2::5/48", "10.0.0.2/24"}),
  };
  EXPECT_EQ(common_networks(members), (Texts{"10.0.0.0/24", "fd77::/64"}));
  EXPECT_EQ(distinct_networks(members, 1), (Texts{"10.0.0.0/24", "fd77::/64", "2001:db8:2::/48"}));
  EXPECT_EQ(reachable_addresses(members, 1, 0), (Texts{"10.0.0.1", "fd77::1", "2001:db8:1::5"}));
  // An address of one family is in no network of the other.
  EXPECT_EQ(common_networks({on_host(0, {"::/0"}), on_host(1, {"10.0.0.2/24"})}), Texts{});
  EXPECT_EQ(common_networks({on_host(0, {"fd77::1/64"}), on_host(1, {"fd77::1/64"})}), Texts{});
}

TEST(Networks, EndpointsOfIPv4AndIPv6AreWrittenAndRecognised) {
  EXPECT_EQ(endpoint_text("10.0.0.1", 4444), "10.0.0.1:4444");
  EXPECT_EQ(endpoint_text("fd77::1", 4444), "[fd77::1]:4444");
  EXPECT_TRUE(is_endpoint_at("10.0.0.1:4444", "10.0.0.1"));
  EXPECT_FALSE(is_endpoint_at("10.0.0.1:4444", "10.0.0.11"));
  EXPECT_FALSE(is_endpoint_at("10.0.0.11:4444", "10.0.0.1"));
  EXPECT_TRUE(is_endpoint_at("[fd77::1]:4444", "fd77::1"));
  EXPECT_FALSE(is_endpoint_at("[fd77::1:2]:4444", "fd77::1"));
  EXPECT_FALSE(is_endpoint_at("10.0.0.1", "10.0.0.1"));
  EXPECT_FALSE(is_endpoint_at("", ""));
  EXPECT_EQ(port_of(*socket_address("10.0.0.1", 4444)), 4444);
  EXPECT_EQ(port_of(*socket_address("fd77::1", 4444)), 4444);
  EXPECT_FALSE(socket_address("10.0.0", 1).has_value());
  EXPECT_FALSE(socket_address("fd77::x", 1).has_value());
}

TEST(Networks, MembersOfOneHostMayShareAnAddress) {
  EXPECT_EQ(common_networks({on_host(0, {"10.0.0.1/24"}), on_host(0, {"10.0.0.1/24"}),
                             on_host(1, {"10.0.0.2/24"})}),
            Texts{"10.0.0.0/24"});
}

TEST(Networks, MostSpecificNetworksComeFirstAndLinkLocalLast) {
  const Texts one{"169.254.1.1/30", "10.0.0.1/8", "192.168.9.1/24", "192.168.1.1/24"};
  const Texts two{"192.168.1.2/24", "169.254.1.2/30", "192.168.9.2/24", "10.3.3.3/8"};
  const Texts expected{"192.168.1.0/24", "192.168.9.0/24", "10.0.0.0/8", "169.254.1.0/30"};
  EXPECT_EQ(common_networks({on_host(0, one), on_host(1, two)}), expected);
  EXPECT_EQ(common_networks({on_host(0, two), on_host(1, one)}), expected);
}

TEST(Networks, MalformedNetworksAreIgnored) {
  EXPECT_EQ(common_networks({on_host(0, {"10.0.0.1", "10.0.0.1/33", "10.0.0.1/", "/24", "::1/129",
                                         "10.0.0.1/24x", "10.0.0/24", "10.0.0.1/24"}),
                             on_host(1, {"", "/", "10.0.0.2/-1", "10.0.0.2/24"})}),
            Texts{"10.0.0.0/24"});
}

TEST(Networks, AddressesInCommonNetworksAreTriedFirst) {
  const std::vector<TransportMember> members{
      on_host(0, {"172.17.0.1/16", "203.0.113.1/28", "10.5.0.1/16", "10.77.0.1/24"}),
      on_host(1, {"172.17.0.1/16", "10.5.0.2/16", "10.77.0.2/24"}),
      on_host(2, {"172.17.0.1/16", "10.77.0.3/24"}),
  };
  EXPECT_EQ(reachable_addresses(members, 1, 0), (Texts{"10.77.0.1", "10.5.0.1", "203.0.113.1"}));
  EXPECT_EQ(reachable_addresses(members, 2, 0), (Texts{"10.77.0.1", "203.0.113.1", "10.5.0.1"}));
  // On the host itself all of its addresses are reachable.
  EXPECT_EQ(reachable_addresses(members, 0, 0).size(), 4u);
}

TEST(Networks, AddressOfPeerOnSameHostIsLoopback) {
  EXPECT_EQ(reachable_addresses({on_host(3, {"10.0.0.1/24"}), on_host(3, {})}, 1, 0),
            Texts{"127.0.0.1"});
}

TEST(Networks, NetworksAreSelectedByInterfaceNameOrSubnet) {
  const std::vector<Interface> interfaces{{"eth0", "10.0.0.1/24"},
                                          {"eth1", "10.1.0.1/24"},
                                          {"eth1", "10.1.9.1/24"},
                                          {"ib0", "11.0.0.1/8"}};
  EXPECT_EQ(select_networks(interfaces, "").value().size(), 4u);
  EXPECT_EQ(select_networks(interfaces, "eth1").value(), (Texts{"10.1.0.1/24", "10.1.9.1/24"}));
  EXPECT_EQ(select_networks(interfaces, "ib0,10.0.0.0/16").value(),
            (Texts{"10.0.0.1/24", "11.0.0.1/8"}));
  Result<Texts> none = select_networks(interfaces, "eth0,eth");
  EXPECT_EQ(none.status().code(), Code::kUnsupported);
  EXPECT_NE(none.status().message().find("'eth' is neither"), std::string::npos);
  EXPECT_NE(none.status().message().find("ib0 (11.0.0.1/8)"), std::string::npos);
}

}  // namespace
}  // namespace dscomm::test
