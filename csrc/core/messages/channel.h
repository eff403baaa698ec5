// Channel: the two rings of cells between this process and another one, or this process itself.
//
// A ring has one writer and one reader. The writer fills a cell and then numbers it; the reader,
// which looks at the number of the cell that comes next, copies it out and counts it in `consumed`,
// half a ring at a time. Each process writes only its own arena: the ring lies in the sender's,
// `consumed` in the receiver's. The two find each other's lines in the channel directories of their
// arenas, by arena id; a side that has made no lines has sent and consumed nothing.
//
// Data of a few bytes lies in the cell, beside its number; up to a page of it in the cell's buffer;
// and what is longer in the ring of pieces. Both are made when a message first needs them.
//
// Nothing here blocks, and one thread at a time calls in (PointToPoint's mutex). What a peer wrote
// is checked before it is used: here that it lies in the peer's memory, by the caller what it
// means.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "core/base/status.h"
#include "core/messages/endpoint.h"
#include "core/messages/layout.h"
#include "core/shm/arena.h"
#include "core/shm/distance.h"
#include "core/shm/peer.h"

namespace dscomm {

// The channel directory of the own arena.
class ChannelDirectory {
 public:
  explicit ChannelDirectory(std::shared_ptr<Arena> arena) : arena_(std::move(arena)) {}

  // Lines for a peer, reset and visible to it. kResource when the arena is full.
  Result<ChannelLines*> take(const ArenaId& peer);
  // Gives back the lines of a peer that is dead.
  void vacate(ChannelLines* lines);
  // A ring of pieces of at most channel_bytes; none (no data) where that holds no pieces. kResource
  // when there is no memory for the least.
  Result<PieceRing> take_pieces(size_t channel_bytes);
  // Of a peer that is dead.
  void give_back(const PieceRing& ring);

 private:
  Status add_block();

  std::shared_ptr<Arena> arena_;
  ChannelBlock* last_block_ = nullptr;
  std::vector<ChannelLines*> vacant_;
  int full_rings_ = 0;
};

// The lines of a peer for `own_id`, in the peer's directory; null when it has made none, or when
// its directory makes no sense.
const ChannelLines* find_channel_lines(const Peer& peer, const ArenaId& own_id);

class Channel final : public CellChannel {
 public:
  Channel(std::shared_ptr<Arena> arena, ChannelDirectory& directory, std::shared_ptr<Peer> peer)
      : arena_(std::move(arena)), directory_(directory), peer_(std::move(peer)) {}
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  Status open(size_t channel_bytes, uint64_t message_bytes) override;
  size_t cell_bytes(uint64_t message_bytes) const override;
  bool is_direct() const override { return true; }
  std::byte* vacant_cell(size_t bytes) override;
  void fill(std::byte* cell, const std::byte* data, size_t bytes) override;
  bool publish(const CellHeader& header, bool more) override;
  void end_message(uint64_t message_bytes) override;
  Result<std::optional<ArrivedCell>> next_cell() override;
  CellFlag next_flag() override;
  bool consume(bool at_once) override;
  const std::byte* in_place(uint64_t offset, uint64_t bytes) const override {
    return peer_->at_in_pool(offset, bytes);
  }
  uint64_t published() const override { return published_; }
  uint64_t given_back() override {
    measures_ = true;  // for what the peer reads in place
    load_consumed();
    return known_consumed_;
  }
  bool is_far() const override { return distance_.is_far(); }
  bool in_flight() override { return false; }  // what is in memory is there
  void drop() override;

 private:
  Status make_lines();
  std::byte* own_pieces() const { return arena_->data() + own_->pieces_offset; }
  bool find_theirs();
  bool find_their_cells();
  void load_consumed();
  bool is_full();
  bool peer_sleeps() const;

  std::shared_ptr<Arena> arena_;
  ChannelDirectory& directory_;
  std::shared_ptr<Peer> peer_;
  ChannelLines* own_ = nullptr;
  const ChannelLines* theirs_ = nullptr;
  uint64_t scanned_changes_ = 0;  // of the peer's directory when it was last searched in vain

  Cell* cells_ = nullptr;  // of the outbound ring
  std::byte* buffers_ = nullptr;
  PieceRing pieces_;
  bool has_asked_for_pieces_ = false;
  uint64_t published_ = 0;
  bool is_in_run_ = false;       // the last cell was published to be followed by the next at once
  uint64_t known_consumed_ = 0;  // by the peer: a lower bound
  Distance distance_{1};         // of the peer's core, as loads of its `consumed` tell
  bool measures_ = false;        // for data that is longer than what the answer costs
  bool tells_the_time_ = false;  // the peer measures

  const Cell* their_cells_ = nullptr;
  bool their_cells_lost_ = false;  // they lie outside the peer's memory
  const std::byte* their_buffers_ = nullptr;
  PieceRing their_pieces_;
  size_t current_piece_ = 0;  // of the cell that next_cell() returned last; 0: it holds none
  uint64_t consumed_ = 0;
};

// A process of this host, or this very process.
class PeerEndpoint final : public Endpoint {
 public:
  explicit PeerEndpoint(std::shared_ptr<Peer> peer) : peer_(std::move(peer)) {}

  const ArenaId& id() const override { return peer_->address().arena; }
  bool alive(bool thoroughly) const override { return peer_->alive(thoroughly); }
  std::string describe() const override { return peer_->describe(); }
  std::string state_text() const override { return peer_->state_text(); }
  const ArenaId* doorbell() const override { return &peer_->address().doorbell; }
  bool sleeps() const override {
    // Relaxed: only a hint.
    return peer_->header().doorbell_sleepers.load(std::memory_order_relaxed) != 0;
  }
  std::unique_ptr<CellChannel> make_channel(const std::shared_ptr<Arena>& arena,
                                            ChannelDirectory& directory) override {
    return std::make_unique<Channel>(arena, directory, peer_);
  }

 private:
  const std::shared_ptr<Peer> peer_;
};

}  // namespace dscomm
