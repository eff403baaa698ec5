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

// A process's lines for one other process: what it says of its ring towards that one, and how far
// it has read the ring that comes from there.
struct alignas(kLineBytes) ChannelLines {
  // Whom the lines are for; low 0: nobody. low is stored last, with release, and pairs with the
  // acquire load of a peer that looks for its own id: who finds itself sees the lines reset. Ids
  // are never used again, so an entry cannot be mistaken for an earlier one.
  std::atomic<uint64_t> peer_high;
  std::atomic<uint64_t> peer_low;
  // The ring, once there is one. Plain: written before the first published, read after it.
  uint64_t cells_offset;
  uint32_t cell_bytes;  // header included
  uint32_t reserved;
  // Cells filled so far. seq_cst exchange by the owner; loads by the peer. Dekker pair with the
  // peer's ArenaHeader::doorbell_sleepers.
  alignas(kLineBytes) std::atomic<uint64_t> published;
  // Cells of the peer's ring read so far. As published.
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
