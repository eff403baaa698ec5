// Copies into memory that peers read.
//
// An ordinary store to a cache line that a peer holds must first invalidate the peer's copy: cheap
// if both cores share the next cache level, a round trip for each line if not. Streaming
// (non-temporal) stores bypass the caches, and the peer reads from memory: far better between
// cache-far cores, far worse between cache-near ones.
#pragma once

#include <cstddef>

namespace dscomm {

enum class Stores { kOrdinary, kStreaming };

// Copies of up to this size always use ordinary stores.
inline constexpr size_t kShortCopyBytes = 512;

// The ranges must not overlap. Only finish_copies() orders streaming stores before later stores.
void copy(void* to, const void* from, size_t bytes, Stores stores);
void finish_copies();

// Prefetches a cache line for ownership: overwrites one byte of it, which must be obsolete. This
// invalidates the readers' copies while this rank goes on. (prefetchw gained nothing.)
inline void prefetch_for_ownership(std::byte* in_line) { *in_line = std::byte{0}; }

}  // namespace dscomm
