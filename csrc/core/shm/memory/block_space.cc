#include "core/shm/memory/block_space.h"

#include <algorithm>
#include <iterator>

#include "core/base/memory_reservation.h"
#include "core/base/round_up.h"

namespace dscomm {

std::optional<uint64_t> BlockSpace::take(size_t bytes) {
  auto fitting = by_size_.lower_bound({bytes, 0});
  if (fitting == by_size_.end()) return {};
  const auto [block_bytes, offset] = *fitting;
  remove(free_.find(offset));
  if (block_bytes > bytes) give(offset + bytes, block_bytes - bytes);
  return offset;
}

void BlockSpace::give(uint64_t offset, size_t bytes) {
  auto next = free_.lower_bound(offset);
  if (next != free_.begin()) {
    auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      offset = previous->first;
      bytes += previous->second;
      remove(previous);
    }
  }
  if (next != free_.end() && offset + bytes == next->first) {
    bytes += next->second;
    remove(next);
  }
  free_[offset] = bytes;
  by_size_.insert({bytes, offset});
}

void BlockSpace::remove(std::map<uint64_t, size_t>::iterator block) {
  by_size_.erase({block->second, block->first});
  free_.erase(block);
}

size_t BlockSpace::missing(size_t bytes) const {
  if (free_.empty()) return bytes;
  const auto& [offset, free_bytes] = *free_.rbegin();
  return offset + free_bytes == backed_ ? bytes - std::min(bytes, free_bytes) : bytes;
}

Status BlockSpace::grow(size_t bytes) {
  const size_t more =
      std::min<size_t>(round_up(missing(bytes), grow_bytes_), memory_.size() - backed_);
  DSCOMM_ASSIGN_OR_RETURN(MemoryReservation reservation, MemoryReservation::make(more));
  DSCOMM_RETURN_IF_ERROR(memory_.back(backed_, backed_ + more, &reservation));
  give(backed_, more);
  backed_ += more;
  return {};
}

}  // namespace dscomm
