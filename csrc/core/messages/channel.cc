#include "core/messages/channel.h"

#include <algorithm>
#include <cstring>

#include "core/base/deadline.h"
#include "core/shm/copy.h"

namespace dscomm {
namespace {

// Buffers are multiples of a page, so that what they carry is aligned like a tensor.
constexpr size_t kSmallestBuffer = kPageBytes;
constexpr size_t kLargestBuffer = size_t{1} << 31;  // buffer_bytes is 32 bits wide

// A message of several cells is cut so that the receiver copies one out while the sender fills the
// next: into this many, but none shorter than this.
constexpr size_t kCellsOfMessage = 8;
constexpr size_t kLeastCellBytes = 8192;

// How much is prefetched for ownership: of the buffer after that of a message of one cell, and of
// those after a longer message.
constexpr size_t kPrefetchedBytes = 4096;
constexpr uint64_t kPrefetchedOfLong = 16384;

// A copy of more than this, with ordinary stores, is timed. Where the peer is cache-near it runs at
// 10 GB/s and more; where it is cache-far, at 2.5 GB/s, since each line that the peer has read has
// to be asked for; streaming stores then run at 10 GB/s (Zen 4). In one of so many cells with
// streaming stores ordinary ones are tried again, as virtual cores move.
constexpr size_t kTimedBytes = 4096;
constexpr int64_t kFarBytesPerNs = 5;
constexpr uint64_t kFillsBetweenTrials = 64;

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
  lines->cells_offset.store(0, std::memory_order_relaxed);
  lines->buffers_offset = 0;
  lines->buffer_bytes = 0;
  lines->consumed.store(0, std::memory_order_relaxed);
  lines->peer_high.store(peer.high, std::memory_order_relaxed);
  lines->peer_low.store(peer.low, std::memory_order_release);  // pairs with find_channel_lines()
  // seq_cst, and before the first cell: see ArenaHeader::channel_changes.
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

Status Channel::open(size_t channel_bytes, uint64_t message_bytes) {
  if (cells_ == nullptr) {
    constexpr size_t kRingBytes = kRingCells * sizeof(Cell);
    Result<uint64_t> offset = arena_->allocate(kRingBytes);
    if (!offset.ok()) return offset.status();
    if (Status status = make_lines(); !status.ok()) {
      arena_->release(offset.value(), kRingBytes);
      return status;
    }
    cells_ = reinterpret_cast<Cell*>(arena_->data() + offset.value());
    // Relaxed: ordered before the offset, without which nobody finds them.
    for (uint32_t k = 0; k < kRingCells; ++k) cells_[k].number.store(0, std::memory_order_relaxed);
    // seq_cst: pairs with find_their_cells(); see ChannelLines::cells_offset.
    own_->cells_offset.store(offset.value(), std::memory_order_seq_cst);
  }
  return message_bytes > kCellDataBytes ? make_buffers(channel_bytes) : Status();
}

Status Channel::make_buffers(size_t channel_bytes) {
  if (buffers_ != nullptr) return {};
  const size_t wanted = channel_bytes / kRingCells / kPageBytes * kPageBytes;
  const size_t bytes = std::clamp(wanted, kSmallestBuffer, kLargestBuffer);
  Result<uint64_t> offset = arena_->allocate(kRingCells * bytes);
  if (!offset.ok()) return offset.status();
  buffers_ = arena_->data() + offset.value();
  buffer_bytes_ = bytes;
  own_->buffers_offset = offset.value();
  own_->buffer_bytes = static_cast<uint32_t>(bytes);
  return {};
}

size_t Channel::cell_bytes(uint64_t message_bytes) const {
  if (message_bytes <= kCellDataBytes) return kCellDataBytes;
  const size_t even = (message_bytes / kCellsOfMessage + kPageBytes - 1) / kPageBytes * kPageBytes;
  return std::min(std::max(even, kLeastCellBytes), buffer_bytes_);
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

void Channel::load_consumed() {
  if (!find_theirs()) return;
  // seq_cst: acquires the peer's reads of the cells, and is the load half of the Dekker pair with
  // its consume(). A count that it cannot have reached is not believed.
  const uint64_t consumed = theirs_->consumed.load(std::memory_order_seq_cst);
  if (consumed > known_consumed_ && consumed <= published_) known_consumed_ = consumed;
}

bool Channel::is_full() {
  if (published_ - known_consumed_ > kRingCells / 2) load_consumed();
  return published_ - known_consumed_ >= kRingCells;
}

std::byte* Channel::vacant_cell(size_t bytes) {
  if (is_full()) return nullptr;
  const size_t k = published_ % kRingCells;
  return bytes <= kCellDataBytes ? cells_[k].data : buffers_ + k * buffer_bytes_;
}

void Channel::fill(std::byte* cell, const std::byte* data, size_t bytes) {
  if (is_far_ && bytes > kCellDataBytes && ++far_fills_ % kFillsBetweenTrials != 0) {
    copy(cell, data, bytes, Stores::kStreaming);
    finish_copies();
    return;
  }
  if (bytes <= kTimedBytes) {
    if (bytes > 0) std::memcpy(cell, data, bytes);
    return;
  }
  const int64_t began = monotonic_ns();
  std::memcpy(cell, data, bytes);
  const bool slow = (monotonic_ns() - began) * kFarBytesPerNs > static_cast<int64_t>(bytes);
  if (slow == was_slow_) is_far_ = slow;
  was_slow_ = slow;
}

bool Channel::publish(const CellHeader& header) {
  Cell& cell = cells_[published_ % kRingCells];
  cell.header = header;
  // seq_cst: releases the cell to the peer's next_cell(), and is the store half of the Dekker pair
  // with its doorbell_sleepers.
  cell.number.exchange(++published_, std::memory_order_seq_cst);
  return peer_sleeps();
}

// Messages come in runs: the lines that one as long will be written to are taken from the peer's
// caches while this thread goes on.
void Channel::end_message(uint64_t message_bytes) {
  if (message_bytes <= kPrefetchedBytes) {
    if (!is_full()) prefetch(published_, static_cast<size_t>(message_bytes));
    return;
  }
  if (is_far_ || is_full()) return;
  const size_t of_cell = cell_bytes(message_bytes);
  uint64_t left = std::min(message_bytes, kPrefetchedOfLong);
  for (uint64_t cell = published_; left > 0 && cell - known_consumed_ < kRingCells; ++cell) {
    const size_t bytes = std::min<uint64_t>(of_cell, left);
    prefetch(cell, bytes);
    left -= bytes;
  }
}

// The peer has given the cell back, but for its number, which it looks at.
void Channel::prefetch(uint64_t cell, size_t bytes) {
  const size_t k = cell % kRingCells;
  own_ahead(reinterpret_cast<std::byte*>(&cells_[k].header));
  if (bytes <= kCellDataBytes) {
    if (bytes > kCellDataBytes - kLineBytes / 2) own_ahead(&cells_[k].data[kCellDataBytes - 1]);
    return;
  }
  if (is_far_) return;  // streaming stores own nothing
  std::byte* buffer = buffers_ + k * buffer_bytes_;
  for (size_t i = 0; i < bytes; i += kLineBytes / 2) own_ahead(buffer + i);
}

// Whether the peer has made a ring that comes here; it may lie outside its memory.
bool Channel::find_their_cells() {
  if (their_cells_ != nullptr || their_cells_lost_) return true;
  if (!find_theirs()) return false;
  // seq_cst: pairs with the peer's open(); see ChannelLines::cells_offset.
  const uint64_t offset = theirs_->cells_offset.load(std::memory_order_seq_cst);
  if (offset == 0) return false;
  their_cells_ =
      reinterpret_cast<const Cell*>(peer_->at(offset, kRingCells * sizeof(Cell), kPageBytes));
  their_cells_lost_ = their_cells_ == nullptr;
  return true;
}

CellFlag Channel::next_flag() {
  if (!find_their_cells() || their_cells_lost_) return {};
  return {&their_cells_[consumed_ % kRingCells].number, consumed_ + 1};
}

Result<std::optional<ArrivedCell>> Channel::next_cell() {
  if (!find_their_cells()) return std::optional<ArrivedCell>();
  const auto outside = [this] {
    return Status(Code::kInternal,
                  "the channel from " + peer_->describe() + " lies outside its memory");
  };
  if (their_cells_lost_) return outside();
  const Cell& cell = their_cells_[consumed_ % kRingCells];
  // seq_cst: acquires the cell, and is the load half of the Dekker pair with the peer's publish().
  const uint64_t number = cell.number.load(std::memory_order_seq_cst);
  if (number <= consumed_) return std::optional<ArrivedCell>();  // of the round before, or none
  if (number != consumed_ + 1)
    return Status(Code::kInternal, "the channel from " + peer_->describe() +
                                       " counts cells that it cannot have filled");
  DSCOMM_RETURN_IF_ERROR(make_lines());  // for consume()
  ArrivedCell arrived{cell.header, cell.data};
  if (arrived.header.cell_bytes <= kCellDataBytes) return std::optional<ArrivedCell>(arrived);
  if (their_buffers_ == nullptr) {
    const size_t bytes = theirs_->buffer_bytes;
    const std::byte* buffers = peer_->at(theirs_->buffers_offset, kRingCells * bytes, kPageBytes);
    if (buffers == nullptr || bytes < kSmallestBuffer || bytes % kPageBytes != 0) return outside();
    their_buffers_ = buffers;
    their_buffer_bytes_ = bytes;
  }
  if (arrived.header.cell_bytes > their_buffer_bytes_)
    return Status(Code::kInternal,
                  "a cell of the channel from " + peer_->describe() + " says that it overflows");
  arrived.data = their_buffers_ + consumed_ % kRingCells * their_buffer_bytes_;
  return std::optional<ArrivedCell>(arrived);
}

// A sender that waits for room has filled a whole ring, of which this stores one half or the other
// in any case.
bool Channel::consume(bool at_once) {
  if (++consumed_ % (kRingCells / 2) != 0 && !at_once) return false;
  // seq_cst: releases the reads of the cells to the peer's load_consumed(), and is the store half
  // of the Dekker pair with its doorbell_sleepers.
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
  release(buffers_, kRingCells * buffer_bytes_);
  if (own_ != nullptr) directory_.vacate(own_);
  cells_ = nullptr;
  buffers_ = nullptr;
  own_ = nullptr;
}

}  // namespace dscomm
