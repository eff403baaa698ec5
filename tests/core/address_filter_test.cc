#include "core/transport/address_filter.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/ip.h>
#include <netinet/ip6.h>
#include <poll.h>
#include <sys/socket.h>

#include <cstring>
#include <random>
#include <set>
#include <string>

#include "core/base/owned.h"
#include "core/transport/networks.h"

namespace dscomm {
namespace {

// Runs the filter as the kernel would, on a packet with this IP header.
bool keeps(const std::vector<sock_filter>& code, const std::vector<uint8_t>& header) {
  uint32_t value = 0;
  for (size_t at = 0; at < code.size(); ++at) {
    const sock_filter& step = code[at];
    switch (step.code) {
      case BPF_LD | BPF_W | BPF_ABS: {
        const size_t place = step.k - static_cast<uint32_t>(SKF_NET_OFF);
        EXPECT_LE(place + 4, header.size());
        std::memcpy(&value, header.data() + place, 4);
        value = ntohl(value);
        break;
      }
      case BPF_ALU | BPF_AND | BPF_K:
        value &= step.k;
        break;
      case BPF_JMP | BPF_JEQ | BPF_K:
        at += value == step.k ? step.jt : step.jf;
        break;
      case BPF_JMP | BPF_JGE | BPF_K:
        at += value >= step.k ? step.jt : step.jf;
        break;
      case BPF_JMP | BPF_JA:
        at += step.k;
        break;
      case BPF_RET | BPF_K:
        return step.k != 0;
      default:
        ADD_FAILURE() << "unknown code " << step.code;
        return false;
    }
  }
  ADD_FAILURE() << "the program has no end";
  return false;
}

std::vector<uint8_t> header_from(const std::string& address) {
  const bool is_v6 = address.find(':') != std::string::npos;
  std::vector<uint8_t> header(is_v6 ? sizeof(ip6_hdr) : sizeof(iphdr));
  const size_t place = is_v6 ? offsetof(ip6_hdr, ip6_src) : offsetof(iphdr, saddr);
  EXPECT_EQ(inet_pton(is_v6 ? AF_INET6 : AF_INET, address.c_str(), header.data() + place), 1);
  return header;
}

std::string v4(uint32_t number) {
  const in_addr address{htonl(number)};
  char text[INET_ADDRSTRLEN];
  return inet_ntop(AF_INET, &address, text, sizeof text);
}

TEST(AddressFilter, PacketsFromUnlistedAddressesAreDropped) {
  const std::vector<std::string> v4_ones = {"10.0.0.7", "10.0.0.9", "192.168.1.1"};
  const std::vector<std::string> v6_ones = {"fd00::1", "fd00::2", "fd00:0:0:1::1", "2001:db8::7"};
  std::vector<std::string> all = v4_ones;
  all.insert(all.end(), v6_ones.begin(), v6_ones.end());
  const std::vector<sock_filter> for_v4 = address_filter(AF_INET, all);
  const std::vector<sock_filter> for_v6 = address_filter(AF_INET6, all);
  for (const std::string& address : v4_ones) EXPECT_TRUE(keeps(for_v4, header_from(address)));
  for (const std::string& address : v6_ones) EXPECT_TRUE(keeps(for_v6, header_from(address)));
  for (const char* address : {"10.0.0.8", "10.0.0.6", "0.0.0.0", "255.255.255.255", "127.0.0.1"})
    EXPECT_FALSE(keeps(for_v4, header_from(address))) << address;
  for (const char* address : {"fd00::", "fd00::3", "fd00:0:0:1::2", "fd00:0:0:2::1", "::1"})
    EXPECT_FALSE(keeps(for_v6, header_from(address))) << address;
}

TEST(AddressFilter, PacketsOfFamilyWithoutListedAddressAreDropped) {
  EXPECT_FALSE(keeps(address_filter(AF_INET6, {"10.0.0.7"}), header_from("fd00::1")));
  EXPECT_FALSE(keeps(address_filter(AF_INET, {}), header_from("10.0.0.7")));
}

TEST(AddressFilter, PacketsFromEachOfManyListedAddressesAreKept) {
  std::mt19937 random(1);
  for (size_t count : {1, 2, 3, 10, 100, 700}) {
    std::set<uint32_t> members;
    // Some are neighbours, most are far apart.
    while (members.size() < count)
      members.insert(members.empty() || random() % 3 != 0 ? static_cast<uint32_t>(random())
                                                          : *members.begin() + 1 + random() % 50);
    std::vector<std::string> texts;
    for (uint32_t member : members) texts.push_back(v4(member));
    std::shuffle(texts.begin(), texts.end(), random);
    const std::vector<sock_filter> code = address_filter(AF_INET, texts);
    ASSERT_FALSE(code.empty());
    for (uint32_t member : members) {
      EXPECT_TRUE(keeps(code, header_from(v4(member))));
      for (uint32_t other : {member - 1, member + 1, member ^ 0x100, uint32_t(random())})
        EXPECT_EQ(keeps(code, header_from(v4(other))), members.contains(other)) << v4(other);
    }
  }
}

// A program cannot tell 4,096 neighbours apart.
TEST(AddressFilter, TooManyAddressesAreWidenedToBlocks) {
  std::vector<std::string> texts;
  for (uint32_t i = 0; i < 4096; ++i) texts.push_back(v4(0x0a000000 + i));
  const std::vector<sock_filter> code = address_filter(AF_INET, texts);
  ASSERT_FALSE(code.empty());
  EXPECT_LE(code.size(), size_t{BPF_MAXINSNS});
  for (const std::string& text : texts) EXPECT_TRUE(keeps(code, header_from(text)));
  EXPECT_FALSE(keeps(code, header_from("10.1.0.0")));
  EXPECT_FALSE(keeps(code, header_from("9.255.255.255")));
}

// A listening socket on 127.0.0.1, and connections to it from other loopback addresses.
class FilteredListener : public ::testing::Test {
 protected:
  void SetUp() override {
    listener_ = UniqueFd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    SocketAddress name = *socket_address("127.0.0.1", 0);
    ASSERT_EQ(bind(listener_.get(), name.get(), name.size), 0);
    ASSERT_EQ(listen(listener_.get(), 8), 0);
    ASSERT_EQ(getsockname(listener_.get(), name.get(), &name.size), 0);
    port_ = port_of(name);
  }

  bool connects_from(const std::string& address) {
    UniqueFd client(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    SocketAddress from = *socket_address(address, 0), to = *socket_address("127.0.0.1", port_);
    EXPECT_EQ(bind(client.get(), from.get(), from.size), 0);
    connect(client.get(), to.get(), to.size);
    pollfd entry{client.get(), POLLOUT, 0};
    return poll(&entry, 1, 200) == 1 && (entry.revents & (POLLERR | POLLHUP)) == 0;
  }

  UniqueFd listener_;
  uint16_t port_ = 0;
};

TEST_F(FilteredListener, OnlyAdmittedAddressesConnect) {
  EXPECT_TRUE(connects_from("127.0.0.3"));
  ASSERT_TRUE(admit_only(listener_.get(), {"127.0.0.1", "127.0.0.2"}).ok());
  EXPECT_TRUE(connects_from("127.0.0.1"));
  EXPECT_TRUE(connects_from("127.0.0.2"));
  EXPECT_FALSE(connects_from("127.0.0.3"));
}

TEST_F(FilteredListener, ConnectionFromAdmittedAddressCarriesData) {
  ASSERT_TRUE(admit_only(listener_.get(), {"127.0.0.2"}).ok());
  UniqueFd client(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  SocketAddress from = *socket_address("127.0.0.2", 0), to = *socket_address("127.0.0.1", port_);
  ASSERT_EQ(bind(client.get(), from.get(), from.size), 0);
  ASSERT_EQ(connect(client.get(), to.get(), to.size), 0);
  UniqueFd taken(accept(listener_.get(), nullptr, nullptr));
  ASSERT_TRUE(taken.valid());
  std::string sent(100'000, 'x'), got(sent.size(), ' ');
  ASSERT_EQ(send(client.get(), sent.data(), sent.size(), 0), ssize_t(sent.size()));
  ASSERT_EQ(recv(taken.get(), got.data(), got.size(), MSG_WAITALL), ssize_t(got.size()));
  EXPECT_EQ(got, sent);
}

// Too many for the kernel if net.core.optmem_max is small.
TEST_F(FilteredListener, FilterOfManyAddressesIsAttached) {
  std::vector<std::string> texts{"127.0.0.1"};
  for (uint32_t i = 0; i < 900; ++i) texts.push_back(v4(0xac100000 + 2 * i));
  const Status status = admit_only(listener_.get(), texts);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_TRUE(connects_from("127.0.0.1"));
  EXPECT_FALSE(connects_from("127.1.0.1"));
}

TEST(AddressFilter, FilterOnUnixSocketIsUnsupported) {
  UniqueFd socket_of_host(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(admit_only(socket_of_host.get(), {"10.0.0.1"}).code(), Code::kUnsupported);
}

}  // namespace
}  // namespace dscomm
