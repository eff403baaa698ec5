// Relaying the member table from leader to leader over TCP. Leaders are threads.
#include "core/formation/table_relay.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/owned.h"
#include "core/base/packer.h"
#include "core/detector/connection.h"
#include "core/formation/formation.h"
#include "core/formation/modex.h"
#include "core/formation/tcp_relay.h"
#include "in_process.h"
#include "shm_ranks.h"

namespace dscomm::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr uint64_t kMeeting = 0x1122334455667788;
constexpr size_t kMostBytes = 64 << 20;
// Never reached, even with sanitizers on a busy machine.
constexpr seconds kPatience{60};
const GiveUpCheck kNeverGivesUp = [] { return Status(); };

// Every leader is on its own host; all are in one network, of loopback addresses.
std::string network_of(int leader) { return "127.0.1." + std::to_string(leader + 1) + "/8"; }

TcpRelay relay_of(int leader) {
  TransportMember own;
  own.global_rank = 100 + leader;
  own.pid = 5000 + leader;
  own.host_name = "host" + std::to_string(leader);
  own.networks = {network_of(leader)};
  return TcpRelay("test", own.host_name, own, Settings());
}

// Places in the relay tree: the root, and its child.
RelayNode at_root(std::vector<int> children = {1}) { return {.children = std::move(children)}; }
RelayNode below(const std::string& address, int number = 1) {
  return {.parent = address, .number = number, .depth = 1, .children = {}};
}

std::string table_of(size_t bytes) {
  std::string table(bytes, '\0');
  uint32_t state = 1;
  for (char& byte : table) byte = static_cast<char>((state = state * 1664525 + 1013904223) >> 24);
  return table;
}

TEST(TableRelay, RelayTreeContainsEachListeningLeaderOnce) {
  for (size_t leaders : {1, 2, 9, 10, 11, 73, 1000})
    for (size_t absent : {size_t{0}, size_t{1}, size_t{5}, leaders}) {
      std::vector<std::string> addresses;
      for (size_t leader = 0; leader < leaders; ++leader)
        addresses.push_back(leader == absent ? "" : std::to_string(leader));
      const std::vector<RelayNode> nodes = relay_nodes(addresses);
      std::map<std::pair<std::string, int>, int> expected;  // children, by parent and number
      for (size_t leader = 0; leader < leaders; ++leader)
        for (int number : nodes[leader].children) ++expected[{addresses[leader], number}];
      int roots = 0, deepest = 0;
      for (size_t leader = 0; leader < leaders; ++leader) {
        const RelayNode& node = nodes[leader];
        EXPECT_LE(node.children.size(), static_cast<size_t>(kRelayChildren));
        if (leader == absent) {
          EXPECT_TRUE(node.parent.empty() && node.children.empty());
        } else if (node.parent.empty()) {
          EXPECT_EQ(node.depth, 0);
          ++roots;
        } else {
          const auto child = expected.extract(std::pair(node.parent, node.number));
          ASSERT_FALSE(child.empty());
          EXPECT_EQ(child.mapped(), 1);
          EXPECT_EQ(node.depth, nodes[std::stoul(node.parent)].depth + 1);
          EXPECT_LT(std::stoul(node.parent), leader);
          deepest = std::max(deepest, node.depth);
        }
      }
      EXPECT_TRUE(expected.empty());
      EXPECT_EQ(roots, leaders == 1 && absent == 0 ? 0 : 1);
      EXPECT_LE(deepest, leaders > 73 ? 4 : leaders > 9 ? 2 : 1);
    }
}

class TableRelayOf : public ::testing::TestWithParam<size_t> {};
INSTANTIATE_TEST_SUITE_P(Bytes, TableRelayOf,
                         ::testing::Values(0, 1, 2048, 2049, 100'000, 5'000'000));

TEST_P(TableRelayOf, EveryLeaderGetsTable) {
  constexpr int kLeaders = 12;
  const std::string table = table_of(GetParam());
  std::vector<std::unique_ptr<TcpRelay>> relays;
  std::vector<std::string> addresses;
  for (int leader = 0; leader < kLeaders; ++leader) {
    relays.emplace_back(new TcpRelay(relay_of(leader)));
    addresses.push_back(relays.back()->listen().value());
  }
  const std::vector<RelayNode> nodes = relay_nodes(addresses);
  run_ranks(kLeaders, [&](int leader) {
    const RelayNode& node = nodes[static_cast<size_t>(leader)];
    TcpRelay& relay = *relays[static_cast<size_t>(leader)];
    std::string own = table;
    if (leader != 0) {
      Result<std::string> passed_on =
          relay.fetch(node, kMeeting, kMostBytes, kNeverGivesUp, Deadline::after(kPatience));
      ASSERT_TRUE(passed_on.ok()) << passed_on.status().message();
      own = std::move(passed_on).value();
    }
    EXPECT_EQ(own.size(), table.size());
    EXPECT_TRUE(own == table);
    relay.pass_on(node, kMeeting, own, kNeverGivesUp, Deadline::after(kPatience));
    relay.close();
  });
}

// The status of a fetch from the parent at `where`.
Status failure_of_fetch(const std::string& where, size_t most_bytes = kMostBytes) {
  TcpRelay child = relay_of(1);
  Result<std::string> passed_on =
      child.fetch(below(where), kMeeting, most_bytes, kNeverGivesUp, Deadline::after(kPatience));
  return passed_on.ok() ? Status() : passed_on.status();
}

TEST(TableRelay, FetchFromSilentParentTimesOut) {
  TcpRelay parent = relay_of(0), child = relay_of(1);
  const std::string where = parent.listen().value();
  Result<std::string> passed_on = child.fetch(below(where), kMeeting, kMostBytes, kNeverGivesUp,
                                              Deadline::after(milliseconds(200)));
  ASSERT_FALSE(passed_on.ok());
  EXPECT_EQ(passed_on.status().code(), Code::kTimeout);
  EXPECT_NE(passed_on.status().message().find("rank 100 (pid 5000 on host host0)"),
            std::string::npos)
      << passed_on.status().message();
}

TEST(TableRelay, FetchFromClosedParentFails) {
  TcpRelay parent = relay_of(0);
  const std::string where = parent.listen().value();
  parent.close();
  const Status status = failure_of_fetch(where);
  EXPECT_EQ(status.code(), Code::kUnsupported) << status.message();
}

TEST(TableRelay, FetchRefusesTableOfOtherMeeting) {
  TcpRelay parent = relay_of(0);
  const std::string where = parent.listen().value();
  std::thread passes([&] {
    parent.pass_on(at_root(), kMeeting + 1, "table", kNeverGivesUp, Deadline::after(kPatience));
  });
  const Status status = failure_of_fetch(where);
  passes.join();
  EXPECT_EQ(status.code(), Code::kInternal) << status.message();
}

TEST(TableRelay, FetchRefusesTooLongTable) {
  TcpRelay parent = relay_of(0);
  const std::string where = parent.listen().value();
  std::thread passes([&] {
    parent.pass_on(at_root(), kMeeting, table_of(1'000'000), kNeverGivesUp,
                   Deadline::after(kPatience));
  });
  const Status status = failure_of_fetch(where, 500'000);
  passes.join();
  EXPECT_EQ(status.code(), Code::kInternal) << status.message();
}

TEST(TableRelay, FetchWithMalformedAddressFails) {
  TcpRelay parent = relay_of(0), child = relay_of(1);
  const std::string where = parent.listen().value();
  const auto expect_malformed = [&](const std::string& text, int number) {
    Result<std::string> passed_on = child.fetch(below(text, number), kMeeting, kMostBytes,
                                                kNeverGivesUp, Deadline::after(kPatience));
    ASSERT_FALSE(passed_on.ok());
    EXPECT_NE(passed_on.status().message().find("malformed"), std::string::npos)
        << passed_on.status().message();
  };
  for (size_t length = 0; length < where.size(); ++length)
    expect_malformed(where.substr(0, length), 1);
  for (int number : {0, kRelayChildren + 1, -1}) expect_malformed(where, number);
}

TEST(TableRelay, LateChildDelaysNoOtherChild) {
  TcpRelay parent = relay_of(0), second = relay_of(2);
  const std::string where = parent.listen().value();
  std::thread passes([&] {
    parent.pass_on(at_root({1, 2}), kMeeting, "table", kNeverGivesUp, Deadline::after(kPatience));
  });
  const Status status = failure_of_fetch(where);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_TRUE(
      second.fetch(below(where, 2), kMeeting, kMostBytes, kNeverGivesUp, Deadline::after(kPatience))
          .ok());
  passes.join();
}

TEST(TableRelay, WaitsEndAtDeadlineOrWithGiveUpReason) {
  TcpRelay parent = relay_of(0), child = relay_of(1);
  const std::string where = parent.listen().value();
  parent.pass_on(at_root(), kMeeting, "table", kNeverGivesUp, Deadline::after(milliseconds(50)));
  const GiveUpCheck reason = [] { return Status(Code::kPeerDied, "rank 7 has died"); };
  parent.pass_on(at_root(), kMeeting, "table", reason, Deadline::after(kPatience));
  Result<std::string> passed_on =
      child.fetch(below(where), kMeeting, kMostBytes, reason, Deadline::after(kPatience));
  ASSERT_FALSE(passed_on.ok());
  EXPECT_EQ(passed_on.status().message(), "rank 7 has died");
}

// A rank that speaks for itself, on the host of its parent.
TEST(TableRelay, FetchFromParentOnSameHostSucceeds) {
  TcpRelay parent = relay_of(0), child = relay_of(0);
  const std::string where = parent.listen().value();
  std::thread passes([&] {
    parent.pass_on(at_root(), kMeeting, "table", kNeverGivesUp, Deadline::after(kPatience));
  });
  Result<std::string> passed_on =
      child.fetch(below(where), kMeeting, kMostBytes, kNeverGivesUp, Deadline::after(kPatience));
  EXPECT_TRUE(passed_on.ok()) << passed_on.status().message();
  passes.join();
}

// A connection to a relay from outside the job, which sends these bytes.
UniqueFd stranger_at(const std::string& where, const std::string& says) {
  Unpacker unpacker(where);
  for (int k = 0; k < 3; ++k) unpacker.number();
  unpacker.text();  // the host, and its name
  unpacker.text();
  std::vector<std::string> networks;
  unpacker.fields(networks);
  Message invitation;
  EXPECT_TRUE(decode(unpacker.text(), &invitation));
  const size_t colon = invitation.text.rfind(':');
  const size_t blank = invitation.text.rfind(' ');
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(std::stoi(invitation.text.substr(colon + 1))));
  inet_pton(AF_INET, invitation.text.substr(blank + 1, colon - blank - 1).c_str(),
            &address.sin_addr);
  UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  EXPECT_EQ(::send(socket.get(), says.data(), says.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(says.size()));
  return socket;
}

TEST(TableRelay, StrangersGetNoTableAndDelayNoChild) {
  TcpRelay parent = relay_of(0);
  const std::string where = parent.listen().value();
  const uint64_t id = Unpacker(where).number();
  Message hello = Message::about(MessageKind::kHello, 1, id);
  hello.text = std::string(32, '0');  // the length of the token
  std::vector<UniqueFd> strangers;
  for (const std::string& says : {std::string(), std::string("GET / HTTP/1.1\r\n\r\n"),
                                  table_of(4000), encode(hello), encode(hello).substr(0, 20)})
    strangers.push_back(stranger_at(where, says));
  std::thread passes([&] {
    parent.pass_on(at_root(), kMeeting, "table", kNeverGivesUp, Deadline::after(kPatience));
  });
  const Status status = failure_of_fetch(where);
  EXPECT_TRUE(status.ok()) << status.message();
  passes.join();
  parent.close();
  for (UniqueFd& stranger : strangers) {
    char byte;
    EXPECT_LE(::recv(stranger.get(), &byte, 1, 0), 0);
  }
}

// Counts how often a table is read from the store.
class TableReads final : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  Result<std::string> get(const std::string& key, const Deadline& deadline) override {
    if (key.ends_with("/table")) ++count;
    return store_.get(key, deadline);
  }
  std::atomic<int> count = 0;
};

// The reads while a group of 12 hosts with two ranks each forms. Deaf hosts cannot listen.
int reads_of_tables(const std::set<int>& deaf_hosts, int64_t relay_hosts = 12) {
  constexpr int kRanks = 24;
  auto registry = std::make_shared<Registry>();
  MemoryStore memory;
  TableReads store(memory);
  Settings settings = small_settings();
  settings.relay_hosts = relay_hosts;
  std::barrier together(kRanks);  // members wait one second for their leader
  run_ranks(kRanks, [&](int rank) {
    RankParty party(registry, settings);
    party.per_host = 2;
    const int host = rank / 2;
    party.host_identity = "host" + std::to_string(host);
    if (deaf_hosts.count(host) == 0) party.networks = {network_of(host)};
    together.arrive_and_wait();
    Result<Formation> formation = party.form(store, rank, kRanks);
    ASSERT_TRUE(formation.ok()) << formation.status().message();
    EXPECT_EQ(formation.value().host_count, kRanks / 2);
    EXPECT_EQ(formation.value().hosts[static_cast<size_t>(rank)], host);
  });
  return store.count;
}

TEST(TableRelay, LeadersOfManyHostsReadNoTableFromStore) { EXPECT_EQ(reads_of_tables({}), 0); }

TEST(TableRelay, LeadersReadTableFromStoreIfHostsAreFew) { EXPECT_EQ(reads_of_tables({}, 13), 11); }

TEST(TableRelay, LeadersThatCannotListenReadTableFromStore) {
  EXPECT_EQ(reads_of_tables({1, 7}), 2);
  EXPECT_EQ(reads_of_tables({0}), 1);  // another root than rank 0
  EXPECT_EQ(reads_of_tables({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}), 11);
}

// Fails to fetch the table.
class BrokenRelay final : public TableRelay {
 public:
  Result<std::string> listen() override { return std::string("here"); }
  Result<std::string> fetch(const RelayNode& node, uint64_t, size_t, const GiveUpCheck&,
                            const Deadline&) override {
    EXPECT_EQ(node.parent, "here");
    return Status(Code::kPeerDied, "the parent has died");
  }
  void pass_on(const RelayNode& node, uint64_t, const std::string&, const GiveUpCheck&,
               const Deadline&) override {
    children += static_cast<int>(node.children.size());
  }
  void close() override {}
  static inline std::atomic<int> children = 0;
};

TEST(TableRelay, LeadersThatGetNothingFromParentReadTableFromStore) {
  constexpr int kLeaders = 4;
  MemoryStore memory;
  TableReads store(memory);
  BrokenRelay::children = 0;
  run_ranks(kLeaders, [&](int leader) {
    BrokenRelay relay;
    const Deadline deadline = Deadline::after(kPatience);
    ModexRequest request;
    request.prefix = "test/";
    request.rank = leader;
    request.size = kLeaders;
    request.relay = &relay;
    Modex meeting(store, request, deadline);
    Result<Modex::Table> table = meeting.gather({"", std::to_string(leader)});
    ASSERT_TRUE(table.ok()) << table.status().message();
    for (int rank = 0; rank < kLeaders; ++rank)
      EXPECT_EQ(table.value().entries[static_cast<size_t>(rank)].own, std::to_string(rank));
  });
  EXPECT_EQ(store.count, kLeaders - 1);
  EXPECT_EQ(BrokenRelay::children, kLeaders - 1);
}

}  // namespace
}  // namespace dscomm::test
