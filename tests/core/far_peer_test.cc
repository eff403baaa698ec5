// Point-to-point with a peer that rings no doorbell, as on another host: how a wait sleeps.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>

#include "core/base/deadline.h"
#include "core/base/socket_sleep.h"
#include "core/messages/point_to_point.h"
#include "in_process.h"
#include "socket_pair.h"

namespace dscomm::test {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kWait{1000};
constexpr int64_t kShortestSleepNs = 50'000, kLongestSleepNs = 1'000'000;
constexpr uint64_t kPassesOfSleep = 10;  // at most
constexpr int kSpins = 100'000;          // passes without a sleep
constexpr int kTag = 5;

// The state of the far peer's channel, and how often it was polled.
struct FarPeer {
  SocketList sockets;
  Status failure;
  std::optional<CellHeader> arrived;
  std::atomic<uint64_t> passes{0};
};

class FarChannel final : public CellChannel {
 public:
  explicit FarChannel(FarPeer& peer) : peer_(peer) {}

  Status open(size_t, uint64_t) override { return {}; }
  size_t cell_bytes(uint64_t) const override { return 1; }
  std::byte* vacant_cell(size_t) override { return nullptr; }
  bool publish(const CellHeader&, bool) override { return false; }
  Result<std::optional<ArrivedCell>> next_cell() override {
    DSCOMM_RETURN_IF_ERROR(peer_.failure);
    if (!peer_.arrived) return std::optional<ArrivedCell>();
    return std::optional<ArrivedCell>(ArrivedCell{*peer_.arrived, &data_});
  }
  bool consume(bool) override { return false; }
  // Called once in every pass, whatever the state of the channel.
  bool in_flight() override {
    ++peer_.passes;
    return false;
  }
  void drop() override {}

 private:
  FarPeer& peer_;
  std::byte data_{};
};

class FarPeerProcess final : public PeerProcess {
 public:
  explicit FarPeerProcess(FarPeer& peer) : peer_(peer) {}

  const ArenaId& id() const override { return id_; }
  bool alive(bool) const override { return true; }
  std::string describe() const override { return "pid 1 on host b"; }
  std::string state_text() const override { return "on another host"; }
  const ArenaId* doorbell() const override { return nullptr; }
  SocketList* sockets() const override { return &peer_.sockets; }
  bool sleeps() const override { return false; }
  std::unique_ptr<CellChannel> make_channel(const std::shared_ptr<Arena>&,
                                            ChannelDirectory&) override {
    return std::make_unique<FarChannel>(peer_);
  }

 private:
  FarPeer& peer_;
  const ArenaId id_{1, 2};
};

class FarPeerTest : public ::testing::Test {
 protected:
  FarPeerTest() {
    peer_.sockets.add(pair_.near.get());
    settings_.arena_bytes = 32 << 20;
    settings_.unexpected_bytes = 0;
    arena_ = Arena::create(static_cast<size_t>(settings_.arena_bytes)).value();
    ArenaId token;
    auto doorbell = Doorbell::create(&token).value();
    engine_ = std::make_unique<PointToPoint>(arena_, settings_, std::move(doorbell));
    auto registry = std::make_shared<Registry>();
    directory_ = std::make_unique<InProcessDirectory>(registry);
    address_ = directory_->publish(arena_, nullptr, token).value();
  }

  // A group of this process and either the far process or this process again.
  std::shared_ptr<PointToPointGroup> make_group(uint64_t id, bool is_far) {
    auto group = std::make_shared<PointToPointGroup>();
    const auto here =
        std::make_shared<HostPeerProcess>(std::make_shared<Peer>(address_, arena_, nullptr));
    group->id = id;
    group->name = "g";
    group->ports = {engine_->open_port(), engine_->open_port()};
    group->peers = {here, here};
    if (is_far) group->peers[1] = std::make_shared<FarPeerProcess>(peer_);
    const auto failure = std::make_shared<Status>();
    group->failure = [failure] { return *failure; };
    group->abort = [failure](const Status& cause) { *failure = cause; };
    group->has_left = [](int) { return false; };
    group->name_member = [](int member) { return "rank " + std::to_string(member); };
    group->wait.spin_pauses = 0;
    group->wait.yield_ns = 0;
    engine_->join(group);
    return group;
  }
  Status receive(const std::shared_ptr<PointToPointGroup>& group, int tag, milliseconds timeout) {
    uint8_t byte = 0;
    return engine_->receive(group, &byte, 1, DType::kUInt8, 1, tag, nullptr, timeout)->wait();
  }
  // The number of sleeps of a receive that only its timeout ends.
  uint64_t sleeps_of_receive(const std::shared_ptr<PointToPointGroup>& group) {
    const uint64_t before = peer_.passes;
    EXPECT_EQ(receive(group, kTag, kWait).code(), Code::kTimeout);
    return (peer_.passes - before) / kPassesOfSleep;
  }
  // The polls of the far peer, used by a first group, while a receive spins in a second group.
  uint64_t questions_of_receive_in_second_group(bool is_far) {
    EXPECT_EQ(receive(make_group(1, true), kTag, milliseconds(1)).code(), Code::kTimeout);
    const auto second = make_group(2, is_far);
    second->wait.spin_pauses = kSpins;
    const uint64_t before = peer_.passes;
    EXPECT_EQ(receive(second, kTag, kWait).code(), Code::kTimeout);
    return peer_.passes - before;
  }
  static uint64_t most_sleeps(int64_t ns) {
    return static_cast<uint64_t>(kWait / std::chrono::nanoseconds(ns)) + 100;
  }

  Settings settings_;
  FarPeer peer_;
  testing::SocketPair pair_;
  std::shared_ptr<Arena> arena_;
  std::unique_ptr<InProcessDirectory> directory_;
  PeerAddress address_;
  std::unique_ptr<PointToPoint> engine_;
};

TEST_F(FarPeerTest, ReceiveWithQuietSocketsSleepsLong) {
  EXPECT_LE(sleeps_of_receive(make_group(1, true)), most_sleeps(kLongestSleepNs));
}

// A poll costs system calls; polling in more than half of the passes would cost too much.
TEST_F(FarPeerTest, ReceiveFromLocalPeerPollsRemotePeerSometimes) {
  const uint64_t asked = questions_of_receive_in_second_group(false);
  EXPECT_GE(asked, 1);
  EXPECT_LE(asked, kSpins / 2);
}

// Also in a group that has another endpoint for the same peer.
TEST_F(FarPeerTest, ReceiveFromRemotePeerPollsItInEveryPass) {
  EXPECT_GE(questions_of_receive_in_second_group(true), kSpins);
}

TEST_F(FarPeerTest, ReceiveSleepsDespiteUnreadDataOfBrokenChannel) {
  const auto group = make_group(1, true);
  peer_.failure = Status(Code::kInternal, "broken");
  EXPECT_EQ(receive(group, kTag, 60 * kWait).code(), Code::kInternal);
  EXPECT_EQ(write(pair_.far.get(), "x", 1), 1);
  EXPECT_LE(sleeps_of_receive(make_group(2, false)), most_sleeps(kShortestSleepNs));
}

TEST_F(FarPeerTest, ReceiveWithoutRoomForUnreadMessageSleeps) {
  const auto group = make_group(1, true);
  CellHeader header{};
  header.group = group->id;
  header.sequence = 1;
  header.bytes = header.cell_bytes = 1;
  header.port = group->ports[0];
  header.tag = kTag + 1;
  header.source = 1;
  header.dtype = static_cast<uint8_t>(DType::kUInt8);
  header.flags = kFirstCell;
  peer_.arrived = header;
  EXPECT_EQ(write(pair_.far.get(), "x", 1), 1);
  EXPECT_LE(sleeps_of_receive(group), most_sleeps(kShortestSleepNs));
}

}  // namespace
}  // namespace dscomm::test
