// Copies into memory that peers read.
//
// An ordinary store of a line that a peer has in its cache asks that cache first: cheap where the
// two share the next one, a round trip for each line where they do not. Streaming (non-temporal)
// stores go past the caches, and the peer reads from memory: far better between cores that share no
// cache, far worse between cores that do.
#pragma once

#include <cstddef>

namespace dscomm {

enum class Stores { kOrdinary, kStreaming };

// So little is written with ordinary stores in any case.
inline constexpr size_t kShortCopyBytes = 512;

// The two ranges do not overlap. What was copied with streaming stores is ordered before later
// stores by finish_copies() alone.
void copy(void* to, const void* from, size_t bytes, Stores stores);
void finish_copies();

// Takes a line from the readers' caches, for what this rank will write there next. The store does
// so by itself while the rank goes on, or waits; fetching the line for writing (prefetchw) gained
// nothing. The byte must be of no more use to anybody.
inline void own_ahead(std::byte* in_line) { *in_line = std::byte{0}; }

}  // namespace dscomm
