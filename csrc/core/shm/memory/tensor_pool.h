// TensorPool: memory of this process for tensors that the peers of this host read in place.
//
// One SealedMemory, which peers map as a whole when groups first meet, so that a new tensor needs
// no message. It takes memory from the kernel as it grows, after reserving it, and merges and
// reuses freed blocks, but returns nothing before the process ends (see SealedMemory).
//
// A forked child sees its parent's blocks, and maybe later writes of the parent. What the child
// writes is private. The child neither allocates from this pool nor releases to it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "core/base/status.h"
#include "core/shm/memory/block_space.h"

namespace dscomm {

class Topology;

class TensorPool {
 public:
  // pool_bytes is address space, here and in each peer; the machine's memory and RLIMIT_FSIZE may
  // reduce it. kResource if RLIMIT_AS is set: the arenas need the address space. With a topology,
  // the memory is placed on the NUMA node that this process is bound to, if any.
  static Result<std::shared_ptr<TensorPool>> create(size_t pool_bytes,
                                                    const Topology* topology = nullptr);

  int fd() const { return space_.memory().fd(); }
  std::byte* data() const { return space_.memory().data(); }
  size_t size() const { return space_.memory().size(); }

  // At least `bytes` bytes, page-aligned, zeroed or reused. kResource if the pool is full or the
  // machine has no more memory. Thread-safe.
  Result<std::byte*> allocate(size_t bytes);
  // Frees a block of allocate(). Thread-safe.
  void release(std::byte* block);

  // The offset of [pointer, pointer + bytes) in the pool, if all of it lies there.
  std::optional<uint64_t> find(const void* pointer, size_t bytes) const {
    const auto begin = reinterpret_cast<uintptr_t>(data());
    const auto place = reinterpret_cast<uintptr_t>(pointer);
    if (place < begin || place - begin > size() || bytes > size() - (place - begin)) return {};
    return place - begin;
  }

  // Call it in a forked child, on its only thread.
  void after_fork_in_child();

 private:
  TensorPool() = default;

  BlockSpace space_;
  std::mutex mutex_;
  std::unordered_map<uint64_t, size_t> blocks_;  // handed out, offset: bytes
  // Whether this is a forked child's copy of the pool. Relaxed: the child's only thread sets it.
  std::atomic<bool> inherited_{false};
};

}  // namespace dscomm
