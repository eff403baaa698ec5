#include "core/shm/memory/tensor_pool.h"

#include <unistd.h>

#include <algorithm>

#include "core/base/round_up.h"
#include "core/shm/mailbox/layout.h"
#include "core/topology/topology.h"

namespace dscomm {
namespace {

// A pool smaller than this is not worth its mappings.
constexpr size_t kSmallestPool = 1 << 20;
// The pool grows by multiples of this: growing costs a system call and a check of the limits.
constexpr size_t kGrowBytes = 2 << 20;

size_t machine_bytes() {
  return static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace

Result<std::shared_ptr<TensorPool>> TensorPool::create(size_t pool_bytes,
                                                       const Topology* topology) {
  if (resource_limit(RLIMIT_AS) != RLIM_INFINITY)
    return Status(Code::kResource, "it needs unlimited address space (ulimit -v unlimited)");
  pool_bytes = std::min<size_t>({pool_bytes, machine_bytes(), resource_limit(RLIMIT_FSIZE)}) /
               kPageBytes * kPageBytes;
  if (pool_bytes < kSmallestPool)
    return make_status(Code::kResource,
                       "{} bytes are too few for it; raise DSCOMM_POOL_BYTES or ulimit -f",
                       pool_bytes);
  std::shared_ptr<TensorPool> pool(new TensorPool);
  DSCOMM_ASSIGN_OR_RETURN(SealedMemory memory, SealedMemory::reserve("dscomm-pool", pool_bytes));
  pool->space_ = BlockSpace(std::move(memory), kGrowBytes);
  if (topology != nullptr) topology->place_memory(pool->data(), pool_bytes);
  return pool;
}

Result<std::byte*> TensorPool::allocate(size_t bytes) {
  if (inherited_.load(std::memory_order_relaxed))
    return Status(Code::kUnsupported, "the pool belongs to the parent of this process");
  if (bytes > size())
    return make_status(Code::kResource, "more than the pool of {} bytes (DSCOMM_POOL_BYTES)",
                       size());
  bytes = round_up(std::max<size_t>(bytes, 1), kPageBytes);
  std::lock_guard lock(mutex_);
  std::optional<uint64_t> offset = space_.take(bytes);
  if (!offset) {
    if (!space_.has_room(bytes))
      return make_status(Code::kResource,
                         "the pool of {} bytes (DSCOMM_POOL_BYTES) is full; free tensors", size());
    DSCOMM_RETURN_IF_ERROR(space_.grow(bytes));
    offset = space_.take(bytes);
  }
  blocks_[*offset] = bytes;
  return data() + *offset;
}

void TensorPool::release(std::byte* block) {
  if (inherited_.load(std::memory_order_relaxed)) return;
  std::lock_guard lock(mutex_);
  auto known = blocks_.find(static_cast<uint64_t>(block - data()));
  DSCOMM_CHECK(known != blocks_.end(), "only what the pool has handed out is given back");
  space_.give(known->first, known->second);
  blocks_.erase(known);
}

void TensorPool::after_fork_in_child() {
  inherited_.store(true, std::memory_order_relaxed);
  space_.memory().keep_in_child(space_.backed_bytes());
}

}  // namespace dscomm
