// TensorPool: memory of this process from which tensors are allocated so that the peers of this
// host can read them where they are.
//
// One SealedMemory, of which peers map all when groups first meet, so that a new tensor needs no
// word to anybody. Memory is taken from the kernel as the pool grows, after it has been reserved. A
// block that is freed is joined with its neighbours and used again; the kernel takes nothing back
// before the process ends (see SealedMemory).
//
// A forked child sees its parent's blocks as they were and go on to be, and what it writes there is
// its own; it neither allocates from this pool nor gives back to it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "core/base/status.h"
#include "core/shm/block_space.h"

namespace dscomm {

class Topology;

class TensorPool {
 public:
  // pool_bytes is address space, here and in every peer; less where this machine has less memory or
  // RLIMIT_FSIZE says so. kResource where RLIMIT_AS limits address space at all: it is needed for
  // the arenas. With a topology, its memory is asked of the NUMA node to which this process is
  // bound, where there is one.
  static Result<std::shared_ptr<TensorPool>> create(size_t pool_bytes,
                                                    const Topology* topology = nullptr);

  int fd() const { return space_.memory().fd(); }
  std::byte* data() const { return space_.memory().data(); }
  size_t size() const { return space_.memory().size(); }

  // At least `bytes` bytes at a page's boundary, zeroed or used before. kResource when the pool is
  // full or the machine has no more memory. Any thread.
  Result<std::byte*> allocate(size_t bytes);
  // A block that allocate() returned. Any thread.
  void release(std::byte* block);

  // Where in the pool [pointer, pointer + bytes) lies, if all of it does.
  std::optional<uint64_t> find(const void* pointer, size_t bytes) const {
    const auto begin = reinterpret_cast<uintptr_t>(data());
    const auto place = reinterpret_cast<uintptr_t>(pointer);
    if (place < begin || place - begin > size() || bytes > size() - (place - begin)) return {};
    return place - begin;
  }

  // In a forked child, by its only thread.
  void after_fork_in_child();

  // Bytes taken from the kernel so far, and those of them that are handed out.
  size_t resident_bytes() const;
  size_t used_bytes() const;

 private:
  TensorPool() = default;

  BlockSpace space_;
  mutable std::mutex mutex_;
  size_t used_ = 0;                              // bytes handed out
  std::unordered_map<uint64_t, size_t> blocks_;  // handed out, offset: bytes
  // Whether this is a child's copy of its parent's pool. Relaxed: set by the child's only thread.
  std::atomic<bool> inherited_{false};
};

}  // namespace dscomm
