// BlockSpace: allocates blocks of a SealedMemory.
//
// Takes the smallest free block that fits and splits it; merges freed blocks with free neighbours.
// Grows by reserving memory under the machine's limits and then taking it. Not thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "core/base/status.h"
#include "core/shm/memory/sealed_memory.h"

namespace dscomm {

class BlockSpace {
 public:
  BlockSpace() = default;
  // Grows in multiples of grow_bytes, because each growth costs system calls.
  BlockSpace(SealedMemory memory, size_t grow_bytes)
      : memory_(std::move(memory)), grow_bytes_(grow_bytes) {}

  SealedMemory& memory() { return memory_; }
  const SealedMemory& memory() const { return memory_; }
  size_t backed_bytes() const { return backed_; }

  // The offset of a block; nothing if no free block fits: then call grow(). Sizes are whole pages.
  std::optional<uint64_t> take(size_t bytes);
  void give(uint64_t offset, size_t bytes);
  // Whether grow(bytes) finds enough address space.
  bool has_room(size_t bytes) const { return missing(bytes) <= memory_.size() - backed_; }
  // Takes memory from the kernel: at least what take(bytes) needs beyond a free block at the end.
  // Requires has_room(bytes). kResource if a limit forbids it.
  Status grow(size_t bytes);

 private:
  size_t missing(size_t bytes) const;
  void remove(std::map<uint64_t, size_t>::iterator block);

  SealedMemory memory_;
  size_t grow_bytes_ = 0;
  uint64_t backed_ = 0;                            // bytes that fallocate has backed
  std::map<uint64_t, size_t> free_;                // offset: bytes; never adjacent
  std::set<std::pair<size_t, uint64_t>> by_size_;  // the same blocks as (bytes, offset)
};

}  // namespace dscomm
