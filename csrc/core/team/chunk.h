// How calls are cut into chunks.
#pragma once

#include <algorithm>
#include <cstddef>

namespace dscomm {

// The number of elements in the chunk that begins at `begin`, of `count` elements in all.
inline size_t in_chunk(size_t count, size_t begin, size_t chunk) {
  return count > begin ? std::min(chunk, count - begin) : 0;
}

}  // namespace dscomm
