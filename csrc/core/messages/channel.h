// Channel: the two rings of cells, one per direction, between this process and another (or itself).
//
// A ring has one writer and one reader. The writer fills a cell and then stores its number. The
// reader polls the number of the next cell, copies the cell out, and stores the count of copied
// cells, `consumed`, every half ring. Each process writes only its own arena: the ring lies in the
// sender's, `consumed` in the receiver's. The processes find each other's entries (ChannelEntry) in
// the channel directories of their arenas, by arena id. A process without an entry for its peer has
// sent it nothing and consumed nothing.
//
// A few bytes of data lie in the cell, beside its number; up to a page in the cell's buffer; more
// in the piece ring. Buffers and piece ring are made when a message first needs them.
//
// Nothing here blocks. One thread at a time calls in, under PointToPoint's mutex. A Channel checks
// that offsets of a peer lie in that peer's memory; callers check the data.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "core/base/status.h"
#include "core/messages/layout.h"
#include "core/messages/peer_process.h"
#include "core/shm/mailbox/cache_distance.h"
#include "core/shm/memory/arena.h"
#include "core/shm/memory/peer.h"

namespace dscomm {

// The channel directory of this process's arena.
class ChannelDirectory {
 public:
  explicit ChannelDirectory(std::shared_ptr<Arena> arena) : arena_(std::move(arena)) {}

  // An entry for a peer, reset and visible to it. kResource if the arena is full.
  Result<ChannelEntry*> take(const ArenaId& peer);
  // Frees the entry of a dead peer.
  void vacate(ChannelEntry* entry);
  // A piece ring of at most channel_bytes. Its data is null if channel_bytes is too short, or if
  // the ring would leave too little of the arena. kResource if the kernel gives no memory.
  Result<PieceRing> take_pieces(size_t channel_bytes);
  // Frees the piece ring to a dead peer.
  void give_back(const PieceRing& ring);

 private:
  Status add_block();

  std::shared_ptr<Arena> arena_;
  ChannelBlock* last_block_ = nullptr;
  std::vector<ChannelEntry*> vacant_;
  int full_rings_ = 0;
};

// The entry for `own_id` in the peer's directory; null if the peer has none, or a corrupt
// directory.
const ChannelEntry* find_channel_entry(const Peer& peer, const ArenaId& own_id);

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
    measures_distance_ = true;  // the distance decides what the peer may read in place
    load_consumed();
    return known_consumed_;
  }
  bool is_far() const override { return distance_.is_far(); }
  bool in_flight() override { return false; }  // a published cell has arrived
  void drop() override;

 private:
  Status make_entry();
  std::byte* own_pieces() const { return arena_->data() + own_->pieces_offset; }
  bool find_theirs();
  bool find_their_cells();
  void load_consumed();
  bool is_full();
  bool peer_sleeps() const;

  std::shared_ptr<Arena> arena_;
  ChannelDirectory& directory_;
  std::shared_ptr<Peer> peer_;
  ChannelEntry* own_ = nullptr;
  const ChannelEntry* theirs_ = nullptr;
  uint64_t scanned_changes_ = 0;  // the peer's channel_changes at the last search, which failed

  Cell* cells_ = nullptr;  // of the outbound ring
  std::byte* buffers_ = nullptr;
  PieceRing pieces_;
  bool has_asked_for_pieces_ = false;
  uint64_t published_ = 0;
  bool is_in_run_ = false;           // the last cell was published with `more`
  uint64_t known_consumed_ = 0;      // lower bound of what the peer has consumed
  CacheDistance distance_{1};        // of the peer's core, by loads of its `consumed`
  bool measures_distance_ = false;   // whether these loads are timed; pays for long data only
  bool stores_consumed_ns_ = false;  // whether consumed_ns is stored, because the peer measures

  const Cell* their_cells_ = nullptr;
  bool their_cells_invalid_ = false;  // they lie outside the peer's memory
  const std::byte* their_buffers_ = nullptr;
  PieceRing their_pieces_;
  size_t current_piece_ = 0;  // bytes that the cell from next_cell() has in the piece ring
  uint64_t consumed_ = 0;
};

// A process of this host, or this process itself.
class HostPeerProcess final : public PeerProcess {
 public:
  explicit HostPeerProcess(std::shared_ptr<Peer> peer) : peer_(std::move(peer)) {}

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
