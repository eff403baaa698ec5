#include "core/detector/flooding.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "core/base/packer.h"
#include "simulated_network.h"

namespace dscomm::test {
namespace {

constexpr double kHopUs = 50, kHandleUs = 5;

const auto kNever = [](int) { return false; };

void expect_heard(SimulatedNetwork& network, const std::vector<int>& dead) {
  for (int rank = 0; rank < network.size(); ++rank) {
    if (!network.lives(rank)) continue;
    for (int other : dead)
      ASSERT_EQ(network.node(rank).gone(other).code(), Code::kPeerDied) << rank << " of " << other;
  }
}

TEST(Flooding, RandomDeathsReachAllSurvivors) {
  std::mt19937 random(11);
  const auto up_to = [&](int most) { return std::uniform_int_distribution<int>(1, most)(random); };
  for (int round = 0; round < 300; ++round) {
    SimulatedNetwork network(up_to(30), up_to(6), kHopUs, kHandleUs);
    const int size = network.size();
    const std::vector<int> dead{up_to(size) - 1, up_to(size) - 1};
    network.kill({dead[0]});
    if (round % 2 == 0) network.run(kNever);  // one after the other, or at once
    network.kill({dead[1]});
    network.run(kNever);
    expect_heard(network, dead);
  }
}

TEST(Flooding, DeathOfHostIsReportedForAllItsMembers) {
  for (int hosts : {2, 3, 9, 40})
    for (int host : {0, 1, hosts - 1}) {
      constexpr int kLocal = 5;
      SimulatedNetwork network(hosts, kLocal, kHopUs, kHandleUs);
      std::vector<int> dead;
      for (int k = 0; k < kLocal; ++k) dead.push_back(host * kLocal + k);
      network.kill(dead);
      network.run(kNever);
      expect_heard(network, dead);
    }
}

TEST(Flooding, DeathReachesThousandsInFewHops) {
  SimulatedNetwork network(1024, 8, kHopUs, kHandleUs);
  EXPECT_LE(network.most_links(), 64u);
  for (int dead : {0, 4711}) {
    const double began_us = network.now_us();
    network.take_traffic();
    network.kill({dead});
    network.run(kNever);
    expect_heard(network, {dead});
    // Each member sends at most one message per link; paths have 2 log6(hosts) hops plus one.
    const SimulatedNetwork::Traffic traffic = network.take_traffic();
    EXPECT_LE(*std::max_element(traffic.messages.begin(), traffic.messages.end()), 64u);
    EXPECT_LT(network.now_us() - began_us, 12 * (kHopUs + 64 * kHandleUs));
  }
}

TEST(Flooding, MalformedMessagesAreRefused) {
  SimulatedNetwork network(2, 2, kHopUs, kHandleUs);
  Flooding& node = network.node(0);
  const auto refused = [&](Message message, const std::string& text = "") {
    message.text = text;
    return !node.handle(1, message);
  };
  EXPECT_TRUE(refused(Message::about(MessageKind::kEnd, 1, 7)));  // without a cause
  EXPECT_TRUE(refused(Message::about(MessageKind::kGone, 2, 0)));
  for (int rank : {-1, 4}) {
    EXPECT_TRUE(refused(Message::about(MessageKind::kGone, rank, 0, Status(Code::kPeerDied, "x"))));
    EXPECT_TRUE(refused(Message::about(MessageKind::kAnswer, rank, 1), std::string(8, '\0')));
  }
  EXPECT_TRUE(refused(Message::about(MessageKind::kAsk, 1, 1), "short"));
  EXPECT_TRUE(refused(Message::about(MessageKind::kAnswer, 1, 1), "short"));
  EXPECT_TRUE(refused(Message::about(MessageKind::kCompare, 1, 1), "short"));
  EXPECT_TRUE(refused(Message::about(MessageKind::kCompare, 1, 1),
                      Packer().number(7).text("").text("rank 1").take()));
  EXPECT_TRUE(refused(Message::about(MessageKind::kHello, 1, 1)));
  EXPECT_EQ(node.count(), 0u);
}

constexpr uint64_t kTeam = 7;

CallRecord gather_to(int root, uint64_t number) {
  CallRecord call = make_record(Collective::kGather, DType::kFloat32, 0,
                                {Deadline::after(std::chrono::seconds(1))}, root);
  call.sequence = number;
  return call;
}

void note(SimulatedNetwork& network, int rank, const CallRecord& call) {
  network.node(rank).note_call(kTeam, call, {"rank " + std::to_string(rank), "some group"});
}

void compare(SimulatedNetwork& network, int rank, bool always = false) {
  network.node(rank).compare_calls(kTeam, always);
  network.send_from(rank, network.now_us());
  network.run(kNever);
}

TEST(Flooding, ComparisonOfEqualCallsEndsNoTeam) {
  SimulatedNetwork network(3, 2, kHopUs, kHandleUs);
  for (uint64_t number = 1; number <= 40; ++number)
    for (int rank = 0; rank < network.size(); ++rank) note(network, rank, gather_to(1, number));
  compare(network, 0);
  for (int rank = 0; rank < network.size(); ++rank)
    EXPECT_TRUE(network.node(rank).ended(kTeam).ok());
}

TEST(Flooding, CompareCallsReportsFirstDifferenceToAllRanks) {
  SimulatedNetwork network(3, 2, kHopUs, kHandleUs);
  for (uint64_t number = 1; number <= 20; ++number)
    for (int rank = 0; rank < network.size(); ++rank)
      note(network, rank, gather_to(rank == 4 && number >= 9 ? 2 : 1, number));
  compare(network, 1);
  for (int rank = 0; rank < network.size(); ++rank) {
    const Status ended = network.node(rank).ended(kTeam);
    EXPECT_EQ(ended.code(), Code::kMismatch);
    EXPECT_EQ(ended.message(),
              "the ranks called different things as call #9: rank 1 called gather(float32[0], root "
              "1), rank 4 called gather(float32[0], root 2); every rank must make the same calls "
              "in the same order (first seen by rank 4 in group 'some group')");
    // Earlier calls may still complete.
    EXPECT_TRUE(network.node(rank).ended(kTeam, 8).ok());
    EXPECT_FALSE(network.node(rank).ended(kTeam, 9).ok());
  }
}

TEST(Flooding, DifferentCallMadeAfterComparisonEndsTeam) {
  for (const bool is_first_call : {true, false}) {
    SimulatedNetwork network(2, 4, kHopUs, kHandleUs);
    for (int rank = 0; rank < network.size() && !is_first_call; ++rank)
      note(network, rank, gather_to(1, 1));
    const uint64_t number = is_first_call ? 1 : 2;
    for (int rank = 0; rank < 7; ++rank) note(network, rank, gather_to(1, number));
    for (int rank = 0; rank < 7; ++rank) compare(network, rank);
    EXPECT_TRUE(network.node(0).ended(kTeam).ok());
    note(network, 7, gather_to(2, number));
    EXPECT_EQ(network.node(7).ended(kTeam).code(), Code::kMismatch);
    network.send_from(7, network.now_us());
    network.run(kNever);
    EXPECT_EQ(network.node(0).ended(kTeam).code(), Code::kMismatch);
  }
}

TEST(Flooding, CompareCallsFindsMismatchOfDepartedRank) {
  SimulatedNetwork network(2, 2, kHopUs, kHandleUs);
  for (int rank = 0; rank < network.size(); ++rank) note(network, rank, gather_to(rank / 3, 1));
  network.node(3).forget(kTeam);
  compare(network, 0);
  EXPECT_EQ(network.node(0).ended(kTeam).code(), Code::kMismatch);
}

// All ranks of a job may wait at the same time.
TEST(Flooding, CompareCallsAfterComparisonByOtherRankSendsNothing) {
  SimulatedNetwork network(4, 4, kHopUs, kHandleUs);
  for (int rank = 0; rank < network.size(); ++rank) note(network, rank, gather_to(1, 1));
  compare(network, 5);
  network.take_traffic();
  for (int rank = 0; rank < network.size(); ++rank)
    if (rank != 5) compare(network, rank);
  EXPECT_EQ(network.take_traffic().bytes, 0u);
  compare(network, 2);  // the second time it sends a comparison itself
  EXPECT_GT(network.take_traffic().bytes, 0u);
  compare(network, 3, true);
  EXPECT_GT(network.take_traffic().bytes, 0u);
}

TEST(Flooding, NoticeOfOwnDeathIsIgnored) {
  SimulatedNetwork network(2, 1, kHopUs, kHandleUs);
  EXPECT_TRUE(network.node(0).handle(
      1, Message::about(MessageKind::kGone, 0, 0, Status(Code::kPeerDied, "unreachable"))));
  EXPECT_TRUE(network.node(0).gone(0).ok());
}

}  // namespace
}  // namespace dscomm::test
