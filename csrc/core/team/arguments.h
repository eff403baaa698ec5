// What every Team checks of its arguments before it publishes anything. All give kInvalidArgument,
// with the collective, what was got and what is allowed. And how calls are cut into chunks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include "core/base/status.h"

namespace dscomm {

// How many of `count` elements are in the chunk that begins at `begin`.
inline size_t in_chunk(size_t count, size_t begin, size_t chunk) {
  return count > begin ? std::min(chunk, count - begin) : 0;
}

// 0 <= root < size.
Status check_root(const char* collective, int root, int size);

// A list of buffers and its list of counts have `expected` entries each: one for every rank, or
// none where only the root passes lists.
Status check_lists(const char* collective, size_t buffer_count, size_t count_count,
                   size_t expected);

// The same for lists with an entry for every rank; and this rank's entry is `own_count` elements.
Status check_lists(const char* collective, size_t buffer_count, std::span<const size_t> counts,
                   size_t own_count, int rank, int size);

}  // namespace dscomm
