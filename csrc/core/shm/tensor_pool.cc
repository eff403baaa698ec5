#include "core/shm/tensor_pool.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>

#include "core/base/memory_limit.h"
#include "core/shm/layout.h"

namespace dscomm {
namespace {

// A pool smaller than this is not worth its mappings.
constexpr size_t kSmallestPool = 1 << 20;
// Growing costs a call of the kernel and a look at the limits.
constexpr size_t kGrowBytes = 2 << 20;
// Left to the rest of the machine when limits are checked.
constexpr int64_t kSpareBytes = 16 << 20;

size_t round_up(size_t bytes, size_t step) { return (bytes + step - 1) / step * step; }

size_t machine_bytes() {
  return static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace

Result<std::shared_ptr<TensorPool>> TensorPool::create(size_t pool_bytes) {
  rlimit limit;
  if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
    return Status(Code::kResource, "the limit on address space (ulimit -v) leaves none for it");
  pool_bytes = std::min({pool_bytes, machine_bytes(), file_size_limit()}) / kPageBytes * kPageBytes;
  if (pool_bytes < kSmallestPool)
    return make_status(Code::kResource, "%zu bytes are too few for it (ulimit -f?)", pool_bytes);
  std::shared_ptr<TensorPool> pool(new TensorPool);
  Result<SealedMemory> memory = SealedMemory::reserve("dscomm-pool", pool_bytes);
  if (!memory.ok()) return memory.status();
  pool->memory_ = std::move(memory).value();
  return pool;
}

Result<std::byte*> TensorPool::allocate(size_t bytes) {
  if (inherited_.load(std::memory_order_relaxed))
    return Status(Code::kUnsupported, "the pool belongs to the parent of this process");
  if (bytes > size()) return make_status(Code::kResource, "the pool holds %zu bytes", size());
  bytes = round_up(std::max<size_t>(bytes, 1), kPageBytes);
  std::lock_guard lock(mutex_);
  auto fitting = by_size_.lower_bound({bytes, 0});
  if (fitting == by_size_.end()) {
    DSCOMM_RETURN_IF_ERROR(grow_locked(bytes));
    fitting = by_size_.lower_bound({bytes, 0});
  }
  const auto [block_bytes, offset] = *fitting;
  remove_free_locked(free_.find(offset));
  if (block_bytes > bytes) add_free_locked(offset + bytes, block_bytes - bytes);
  blocks_[offset] = bytes;
  used_ += bytes;
  return data() + offset;
}

void TensorPool::release(std::byte* block) {
  if (inherited_.load(std::memory_order_relaxed)) return;
  std::lock_guard lock(mutex_);
  auto known = blocks_.find(static_cast<uint64_t>(block - data()));
  DSCOMM_CHECK(known != blocks_.end(), "only what the pool has handed out is given back");
  used_ -= known->second;
  add_free_locked(known->first, known->second);
  blocks_.erase(known);
}

// So that a block of `bytes` is free: as much as is missing behind a free block at the end.
Status TensorPool::grow_locked(size_t bytes) {
  size_t at_end = 0;
  if (!free_.empty()) {
    const auto& [offset, free_bytes] = *free_.rbegin();
    if (offset + free_bytes == backed_) at_end = free_bytes;
  }
  const size_t missing = bytes - at_end;
  const size_t room = size() - backed_;
  if (missing > room)
    return make_status(Code::kResource,
                       "the pool of %zu bytes is full; raise DSCOMM_POOL_BYTES or free tensors",
                       size());
  const size_t more = std::min(round_up(missing, kGrowBytes), room);
  const MemoryLimit limit = memory_limit();
  if (static_cast<int64_t>(more) + kSpareBytes > limit.available_bytes)
    return make_status(Code::kResource, "%s leaves %lld bytes, and %zu more are needed",
                       limit.source.c_str(), static_cast<long long>(limit.available_bytes), more);
  DSCOMM_RETURN_IF_ERROR(memory_.back(backed_, backed_ + more));
  add_free_locked(backed_, more);
  backed_ += more;
  return {};
}

void TensorPool::add_free_locked(uint64_t offset, size_t bytes) {
  auto next = free_.lower_bound(offset);
  if (next != free_.begin()) {
    auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      offset = previous->first;
      bytes += previous->second;
      remove_free_locked(previous);
    }
  }
  if (next != free_.end() && offset + bytes == next->first) {
    bytes += next->second;
    remove_free_locked(next);
  }
  free_[offset] = bytes;
  by_size_.insert({bytes, offset});
}

void TensorPool::remove_free_locked(std::map<uint64_t, size_t>::iterator block) {
  by_size_.erase({block->second, block->first});
  free_.erase(block);
}

void TensorPool::after_fork_in_child() {
  inherited_.store(true, std::memory_order_relaxed);
  memory_.keep_in_child(backed_);
}

size_t TensorPool::resident_bytes() const {
  std::lock_guard lock(mutex_);
  return backed_;
}

size_t TensorPool::used_bytes() const {
  std::lock_guard lock(mutex_);
  return used_;
}

}  // namespace dscomm
