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
  // next. seq_cst exchange by the owner, after the header and the data; seq_cst loads by the
  // receiver. Dekker pair with the receiver's ArenaHeader::doorbell_sleepers.
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

// The ring of pieces: what cells of more than a page hold, one after another, each from a page's
// start on; one that does not fit in what is left begins at the front. Both sides count alike,
// since the reader sees every cell. Nothing is overwritten before its cell is given back: all cells
// of a ring, and what is left over at the end, are no longer than the ring.
//
// It is far longer than what is ever under way, so that its lines have left the caches of both
// cores by the time they are written again. A line that is still in the reader's cache is dear to
// write: of 64 KiB, 3 times as dear on Zen 4.
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
