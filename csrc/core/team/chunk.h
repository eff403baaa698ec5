// How calls are cut into chunks.
#pragma once

#include <algorithm>
#include <cstddef>

namespace dscomm {

// The number of elements, at most `chunk`, in the chunk at `begin` in a block of `count` elements.
inline size_t in_chunk(size_t count, size_t begin, size_t chunk) {
  return count > begin ? std::min(chunk, count - begin) : 0;
}

}  // namespace dscomm
