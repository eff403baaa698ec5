#include "core/detector/flooding.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

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

TEST(Flooding, RandomDeathsAreHeardByAllThatLive) {
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

TEST(Flooding, TheDeathOfAWholeHostIsHeardOfAllItsMembers) {
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

TEST(Flooding, ThousandsHearOfADeathInAFewHops) {
  SimulatedNetwork network(1024, 8, kHopUs, kHandleUs);
  EXPECT_LE(network.most_links(), 64u);
  for (int dead : {0, 4711}) {
    const double began_us = network.now_us();
    network.take_traffic();
    network.kill({dead});
    network.run(kNever);
    expect_heard(network, {dead});
    // Each tells each link once at most; and the way is some 2 log6 of the hosts, and into the
    // host.
    const SimulatedNetwork::Traffic traffic = network.take_traffic();
    EXPECT_LE(*std::max_element(traffic.messages.begin(), traffic.messages.end()), 64u);
    EXPECT_LT(network.now_us() - began_us, 12 * (kHopUs + 64 * kHandleUs));
  }
}

TEST(Flooding, WhatCannotBeMeantIsRefused) {
  SimulatedNetwork network(2, 2, kHopUs, kHandleUs);
  Flooding& node = network.node(0);
  const auto refused = [&](Message message, const std::string& text = "") {
    message.text = text;
    return !node.take(1, message);
  };
  EXPECT_TRUE(refused(Message::about(MessageKind::kEnd, 1, 7)));  // without a cause
  EXPECT_TRUE(refused(Message::about(MessageKind::kGone, 2, 0)));
  for (int rank : {-1, 4}) {
    EXPECT_TRUE(refused(Message::about(MessageKind::kGone, rank, 0, Status(Code::kPeerDied, "x"))));
    EXPECT_TRUE(refused(Message::about(MessageKind::kAnswer, rank, 1), std::string(8, '\0')));
  }
  EXPECT_TRUE(refused(Message::about(MessageKind::kAsk, 1, 1), "short"));
  EXPECT_TRUE(refused(Message::about(MessageKind::kAnswer, 1, 1), "short"));
  EXPECT_TRUE(refused(Message::about(MessageKind::kHello, 1, 1)));
  EXPECT_EQ(node.count(), 0u);
}

TEST(Flooding, NobodyBelievesInItsOwnDeath) {
  SimulatedNetwork network(2, 1, kHopUs, kHandleUs);
  EXPECT_TRUE(network.node(0).take(
      1, Message::about(MessageKind::kGone, 0, 0, Status(Code::kPeerDied, "unreachable"))));
  EXPECT_TRUE(network.node(0).gone(0).ok());
}

}  // namespace
}  // namespace dscomm::test
