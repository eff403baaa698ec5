// Channel and ChannelDirectory alone: two processes of one host, driven by one thread.
#include "core/messages/channel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "in_process.h"

namespace dscomm::test {
namespace {

constexpr size_t kArenaBytes = 16 << 20;

struct Process {
  explicit Process(const std::shared_ptr<Registry>& registry)
      : arena(Arena::create(kArenaBytes).value()), life(registry), channels(arena) {
    address = life.publish(arena, nullptr, ArenaId{7, 7}).value();
  }

  std::shared_ptr<Arena> arena;
  InProcessDirectory life;
  PeerAddress address;
  ChannelDirectory channels;
};

class ChannelTest : public ::testing::Test {
 protected:
  ChannelTest() {
    const Deadline soon = Deadline::after(std::chrono::seconds(10));
    receiver_of_sender_ = sender_.life.attach(receiver_.address, soon).peer;
    sender_of_receiver_ = receiver_.life.attach(sender_.address, soon).peer;
    out_ = std::make_unique<Channel>(sender_.arena, sender_.channels, receiver_of_sender_);
    in_ = std::make_unique<Channel>(receiver_.arena, receiver_.channels, sender_of_receiver_);
  }

  // False if the ring is full.
  bool send(const std::vector<std::byte>& data) {
    std::byte* cell = out_->vacant_cell(data.size());
    if (cell == nullptr) return false;
    out_->fill(cell, data.data(), data.size());
    CellHeader header{};
    header.cell_bytes = static_cast<uint32_t>(data.size());
    out_->publish(header, false);
    return true;
  }
  // Whether the next cell has arrived with this data.
  bool receive(const std::vector<std::byte>& data, bool at_once = false) {
    Result<std::optional<ArrivedCell>> cell = in_->next_cell();
    if (!cell.ok() || !cell.value()) return false;
    const bool is_right = cell.value()->header.cell_bytes == data.size() &&
                          std::equal(data.begin(), data.end(), cell.value()->data);
    in_->consume(at_once);
    return is_right;
  }
  static std::vector<std::byte> pattern(size_t bytes, int seed) {
    std::vector<std::byte> data(bytes);
    for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<std::byte>(seed + static_cast<int>(i));
    return data;
  }
  // A process's mailbox for the other, writable here as a defective process could write it.
  static ChannelEntry* entry(const std::shared_ptr<Peer>& owner, const Process& reader) {
    return const_cast<ChannelEntry*>(find_channel_entry(*owner, reader.arena->id()));
  }
  Cell* cells() {
    return reinterpret_cast<Cell*>(sender_.arena->data() +
                                   entry(sender_of_receiver_, receiver_)->cells_offset.load());
  }
  Code code_of_next_cell() { return in_->next_cell().status().code(); }

  std::shared_ptr<Registry> registry_ = std::make_shared<Registry>();
  Process sender_{registry_}, receiver_{registry_};
  std::shared_ptr<Peer> receiver_of_sender_, sender_of_receiver_;
  std::unique_ptr<Channel> out_, in_;
};

TEST_F(ChannelTest, ReceiveBeforeSenderOpensFindsNoCell) {
  ASSERT_TRUE(in_->next_cell().ok());
  EXPECT_FALSE(in_->next_cell().value());
  EXPECT_EQ(in_->next_flag().word, nullptr);
  ASSERT_TRUE(out_->open(0, 8).ok());
  EXPECT_FALSE(in_->next_cell().value());
  EXPECT_NE(in_->next_flag().word, nullptr);
}

TEST_F(ChannelTest, CellsOfEveryLengthArriveInOrder) {
  ASSERT_TRUE(out_->open(1 << 20, 1 << 20).ok());
  const size_t longest = out_->cell_bytes(1 << 20);
  for (int k = 0; k < 300; ++k) {
    const size_t lengths[] = {
        0, 1, kCellDataBytes, kCellDataBytes + 1, kPageBytes, kPageBytes + 1, longest};
    const std::vector<std::byte> data = pattern(lengths[static_cast<size_t>(k) % 7], k);
    ASSERT_TRUE(send(data)) << k;
    ASSERT_TRUE(receive(data)) << k;
  }
  EXPECT_EQ(out_->published(), 300u);
}

TEST_F(ChannelTest, SendToFullRingSucceedsAfterHalfIsRead) {
  ASSERT_TRUE(out_->open(0, 8).ok());
  const std::vector<std::byte> data = pattern(8, 1);
  for (uint32_t k = 0; k < kRingCells; ++k) ASSERT_TRUE(send(data));
  EXPECT_FALSE(send(data));
  for (uint32_t k = 0; k + 1 < kRingCells / 2; ++k) ASSERT_TRUE(receive(data));
  EXPECT_FALSE(send(data));
  ASSERT_TRUE(receive(data));
  for (uint32_t k = 0; k < kRingCells / 2; ++k) EXPECT_TRUE(send(data));
  EXPECT_FALSE(send(data));
  ASSERT_TRUE(receive(data, true));  // acknowledges at once
  EXPECT_TRUE(send(data));
}

TEST_F(ChannelTest, CellIsReadableBeforeTheNextOneIsPublished) {
  ASSERT_TRUE(out_->open(0, 8).ok());
  CellHeader header{};
  for (int k = 0; k < 5; ++k) {
    ASSERT_NE(out_->vacant_cell(0), nullptr);
    out_->publish(header, k < 4);
    EXPECT_TRUE(receive({})) << k;
  }
}

TEST_F(ChannelTest, UnreadPiecesAreNotOverwritten) {
  ASSERT_TRUE(out_->open(1 << 20, 1 << 20).ok());
  const size_t bytes = out_->cell_bytes(1 << 20);
  EXPECT_GE(bytes, 8192u);
  for (int round = 0; round < 20; ++round) {
    for (uint32_t k = 0; k < kRingCells; ++k)
      ASSERT_TRUE(send(pattern(bytes, round + static_cast<int>(k))));
    ASSERT_FALSE(send(pattern(bytes, 0)));
    for (uint32_t k = 0; k < kRingCells; ++k)
      ASSERT_TRUE(receive(pattern(bytes, round + static_cast<int>(k)))) << round << " " << k;
  }
}

TEST_F(ChannelTest, CellOfOnePageChannelHoldsOnePage) {
  ASSERT_TRUE(out_->open(kPageBytes, 1 << 20).ok());
  EXPECT_EQ(out_->cell_bytes(1 << 20), kPageBytes);
  EXPECT_EQ(out_->cell_bytes(8), kCellDataBytes);
  ASSERT_TRUE(send(pattern(kPageBytes, 3)));
  EXPECT_TRUE(receive(pattern(kPageBytes, 3)));
}

TEST_F(ChannelTest, ConsumedCountBeyondSentCellsIsIgnored) {
  ASSERT_TRUE(out_->open(0, 8).ok());
  for (uint32_t k = 0; k < kRingCells; ++k) ASSERT_TRUE(send(pattern(8, 1)));
  ASSERT_TRUE(receive(pattern(8, 1)));  // makes the receiver allocate its mailbox
  entry(receiver_of_sender_, sender_)->consumed.store(kRingCells + 1);
  EXPECT_FALSE(send(pattern(8, 1)));
  EXPECT_EQ(out_->given_back(), 0u);
}

TEST_F(ChannelTest, CellNumberThatSkipsCellsIsAnError) {
  ASSERT_TRUE(out_->open(0, 8).ok());
  ASSERT_TRUE(send(pattern(8, 1)));
  cells()[0].number.store(2);
  EXPECT_EQ(code_of_next_cell(), Code::kInternal);
}

TEST_F(ChannelTest, OffsetsOutsidePeerMemoryAreErrors) {
  ASSERT_TRUE(out_->open(1 << 20, 1 << 20).ok());
  ASSERT_TRUE(send(pattern(kPageBytes, 1)));
  ChannelEntry* own = entry(sender_of_receiver_, receiver_);
  const uint64_t buffers = std::exchange(own->buffers_offset, kArenaBytes);
  EXPECT_EQ(code_of_next_cell(), Code::kInternal);
  own->buffers_offset = buffers;
  EXPECT_TRUE(receive(pattern(kPageBytes, 1)));

  ASSERT_TRUE(send(pattern(2 * kPageBytes, 2)));
  const uint64_t pieces = std::exchange(own->pieces_offset, kArenaBytes);
  EXPECT_EQ(code_of_next_cell(), Code::kInternal);
  own->pieces_offset = pieces;
  cells()[1].header.cell_bytes = 1 << 20;  // more than a piece of this ring may have
  EXPECT_EQ(code_of_next_cell(), Code::kInternal);
}

TEST_F(ChannelTest, RingOffsetOutsidePeerMemoryIsAnError) {
  ASSERT_TRUE(out_->open(0, 8).ok());
  entry(sender_of_receiver_, receiver_)->cells_offset.store(kArenaBytes);
  EXPECT_EQ(code_of_next_cell(), Code::kInternal);
  EXPECT_EQ(in_->next_flag().word, nullptr);
}

TEST_F(ChannelTest, DropReleasesMemoryAndChannelEntry) {
  ASSERT_TRUE(out_->open(1 << 20, 1 << 20).ok());
  ChannelEntry* own = entry(sender_of_receiver_, receiver_);
  const size_t used = sender_.arena->used_bytes();
  out_->drop();
  EXPECT_LE(sender_.arena->used_bytes() + (1 << 20), used);
  EXPECT_EQ(find_channel_entry(*sender_of_receiver_, receiver_.arena->id()), nullptr);
  EXPECT_EQ(sender_.channels.take(ArenaId{1, 2}).value(), own);
}

TEST_F(ChannelTest, ChannelEntryIsFoundInEveryBlock) {
  std::vector<ChannelEntry*> taken;
  for (uint64_t k = 1; k <= 2 * kChannelsPerBlock + 1; ++k)
    taken.push_back(sender_.channels.take(ArenaId{k, k}).value());
  for (uint64_t k = 1; k <= taken.size(); ++k)
    EXPECT_EQ(find_channel_entry(*sender_of_receiver_, ArenaId{k, k}), taken[k - 1]) << k;
  EXPECT_EQ(find_channel_entry(*sender_of_receiver_, ArenaId{9999, 1}), nullptr);
  // A chain that leaves the peer's memory ends the search.
  sender_.arena->header().first_channel_block.store(kArenaBytes);
  EXPECT_EQ(find_channel_entry(*sender_of_receiver_, ArenaId{1, 1}), nullptr);
}

}  // namespace
}  // namespace dscomm::test
