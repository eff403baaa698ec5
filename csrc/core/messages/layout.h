// The memory layout of the channels in the arenas: a contract between processes.
//
// As in core/shm/mailbox/layout.h, only the owner of an arena writes it. Data that two processes
// touch is an atomic, whose comment names the access that it pairs with, or plain memory. Plain
// memory is written before such an atomic is stored, and read after that atomic is loaded. In a
// Dekker pair, each side stores its word, then loads the other's: at least one sees the other's.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/messages/cell.h"
#include "core/shm/mailbox/layout.h"

namespace dscomm {

// Each ordered pair of processes has one ring of cells, in the sender's arena.
inline constexpr uint32_t kRingCells = 16;

// Data bytes of a cell, which is two cache lines that a reader fetches together. Longer data lies
// in the cell's buffer (up to a page) or in the piece ring.
inline constexpr size_t kCellDataBytes = kLinePairBytes - sizeof(uint64_t) - sizeof(CellHeader);

struct alignas(kLinePairBytes) Cell {
  // How many cells the owner has filled, including this one; the receiver polls for the next count.
  // Stored after header and data by Channel::publish(): by a release store if the sender fills the
  // next cell at once (in a run of cells), else by a seq_cst exchange. A fence follows at the end
  // of a run. The receiver polls by relaxed loads; next_cell() loads seq_cst. Dekker pair with the
  // receiver's ArenaHeader::doorbell_sleepers.
  std::atomic<uint64_t> number;
  // Not atomic: written before `number` and read after it. Once the receiver has given the cell
  // back, the owner may overwrite bytes of it at any time, to prefetch its cache lines for
  // ownership.
  CellHeader header;
  std::byte data[kCellDataBytes];
};
static_assert(sizeof(Cell) == kLinePairBytes);

// An entry of the channel directory, which a process makes for one peer: where its ring to the peer
// lies, and how far it has read the peer's ring.
struct alignas(kLinePairBytes) ChannelEntry {
  // The peer's arena id; low 0: vacant. Release store of low, after all else; acquire loads by the
  // peer, which then sees a reset entry. Ids are never reused, so no old entry matches.
  std::atomic<uint64_t> peer_high;
  std::atomic<uint64_t> peer_low;
  // The offset of the ring, kRingCells of Cell; 0: none yet. seq_cst store by the owner after it
  // has reset the numbers of the cells and before it fills the first; seq_cst loads by the peer, so
  // that the Dekker pair of Cell::number covers a new ring.
  std::atomic<uint64_t> cells_offset;
  // One page of buffer for each cell, and the piece ring. Plain: written before the number of the
  // first cell that uses them, and read after it.
  uint64_t buffers_offset;
  uint64_t pieces_offset;
  uint64_t pieces_bytes;
  // How many cells of the peer's ring the owner has given back; stored every half ring, or at once
  // if the peer waits for it. seq_cst exchange by the owner; seq_cst loads by the peer. Dekker pair
  // with the peer's ArenaHeader::doorbell_sleepers.
  alignas(kLinePairBytes) std::atomic<uint64_t> consumed;
  // When `consumed` was stored, by CLOCK_MONOTONIC; 0: unknown. Relaxed on both sides: stored right
  // before `consumed`, and used only to measure the distance.
  std::atomic<int64_t> consumed_ns;
};

// The piece ring holds the data of cells of more than a page. Pieces lie one after another, each at
// the start of a page; a piece that does not fit at the end goes to the front. Sender and receiver
// compute the same positions, because the receiver sees every cell in order. No unread piece is
// overwritten: a ring is at least kRingCells + 1 times as long as its longest piece.
//
// The ring is much longer than the data under way, so that its cache lines have left the private
// caches of both cores before they are written again. Writing a cache line that is still in the
// reader's cache is expensive: on Zen 4 a message of 64 KiB took three times as long.
struct PieceRing {
  const std::byte* data = nullptr;
  size_t bytes = 0;
  size_t next = 0;

  static size_t longest(size_t ring_bytes) {
    return ring_bytes / (kRingCells + 1) / kPageBytes * kPageBytes;
  }
  // The position of the next piece.
  size_t place(size_t piece) const { return next + piece <= bytes ? next : 0; }
  void pass(size_t piece) {
    next = place(piece) + (piece + kPageBytes - 1) / kPageBytes * kPageBytes;
  }
};

// The channel directory is a chain of blocks that only grows, because a peer may search it at any
// time.
inline constexpr size_t kChannelBlockBytes = 2 * kPageBytes;
inline constexpr size_t kChannelsPerBlock =
    (kChannelBlockBytes - kLinePairBytes) / sizeof(ChannelEntry);
struct ChannelBlock {
  std::atomic<uint64_t>
      next;  // offset; 0: the last. Release store by the owner, acquire loads by peers
  ChannelEntry entries[kChannelsPerBlock];
};
static_assert(sizeof(ChannelBlock) <= kChannelBlockBytes);

}  // namespace dscomm
