#include "core/messages/channel.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/base/deadline.h"
#include "core/base/fence.h"
#include "core/shm/staging/copy.h"

namespace dscomm {
namespace {

// A long message is cut into kCellsOfMessage pieces, so that the receiver copies one out while the
// sender fills the next. The other two constants limit the length of a piece.
constexpr size_t kCellsOfMessage = 8;
constexpr size_t kLeastPieceBytes = 8192;
constexpr size_t kMostPieceBytes = 32768;

// A process has at most kFullPieceRings piece rings of full length: full rings for hundreds of
// peers would take gigabytes. Other channels get kShortPieceRing bytes, as do all for which the
// arena has no room for a full ring.
constexpr int kFullPieceRings = 8;
constexpr size_t kShortPieceRing = 256 << 10;

// Whether the arena has room for a ring. Rings are kept, so a full one must leave half of the arena
// to other uses, a short one a quarter.
bool leaves_room(const Arena& arena, size_t ring_bytes) {
  const size_t rest = ring_bytes > kShortPieceRing ? arena.size() / 2 : arena.size() / 4;
  return arena.used_bytes() + ring_bytes + rest <= arena.size();
}

// After a message of at most kPrefetchedMessageBytes, the memory of the next message is prefetched
// for ownership; in the piece ring at most kPrefetchedPieceBytes, the size of an L1 cache.
constexpr size_t kPrefetchedMessageBytes = 64 << 10;
constexpr size_t kPrefetchedPieceBytes = 32 << 10;

// A count that the peer stored longer ago than this may have left the peer's cache. The time to
// load it then does not show how far apart the caches are.
constexpr int64_t kFreshCellNs = 100'000;

// A directory of more blocks is corrupt: it would have entries for 2 million processes.
constexpr int kMostBlocks = 65536;

}  // namespace

Status ChannelDirectory::add_block() {
  DSCOMM_ASSIGN_OR_RETURN(uint64_t offset, arena_->allocate(kChannelBlockBytes));
  auto* block = reinterpret_cast<ChannelBlock*>(arena_->data() + offset);
  // Relaxed: no peer knows the block until its offset is stored below.
  block->next.store(0, std::memory_order_relaxed);
  for (size_t k = kChannelsPerBlock; k-- > 0;) {
    block->entries[k].peer_low.store(0, std::memory_order_relaxed);
    vacant_.push_back(&block->entries[k]);
  }
  std::atomic<uint64_t>& link =
      last_block_ == nullptr ? arena_->header().first_channel_block : last_block_->next;
  link.store(offset, std::memory_order_release);  // pairs with find_channel_entry()
  last_block_ = block;
  return {};
}

Result<ChannelEntry*> ChannelDirectory::take(const ArenaId& peer) {
  if (vacant_.empty()) DSCOMM_RETURN_IF_ERROR(add_block());
  ChannelEntry* entry = vacant_.back();
  vacant_.pop_back();
  // Relaxed: ordered by the release store of peer_low, by which the peer recognises its entry.
  entry->cells_offset.store(0, std::memory_order_relaxed);
  entry->buffers_offset = 0;
  entry->pieces_offset = 0;
  entry->pieces_bytes = 0;
  entry->consumed.store(0, std::memory_order_relaxed);
  entry->consumed_ns.store(0, std::memory_order_relaxed);
  entry->peer_high.store(peer.high, std::memory_order_relaxed);
  entry->peer_low.store(peer.low, std::memory_order_release);  // pairs with find_channel_entry()
  // seq_cst, and before the first cell: see ArenaHeader::channel_changes.
  arena_->header().channel_changes.fetch_add(1, std::memory_order_seq_cst);
  return entry;
}

void ChannelDirectory::vacate(ChannelEntry* entry) {
  // Relaxed: the peer is dead, so it does not look for its entry.
  entry->peer_low.store(0, std::memory_order_relaxed);
  vacant_.push_back(entry);
}

const ChannelEntry* find_channel_entry(const Peer& peer, const ArenaId& own_id) {
  // Acquire loads of the chain pair with add_block(), of peer_low with take().
  uint64_t offset = peer.header().first_channel_block.load(std::memory_order_acquire);
  for (int blocks = 0; offset != 0 && blocks < kMostBlocks; ++blocks) {
    const auto* block =
        reinterpret_cast<const ChannelBlock*>(peer.at(offset, sizeof(ChannelBlock), kPageBytes));
    if (block == nullptr) return nullptr;
    for (const ChannelEntry& entry : block->entries)
      if (entry.peer_low.load(std::memory_order_acquire) == own_id.low &&
          entry.peer_high.load(std::memory_order_relaxed) == own_id.high)
        return &entry;
    offset = block->next.load(std::memory_order_acquire);
  }
  return nullptr;
}

Status Channel::make_entry() {
  if (own_ != nullptr) return {};
  DSCOMM_ASSIGN_OR_RETURN(own_, directory_.take(peer_->address().arena));
  return {};
}

Result<PieceRing> ChannelDirectory::take_pieces(size_t channel_bytes) {
  const size_t most =
      full_rings_ < kFullPieceRings ? channel_bytes : std::min(channel_bytes, kShortPieceRing);
  size_t bytes = most / kPageBytes * kPageBytes;
  if (!leaves_room(*arena_, bytes)) bytes = std::min(bytes, kShortPieceRing);
  if (PieceRing::longest(bytes) < kLeastPieceBytes || !leaves_room(*arena_, bytes))
    return PieceRing();
  Result<uint64_t> offset = arena_->allocate(bytes);
  if (!offset.ok() && bytes > kShortPieceRing) {
    bytes = kShortPieceRing;
    offset = arena_->allocate(bytes);
  }
  if (!offset.ok()) return offset.status();
  if (bytes > kShortPieceRing) ++full_rings_;
  return PieceRing{arena_->data() + offset.value(), bytes};
}

void ChannelDirectory::give_back(const PieceRing& ring) {
  if (ring.data == nullptr) return;
  arena_->release(static_cast<uint64_t>(ring.data - arena_->data()), ring.bytes);
  if (ring.bytes > kShortPieceRing) --full_rings_;
}

Status Channel::open(size_t channel_bytes, uint64_t message_bytes) {
  if (cells_ == nullptr) {
    constexpr size_t kRingBytes = kRingCells * sizeof(Cell);
    DSCOMM_ASSIGN_OR_RETURN(uint64_t offset, arena_->allocate(kRingBytes));
    if (Status status = make_entry(); !status.ok()) {
      arena_->release(offset, kRingBytes);
      return status;
    }
    cells_ = reinterpret_cast<Cell*>(arena_->data() + offset);
    // Relaxed: ordered by the store of the offset, without which no peer finds the cells.
    for (uint32_t k = 0; k < kRingCells; ++k) cells_[k].number.store(0, std::memory_order_relaxed);
    // seq_cst: pairs with find_their_cells(); see ChannelEntry::cells_offset.
    own_->cells_offset.store(offset, std::memory_order_seq_cst);
  }
  if (message_bytes > kCellDataBytes && buffers_ == nullptr) {
    DSCOMM_ASSIGN_OR_RETURN(uint64_t offset, arena_->allocate(kRingCells * kPageBytes));
    buffers_ = arena_->data() + offset;
    own_->buffers_offset = offset;
  }
  if (message_bytes <= kPageBytes) return {};
  measures_distance_ = true;
  if (has_asked_for_pieces_) return {};
  DSCOMM_ASSIGN_OR_RETURN(pieces_, directory_.take_pieces(channel_bytes));
  has_asked_for_pieces_ = true;
  // Without a piece ring long messages use the cells' buffers, a page at a time.
  if (pieces_.data == nullptr) return {};
  own_->pieces_offset = static_cast<uint64_t>(pieces_.data - arena_->data());
  own_->pieces_bytes = pieces_.bytes;
  return {};
}

size_t Channel::cell_bytes(uint64_t message_bytes) const {
  if (message_bytes <= kCellDataBytes) return kCellDataBytes;
  if (pieces_.data == nullptr) return kPageBytes;
  const size_t even = (message_bytes / kCellsOfMessage + kPageBytes - 1) / kPageBytes * kPageBytes;
  return std::min(std::clamp(even, kLeastPieceBytes, kMostPieceBytes),
                  PieceRing::longest(pieces_.bytes));
}

bool Channel::find_theirs() {
  if (theirs_ != nullptr) return true;
  // Load half of the Dekker pair of a new channel; see ArenaHeader::channel_changes.
  uint64_t changes = peer_->header().channel_changes.load(std::memory_order_seq_cst);
  if (changes == scanned_changes_) return false;
  theirs_ = find_channel_entry(*peer_, arena_->id());
  scanned_changes_ = changes;
  return theirs_ != nullptr;
}

bool Channel::peer_sleeps() const {
  // Load half of the Dekker pair with PointToPoint::sleep_once().
  return peer_->header().doorbell_sleepers.load(std::memory_order_seq_cst) != 0;
}

void Channel::load_consumed() {
  if (!find_theirs()) return;
  // seq_cst: acquires the peer's reads of the cells; load half of the Dekker pair with its
  // consume(). A count that the peer cannot have reached is ignored.
  const auto load = [this] { return theirs_->consumed.load(std::memory_order_seq_cst); };
  const TimedLoad timed =
      measures_distance_ ? time_load(load) : TimedLoad{static_cast<int64_t>(load()), 0, 0};
  const auto consumed = static_cast<uint64_t>(timed.value);
  if (consumed <= known_consumed_ || consumed > published_) return;
  known_consumed_ = consumed;
  // The count has changed, so the load missed this core's cache and was served by the peer's.
  if (measures_distance_ &&
      timed.began_ns - theirs_->consumed_ns.load(std::memory_order_relaxed) <= kFreshCellNs)
    distance_.add(0, timed.took_ns);
}

bool Channel::is_full() {
  if (published_ - known_consumed_ > kRingCells / 2) load_consumed();
  return published_ - known_consumed_ >= kRingCells;
}

std::byte* Channel::vacant_cell(size_t bytes) {
  if (is_full()) return nullptr;
  const size_t k = published_ % kRingCells;
  if (bytes <= kCellDataBytes) return cells_[k].data;
  if (bytes <= kPageBytes) return buffers_ + k * kPageBytes;
  return own_pieces() + pieces_.place(bytes);
}

void Channel::fill(std::byte* cell, const std::byte* data, size_t bytes) {
  if (bytes > kCellDataBytes && distance_.is_far()) {
    copy(cell, data, bytes, Stores::kStreaming);
    finish_copies();
  } else if (bytes > 0) {
    std::memcpy(cell, data, bytes);
  }
}

// A seq_cst exchange waits until everything that was copied has reached this core's cache. So a run
// of cells has one exchange, for its last cell; the fence after it orders the earlier cells, too. A
// peer that sleeps at the first cell is woken early, to copy while the rest is filled.
bool Channel::publish(const CellHeader& header, bool more) {
  Cell& cell = cells_[published_ % kRingCells];
  cell.header = header;
  if (header.cell_bytes > kPageBytes) pieces_.pass(header.cell_bytes);
  if (more && published_ + 1 - known_consumed_ < kRingCells) {
    cell.number.store(++published_, std::memory_order_release);  // pairs with next_cell()
    is_in_run_ = true;
    // Relaxed: a hint.
    return (header.flags & kFirstCell) != 0 &&
           peer_->header().doorbell_sleepers.load(std::memory_order_relaxed) != 0;
  }
  // seq_cst: releases the cell to the peer's next_cell(), and is the store half of the Dekker pair
  // with its doorbell_sleepers.
  cell.number.exchange(++published_, std::memory_order_seq_cst);
  if (std::exchange(is_in_run_, false)) fence(std::memory_order_seq_cst);
  return peer_sleeps();
}

// Messages come in runs, so this prefetches for ownership the memory of a next message of this
// length. The peer has given the next cell back and reads only its number.
void Channel::end_message(uint64_t message_bytes) {
  if (message_bytes > kPrefetchedMessageBytes || is_full()) return;
  if (message_bytes > kPageBytes) {
    if (pieces_.data == nullptr || distance_.is_far())
      return;  // streaming stores need no ownership
    const size_t bytes = std::min<size_t>(message_bytes, PieceRing::longest(pieces_.bytes));
    std::byte* piece = own_pieces() + pieces_.place(bytes);
    for (size_t i = 0; i < std::min(bytes, kPrefetchedPieceBytes); i += kLinePairBytes / 2)
      prefetch_for_ownership(piece + i);
    return;
  }
  const size_t k = published_ % kRingCells;
  prefetch_for_ownership(reinterpret_cast<std::byte*>(&cells_[k].header));
  if (message_bytes <= kCellDataBytes) {
    if (message_bytes > kCellDataBytes - kLinePairBytes / 2)
      prefetch_for_ownership(&cells_[k].data[kCellDataBytes - 1]);
    return;
  }
  if (distance_.is_far()) return;
  std::byte* buffer = buffers_ + k * kPageBytes;
  for (size_t i = 0; i < message_bytes; i += kLinePairBytes / 2) prefetch_for_ownership(buffer + i);
}

// Whether the peer has made a ring to this process. Sets their_cells_invalid_ if the ring is out of
// bounds.
bool Channel::find_their_cells() {
  if (their_cells_ != nullptr || their_cells_invalid_) return true;
  if (!find_theirs()) return false;
  // seq_cst: pairs with the peer's open(); see ChannelEntry::cells_offset.
  const uint64_t offset = theirs_->cells_offset.load(std::memory_order_seq_cst);
  if (offset == 0) return false;
  their_cells_ =
      reinterpret_cast<const Cell*>(peer_->at(offset, kRingCells * sizeof(Cell), kPageBytes));
  their_cells_invalid_ = their_cells_ == nullptr;
  return true;
}

CellFlag Channel::next_flag() {
  if (!find_their_cells() || their_cells_invalid_) return {};
  return {&their_cells_[consumed_ % kRingCells].number, consumed_ + 1};
}

Result<std::optional<ArrivedCell>> Channel::next_cell() {
  if (!find_their_cells()) return std::optional<ArrivedCell>();
  const auto wrong = [this](const char* how) {
    return Status(Code::kInternal, "the channel from " + peer_->describe() + how);
  };
  constexpr const char* kOutside =
      " lies outside its memory; do all ranks run one build of dscomm?";
  if (their_cells_invalid_) return wrong(kOutside);
  const Cell& cell = their_cells_[consumed_ % kRingCells];
  // seq_cst: acquires the cell; load half of the Dekker pair with the peer's publish().
  const uint64_t number = cell.number.load(std::memory_order_seq_cst);
  if (number <= consumed_) return std::optional<ArrivedCell>();  // of the ring's last lap, or 0
  if (number != consumed_ + 1) return wrong(" counts cells that it cannot have filled");
  DSCOMM_RETURN_IF_ERROR(make_entry());  // for consume()
  ArrivedCell arrived{cell.header, cell.data};
  const size_t bytes = arrived.header.cell_bytes;
  current_piece_ = 0;
  if ((arrived.header.flags & kInPlace) != 0) stores_consumed_ns_ = true;
  if (bytes <= kCellDataBytes) return std::optional<ArrivedCell>(arrived);
  if (bytes <= kPageBytes) {
    if (their_buffers_ == nullptr)
      their_buffers_ = peer_->at(theirs_->buffers_offset, kRingCells * kPageBytes, kPageBytes);
    if (their_buffers_ == nullptr) return wrong(kOutside);
    arrived.data = their_buffers_ + consumed_ % kRingCells * kPageBytes;
    return std::optional<ArrivedCell>(arrived);
  }
  if (their_pieces_.data == nullptr) {
    const uint64_t ring_bytes = theirs_->pieces_bytes;
    their_pieces_ = {peer_->at(theirs_->pieces_offset, ring_bytes, kPageBytes), ring_bytes};
  }
  if (their_pieces_.data == nullptr) return wrong(kOutside);
  if (bytes > PieceRing::longest(their_pieces_.bytes))
    return Status(Code::kInternal,
                  "a cell of the channel from " + peer_->describe() + " says that it overflows");
  arrived.data = their_pieces_.data + their_pieces_.place(bytes);
  current_piece_ = bytes;
  stores_consumed_ns_ = true;
  return std::optional<ArrivedCell>(arrived);
}

// Stores the count every half ring: a sender that waits for room has filled a whole ring.
bool Channel::consume(bool at_once) {
  if (current_piece_ > 0) their_pieces_.pass(std::exchange(current_piece_, 0));
  if (++consumed_ % (kRingCells / 2) != 0 && !at_once) return false;
  if (stores_consumed_ns_) own_->consumed_ns.store(monotonic_ns(), std::memory_order_relaxed);
  // seq_cst: releases the reads of the cells to the peer's load_consumed(); store half of the
  // Dekker pair with its doorbell_sleepers.
  own_->consumed.exchange(consumed_, std::memory_order_seq_cst);
  return peer_sleeps();
}

void Channel::drop() {
  const auto release = [this](const void* memory, size_t bytes) {
    if (memory == nullptr) return;
    arena_->release(static_cast<uint64_t>(static_cast<const std::byte*>(memory) - arena_->data()),
                    bytes);
  };
  release(cells_, kRingCells * sizeof(Cell));
  release(buffers_, kRingCells * kPageBytes);
  directory_.give_back(pieces_);
  if (own_ != nullptr) directory_.vacate(own_);
  cells_ = nullptr;
  buffers_ = nullptr;
  pieces_ = {};
  has_asked_for_pieces_ = false;
  own_ = nullptr;
}

}  // namespace dscomm
