#include "core/messages/channel.h"

#include <algorithm>

namespace dscomm {
namespace {

// Cells are multiples of a cache line, so that what they carry is aligned like a tensor.
constexpr size_t kCellStep = 64;
constexpr size_t kSmallestCell = 2 * kCellStep;
constexpr size_t kLargestCell = size_t{1} << 31;  // cell_bytes is 32 bits wide

// A directory of more blocks than this is a corrupt one: it would hold lines for 10^6 processes.
constexpr int kMostBlocks = 65536;

const ChannelBlock* block_at(const Peer& peer, uint64_t offset) {
  return reinterpret_cast<const ChannelBlock*>(peer.at(offset, sizeof(ChannelBlock), kPageBytes));
}

}  // namespace

Status ChannelDirectory::add_block() {
  Result<uint64_t> offset = arena_->allocate(kChannelBlockBytes);
  if (!offset.ok()) return offset.status();
  auto* block = reinterpret_cast<ChannelBlock*>(arena_->data() + offset.value());
  // Relaxed: nobody knows the block until its offset is stored below.
  block->next.store(0, std::memory_order_relaxed);
  for (size_t k = kChannelsPerBlock; k-- > 0;) {
    block->lines[k].peer_low.store(0, std::memory_order_relaxed);
    vacant_.push_back(&block->lines[k]);
  }
  std::atomic<uint64_t>& link =
      last_block_ == nullptr ? arena_->header().first_channel_block : last_block_->next;
  link.store(offset.value(), std::memory_order_release);  // pairs with find_channel_lines()
  last_block_ = block;
  return {};
}

Result<ChannelLines*> ChannelDirectory::take(const ArenaId& peer) {
  if (vacant_.empty()) DSCOMM_RETURN_IF_ERROR(add_block());
  ChannelLines* lines = vacant_.back();
  vacant_.pop_back();
  // Relaxed: ordered before peer_low, by which the peer recognises its lines.
  lines->cells_offset = 0;
  lines->cell_bytes = 0;
  lines->published.store(0, std::memory_order_relaxed);
  lines->consumed.store(0, std::memory_order_relaxed);
  lines->peer_high.store(peer.high, std::memory_order_relaxed);
  lines->peer_low.store(peer.low, std::memory_order_release);  // pairs with find_channel_lines()
  // seq_cst, and before the first published: see ArenaHeader::channel_changes.
  arena_->header().channel_changes.fetch_add(1, std::memory_order_seq_cst);
  return lines;
}

void ChannelDirectory::vacate(ChannelLines* lines) {
  // Relaxed: whom it named is dead, so nobody looks for it.
  lines->peer_low.store(0, std::memory_order_relaxed);
  vacant_.push_back(lines);
}

const ChannelLines* find_channel_lines(const Peer& peer, const ArenaId& own_id) {
  // Acquire loads of the chain pair with add_block(), of peer_low with take().
  uint64_t offset = peer.header().first_channel_block.load(std::memory_order_acquire);
  for (int blocks = 0; offset != 0 && blocks < kMostBlocks; ++blocks) {
    const ChannelBlock* block = block_at(peer, offset);
    if (block == nullptr) return nullptr;
    for (const ChannelLines& lines : block->lines)
      if (lines.peer_low.load(std::memory_order_acquire) == own_id.low &&
          lines.peer_high.load(std::memory_order_relaxed) == own_id.high)
        return &lines;
    offset = block->next.load(std::memory_order_acquire);
  }
  return nullptr;
}

std::unique_ptr<CellChannel> PeerEndpoint::make_channel(const std::shared_ptr<Arena>& arena,
                                                        ChannelDirectory& directory) {
  return std::make_unique<Channel>(arena, directory, peer_);
}

Channel::Channel(std::shared_ptr<Arena> arena, ChannelDirectory& directory,
                 std::shared_ptr<Peer> peer)
    : arena_(std::move(arena)), directory_(directory), peer_(std::move(peer)) {}

Status Channel::make_lines() {
  if (own_ != nullptr) return {};
  Result<ChannelLines*> lines = directory_.take(peer_->address().arena);
  if (!lines.ok()) return lines.status();
  own_ = lines.value();
  return {};
}

Status Channel::open(size_t channel_bytes) {
  if (cells_ != nullptr) return {};
  size_t wanted = channel_bytes / kChannelCells / kCellStep * kCellStep;
  size_t cell_bytes = std::clamp(wanted, kSmallestCell, kLargestCell);
  Result<uint64_t> cells = arena_->allocate(kChannelCells * cell_bytes);
  if (!cells.ok()) return cells.status();
  if (Status status = make_lines(); !status.ok()) {
    arena_->release(cells.value(), kChannelCells * cell_bytes);
    return status;
  }
  cells_ = arena_->data() + cells.value();
  cell_bytes_ = cell_bytes;
  own_->cells_offset = cells.value();
  own_->cell_bytes = static_cast<uint32_t>(cell_bytes);
  return {};
}

bool Channel::find_theirs() {
  if (theirs_ != nullptr) return true;
  // The load half of the Dekker pair of a channel that has just been made; see channel_changes.
  uint64_t changes = peer_->header().channel_changes.load(std::memory_order_seq_cst);
  if (changes == scanned_changes_) return false;
  theirs_ = find_channel_lines(*peer_, arena_->id());
  scanned_changes_ = changes;
  return theirs_ != nullptr;
}

bool Channel::peer_sleeps() const {
  // The load half of the Dekker pair with PointToPoint::sleep_once().
  return peer_->header().doorbell_sleepers.load(std::memory_order_seq_cst) != 0;
}

std::byte* Channel::vacant_cell() {
  if (published_ - known_consumed_ >= kChannelCells && find_theirs()) {
    // seq_cst: acquires the peer's reads of the cell, and is the load half of the Dekker pair with
    // its consume(). A count that it cannot have reached is not believed.
    uint64_t consumed = theirs_->consumed.load(std::memory_order_seq_cst);
    if (consumed > known_consumed_ && consumed <= published_) known_consumed_ = consumed;
  }
  if (published_ - known_consumed_ >= kChannelCells) return nullptr;
  return cells_ + published_ % kChannelCells * cell_bytes_;
}

bool Channel::publish() {
  // seq_cst: releases the cell to the peer's next_cell(), and is the store half of the Dekker pair
  // with its doorbell_sleepers.
  own_->published.exchange(++published_, std::memory_order_seq_cst);
  return peer_sleeps();
}

Result<std::optional<ArrivedCell>> Channel::next_cell() {
  if (known_published_ == consumed_) {
    if (!find_theirs()) return std::optional<ArrivedCell>();
    // seq_cst: acquires the cell, and is the load half of the Dekker pair with the peer's
    // publish().
    uint64_t published = theirs_->published.load(std::memory_order_seq_cst);
    if (published == consumed_) return std::optional<ArrivedCell>();
    if (published - consumed_ > kChannelCells)
      return Status(Code::kInternal, "the channel from " + peer_->describe() +
                                         " counts cells that it cannot have filled");
    known_published_ = published;
  }
  if (their_cells_ == nullptr) {
    size_t cell_bytes = theirs_->cell_bytes;
    const std::byte* cells =
        peer_->at(theirs_->cells_offset, kChannelCells * cell_bytes, kPageBytes);
    if (cells == nullptr || cell_bytes < kSmallestCell || cell_bytes % kCellStep != 0)
      return Status(Code::kInternal,
                    "the channel from " + peer_->describe() + " lies outside its memory");
    their_cells_ = cells;
    their_cell_bytes_ = cell_bytes;
  }
  DSCOMM_RETURN_IF_ERROR(make_lines());  // for consume()
  const std::byte* cell = their_cells_ + consumed_ % kChannelCells * their_cell_bytes_;
  ArrivedCell arrived{*reinterpret_cast<const CellHeader*>(cell), cell + sizeof(CellHeader)};
  if (arrived.header.cell_bytes > their_cell_bytes_ - sizeof(CellHeader))
    return Status(Code::kInternal,
                  "a cell of the channel from " + peer_->describe() + " says that it overflows");
  return std::optional<ArrivedCell>(arrived);
}

bool Channel::consume() {
  // seq_cst: releases the reads of the cell to the peer's vacant_cell(), and is the store half of
  // the Dekker pair with its doorbell_sleepers.
  own_->consumed.exchange(++consumed_, std::memory_order_seq_cst);
  return peer_sleeps();
}

void Channel::drop() {
  if (cells_ != nullptr)
    arena_->release(static_cast<uint64_t>(cells_ - arena_->data()), kChannelCells * cell_bytes_);
  if (own_ != nullptr) directory_.vacate(own_);
  cells_ = nullptr;
  own_ = nullptr;
}

}  // namespace dscomm
