// Channel: the two rings of cells between this process and another one.
//
// A ring has one writer and one reader. The writer fills a cell and then counts it in `published`;
// the reader copies it out and then counts it in `consumed`. Each process writes only its own
// arena: the ring and `published` lie in the sender's, `consumed` in the receiver's. The two find
// each other's lines in the channel directories of their arenas, by arena id; a side that has made
// no lines has published and consumed nothing.
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

 private:
  Status add_block();

  std::shared_ptr<Arena> arena_;
  ChannelBlock* last_block_ = nullptr;
  std::vector<ChannelLines*> vacant_;
};

// The lines of a peer for `own_id`, in the peer's directory; null when it has made none, or when
// its directory makes no sense.
const ChannelLines* find_channel_lines(const Peer& peer, const ArenaId& own_id);

class Channel final : public CellChannel {
 public:
  Channel(std::shared_ptr<Arena> arena, ChannelDirectory& directory, std::shared_ptr<Peer> peer);
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  Status open(size_t channel_bytes) override;
  size_t capacity() const override { return cell_bytes_ - sizeof(CellHeader); }
  std::byte* vacant_cell() override;
  bool publish() override;
  Result<std::optional<ArrivedCell>> next_cell() override;
  bool consume() override;
  bool in_flight() override { return false; }  // what is in memory is there
  void drop() override;

 private:
  Status make_lines();
  bool find_theirs();
  bool peer_sleeps() const;

  std::shared_ptr<Arena> arena_;
  ChannelDirectory& directory_;
  std::shared_ptr<Peer> peer_;
  ChannelLines* own_ = nullptr;
  const ChannelLines* theirs_ = nullptr;
  uint64_t scanned_changes_ = 0;  // of the peer's directory when it was last searched in vain

  std::byte* cells_ = nullptr;  // of the outbound ring
  size_t cell_bytes_ = 0;
  uint64_t published_ = 0;
  uint64_t known_consumed_ = 0;  // by the peer: a lower bound

  const std::byte* their_cells_ = nullptr;
  size_t their_cell_bytes_ = 0;
  uint64_t consumed_ = 0;
  uint64_t known_published_ = 0;  // by the peer: a lower bound
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
                                            ChannelDirectory& directory) override;

 private:
  const std::shared_ptr<Peer> peer_;
};

}  // namespace dscomm
