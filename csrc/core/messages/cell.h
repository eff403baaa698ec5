// The cells that messages travel in, between processes of one host and of several.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dscomm {

// Point-to-point: one ring of cells for each ordered pair of processes, in the sender's arena.
inline constexpr uint32_t kChannelCells = 8;

// At the start of every cell; what the cell carries follows it. Plain memory, written before
// ChannelLines::published and read after it.
struct CellHeader {
  uint64_t group;       // id
  uint64_t sequence;    // of the message on this channel, from 1
  uint64_t count;       // elements of the whole message
  uint64_t bytes;       // of the whole message
  uint32_t cell_bytes;  // of it in this cell
  int32_t tag;
  int32_t source;  // the sender's rank in the group
  uint8_t dtype;
  uint8_t flags;  // kFirstCell, kAbandoned
  uint16_t reserved;
  uint64_t unused[2];
};
static_assert(sizeof(CellHeader) == 64);
inline constexpr uint8_t kFirstCell = 1;
inline constexpr uint8_t kAbandoned = 2;  // the sender gave the message up; no more of it follows

}  // namespace dscomm
