// BlockSpace: the blocks of a SealedMemory: which are free, and how it grows.
//
// The smallest free block that fits is taken, and cut where it is larger; what is freed is joined
// with its free neighbours. Memory is taken from the kernel as the space grows, after it has been
// reserved under the limits of the machine. Not for several threads at once: its owner has a lock.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "core/base/status.h"
#include "core/shm/sealed_memory.h"

namespace dscomm {

class BlockSpace {
 public:
  BlockSpace() = default;
  // Grows by multiples of grow_bytes, because each time costs calls of the kernel.
  BlockSpace(SealedMemory memory, size_t grow_bytes);

  SealedMemory& memory() { return memory_; }
  const SealedMemory& memory() const { return memory_; }
  size_t backed_bytes() const { return backed_; }

  // All sizes are whole pages.
  std::optional<uint64_t> take(size_t bytes);
  void give(uint64_t offset, size_t bytes);
  // Whether the address space holds a free block of `bytes`, once grown.
  bool has_room(size_t bytes) const { return missing(bytes) <= memory_.size() - backed_; }
  // So that take(bytes) finds a block: as much as is missing behind a free block at the end. Where
  // has_room(). kResource where a limit forbids.
  Status grow(size_t bytes);

 private:
  size_t missing(size_t bytes) const;
  void remove(std::map<uint64_t, size_t>::iterator block);

  SealedMemory memory_;
  size_t grow_bytes_ = 0;
  uint64_t backed_ = 0;                            // bytes that fallocate has backed
  std::map<uint64_t, size_t> free_;                // offset: bytes; no two of them touch
  std::set<std::pair<size_t, uint64_t>> by_size_;  // the same, as (bytes, offset)
};

}  // namespace dscomm
