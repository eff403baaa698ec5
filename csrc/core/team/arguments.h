// Argument checks of all Teams, made before anything is published. Each returns kInvalidArgument
// and names the collective, the value and the allowed values. Also: how calls are cut into chunks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include "core/base/status.h"

namespace dscomm {

// The number of elements in the chunk that begins at `begin`, of `count` elements in all.
inline size_t in_chunk(size_t count, size_t begin, size_t chunk) {
  return count > begin ? std::min(chunk, count - begin) : 0;
}

// 0 <= root < size.
Status check_root(const char* collective, int root, int size);

// A list of buffers and its list of counts have `expected` entries each: one for each rank, or none
// on ranks other than the root.
Status check_lists(const char* collective, size_t buffer_count, size_t count_count,
                   size_t expected);

// The same for lists with one entry for each rank. This rank's entry must be `own_count`.
Status check_lists(const char* collective, size_t buffer_count, std::span<const size_t> counts,
                   size_t own_count, int rank, int size);

}  // namespace dscomm
