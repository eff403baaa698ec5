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
// once. Longer data lies in the cell's buffer.
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
  // One buffer for each cell. Plain: written before the number of the first cell that uses one, and
  // read after it.
  uint64_t buffers_offset;
  uint32_t buffer_bytes;
  uint32_t reserved;
  // How many cells of the peer's ring the owner has given back, stored when it has read half a ring
  // more. seq_cst exchange by the owner; seq_cst loads by the peer. Dekker pair with the peer's
  // ArenaHeader::doorbell_sleepers.
  alignas(kLineBytes) std::atomic<uint64_t> consumed;
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
