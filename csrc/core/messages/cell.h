// The cells that messages travel in, between processes of one host and of several.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dscomm {

// What stands at the head of every cell. A message is one cell or several, in order.
struct CellHeader {
  uint64_t group;       // id
  uint64_t sequence;    // of the message on this channel, from 1
  uint64_t bytes;       // of the whole message
  uint32_t port;        // of the destination: one rank of one group, see PointToPoint::open_port()
  uint32_t cell_bytes;  // of the message in this cell
  int32_t tag;
  int32_t source;  // the sender's rank in the group
  uint8_t dtype;
  uint8_t flags;  // of those below
  uint16_t reserved;
  uint32_t reserved_too;
};
static_assert(sizeof(CellHeader) == 48);
inline constexpr uint8_t kFirstCell = 1;
inline constexpr uint8_t kAbandoned = 2;  // the sender gave the message up; no more of it follows
// With kFirstCell: the whole message lies in the sender's tensor pool, at the offset that is the
// data of this cell, its only one. It is sent when the cell has been given back.
inline constexpr uint8_t kInPlace = 4;

}  // namespace dscomm
