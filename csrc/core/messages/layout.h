// What the channels between processes keep in the arenas, byte for byte.
//
// As core/shm/layout.h: only the owner of an arena writes it, and everything that two processes
// touch is either an atomic that names its partner, or plain memory that is written before such an
// atomic is stored and read after it is loaded.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/messages/cell.h"
#include "core/shm/layout.h"

namespace dscomm {

// One ring of cells for each ordered pair of processes, in the sender's arena.
inline constexpr uint32_t kRingCells = 16;

// What a cell has room for beside its header: a cell is two cache lines, which a reader fetches at
// once. Up to a page lies in the cell's buffer, and more than that in the ring of pieces.
inline constexpr size_t kCellDataBytes = kLineBytes - sizeof(uint64_t) - sizeof(CellHeader);

struct alignas(kLineBytes) Cell {
  // How many cells the owner had filled with this one; the receiver waits for the number that comes
  // next. seq_cst exchange by the owner, after the header and the data, or a release store where
  // the next cell follows at once; seq_cst loads by the receiver. Dekker pair with the receiver's
  // ArenaHeader::doorbell_sleepers, to which a fence after the last cell of a run adds those
  // before.
  std::atomic<uint64_t> number;
  // Plain: written before the number and read after it. Bytes of a cell that the receiver has given
  // back may be overwritten earlier, to prefetch the lines for ownership.
  CellHeader header;
  std::byte data[kCellDataBytes];
};
static_assert(sizeof(Cell) == kLineBytes);

// What a process says to one other process: where its ring towards that one lies, and how far it
// has read the ring that comes from there.
struct alignas(kLineBytes) ChannelLines {
  // Whom the lines are for; low 0: nobody. low is stored last, with release, and pairs with the
  // acquire load of a peer that looks for its own id: who finds itself sees the lines reset. Ids
  // are never used again, so an entry cannot be mistaken for an earlier one.
  std::atomic<uint64_t> peer_high;
  std::atomic<uint64_t> peer_low;
  // The ring: kRingCells of Cell; 0: there is none yet. seq_cst store by the owner once the numbers
  // of the cells are reset, before the first cell is filled; seq_cst loads by the peer, so that the
  // Dekker pair of Cell::number covers a ring that has just been made.
  std::atomic<uint64_t> cells_offset;
  // One buffer of a page for each cell, and the ring of pieces. Plain: written before the number of
  // the first cell that uses them, and read after it.
  uint64_t buffers_offset;
  uint64_t pieces_offset;
  uint64_t pieces_bytes;
  // How many cells of the peer's ring the owner has given back, stored when it has read half a ring
  // more. seq_cst exchange by the owner; seq_cst loads by the peer. Dekker pair with the peer's
  // ArenaHeader::doorbell_sleepers.
  alignas(kLineBytes) std::atomic<uint64_t> consumed;
  // When it was stored, by the clock that ranks of a host share; 0: not known. Relaxed on both
  // sides: stored right before `consumed`, and only what is measured depends on it.
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
  // Where the next piece goes, or lies.
  size_t place(size_t piece) const { return next + piece <= bytes ? next : 0; }
  void pass(size_t piece) {
    next = place(piece) + (piece + kPageBytes - 1) / kPageBytes * kPageBytes;
  }
};

// The channel directory is a chain of blocks that only grows. A block is larger than a page so that
// the arena never makes one of pages that were a group's lines, at which former members may still
// look.
inline constexpr size_t kChannelBlockBytes = 2 * kPageBytes;
inline constexpr size_t kChannelsPerBlock =
    (kChannelBlockBytes - kLineBytes) / sizeof(ChannelLines);
struct ChannelBlock {
  std::atomic<uint64_t>
      next;  // offset; 0: the last. Release store, acquire loads by scanning peers
  ChannelLines lines[kChannelsPerBlock];
};
static_assert(sizeof(ChannelBlock) <= kChannelBlockBytes);

}  // namespace dscomm
