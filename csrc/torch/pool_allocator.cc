#include "torch/pool_allocator.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>

#include "core/base/log.h"
#include "core/engine/context.h"
#include "torch/compat.h"

namespace dscomm {
namespace {

// A tensor's block of the pool.
struct Block {
  std::shared_ptr<TensorPool> pool;
  std::byte* data;
};

void release_block(void* context) {
  auto* block = static_cast<Block*>(context);
  block->pool->release(block->data);
  delete block;
}

void log_once(const Status& why_not) {
  // Relaxed: only the first thread to set it logs, and it guards no data.
  static std::atomic<bool> told{false};
  if (!told.exchange(true, std::memory_order_relaxed))
    log_line(LogLevel::kInfo,
             "a tensor that peers would read in place has ordinary memory, as have those that find "
             "no place later on: {}",
             why_not.message());
}

class PoolAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) DSCOMM_CONST_TORCH_1 override {
    std::shared_ptr<TensorPool> pool = bytes < kPageBytes ? nullptr : Context::process_pool();
    if (pool == nullptr) return c10::GetCPUAllocator()->allocate(bytes);
    Result<std::byte*> data = pool->allocate(bytes);
    if (!data.ok()) {
      log_once(data.status());
      return c10::GetCPUAllocator()->allocate(bytes);
    }
    return {data.value(), new Block{std::move(pool), data.value()}, &release_block,
            c10::Device(c10::DeviceType::CPU)};
  }

#if DSCOMM_TORCH_2
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
#endif
};

}  // namespace

c10::Allocator* pool_allocator() {
  static auto* allocator = new PoolAllocator;
  return allocator;
}

at::Tensor empty_in_pool(at::IntArrayRef size, at::ScalarType dtype) {
  return at::detail::empty_generic(size, pool_allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::CPU), dtype, {});
}

bool is_in_pool(const at::Tensor& tensor) {
  std::shared_ptr<TensorPool> pool = Context::process_pool();
  return pool != nullptr && tensor.is_cpu() && tensor.layout() == at::kStrided &&
         tensor.numel() > 0 &&
         pool->find(tensor.storage().data(), tensor.storage().nbytes()).has_value();
}

}  // namespace dscomm
