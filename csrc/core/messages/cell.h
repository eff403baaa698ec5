// The cells that carry messages, within a host and between hosts.
#pragma once

#include <cstdint>

namespace dscomm {

// The head of every cell. A message is one or more cells, in order.
struct CellHeader {
  uint64_t group;       // id
  uint64_t sequence;    // of the message on this channel, from 1
  uint64_t bytes;       // of the whole message
  uint32_t port;        // of the destination rank in its group, see PointToPoint::open_port()
  uint32_t cell_bytes;  // bytes of the message in this cell
  int32_t tag;
  int32_t source;  // the sender's rank in the group
  uint8_t dtype;
  uint8_t flags;  // kFirstCell, kAbandoned, kInPlace
  uint16_t reserved;
  uint32_t reserved_too;
};
static_assert(sizeof(CellHeader) == 48);
inline constexpr uint8_t kFirstCell = 1;
inline constexpr uint8_t kAbandoned = 2;  // the sender gave up the message; no more of it follows
// With kFirstCell: the message's only cell, whose data is the message's offset in the sender's
// tensor pool. The send is done when the receiver has given the cell back.
inline constexpr uint8_t kInPlace = 4;

}  // namespace dscomm
