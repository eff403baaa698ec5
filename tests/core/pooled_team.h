// PooledTeam: a Team that copies its callers' tensors into a pool, at odd offsets, and overwrites
// them as soon as a call returns. So any test of a Team becomes a test of reading in place.
#pragma once

#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "core/shm/memory/tensor_pool.h"
#include "core/team/team.h"

namespace dscomm::test {

class PooledTeam final : public Team {
 public:
  // A random `share` of the calls use the pool; each rank draws independently.
  PooledTeam(std::unique_ptr<Team> inner, std::shared_ptr<TensorPool> pool, double share)
      : inner_(std::move(inner)),
        pool_(std::move(pool)),
        share_(share),
        random_(static_cast<unsigned>(inner_->rank())) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  uint64_t finished_calls() const override { return inner_->finished_calls(); }
  std::string describe() const override { return "pooled " + inner_->describe(); }

  void abort(const Status& cause) override { inner_->abort(cause); }
  Status failure() override { return inner_->failure(); }

 private:
  Status run_all_reduce(const std::byte* in, std::byte* out, size_t count,
                        const Reduction& reduction, const CallOptions& options) override {
    if (!draw()) return inner_->all_reduce(in, out, count, reduction, options);
    Tensor tensor(*this, in, count * dtype_bytes(reduction.dtype));
    // Also with separate input and output; the output then stays the caller's.
    void* result = in == out ? tensor.data() : out;
    Status status = inner_->all_reduce(tensor.data(), result, count, reduction, options);
    if (in == out) tensor.copy_to(out);
    return status;
  }
  Status run_broadcast(std::byte* buffer, size_t count, DType dtype, int root,
                       const CallOptions& options) override {
    if (!draw()) return inner_->broadcast(buffer, count, dtype, root, options);
    Tensor tensor(*this, buffer, count * dtype_bytes(dtype));
    Status status = inner_->broadcast(tensor.data(), count, dtype, root, options);
    tensor.copy_to(buffer);
    return status;
  }
  Status run_reduce(const std::byte* in, std::byte* out, size_t count, const Reduction& reduction,
                    int root, const CallOptions& options) override {
    if (!draw()) return inner_->reduce(in, out, count, reduction, root, options);
    Tensor tensor(*this, in, count * dtype_bytes(reduction.dtype));
    return inner_->reduce(tensor.data(), out, count, reduction, root, options);
  }
  Status run_all_gather(const std::byte* in, size_t count, DType dtype, Outputs outs,
                        Counts out_counts, const CallOptions& options) override {
    if (!draw()) return inner_->all_gather(in, count, dtype, outs, out_counts, options);
    Tensor tensor(*this, in, count * dtype_bytes(dtype));
    return inner_->all_gather(tensor.data(), count, dtype, outs, out_counts, options);
  }
  Status run_reduce_scatter(Inputs ins, Counts counts, std::byte* out, const Reduction& reduction,
                            const CallOptions& options) override {
    if (!draw()) return inner_->reduce_scatter(ins, counts, out, reduction, options);
    Tensor tensor(*this, ins, counts, dtype_bytes(reduction.dtype));
    const bool is_own = out == ins[static_cast<size_t>(rank())];
    void* result = is_own ? tensor.block(rank()) : out;
    Status status = inner_->reduce_scatter(tensor.blocks(), counts, result, reduction, options);
    if (is_own)
      std::memcpy(out, result, counts[static_cast<size_t>(rank())] * dtype_bytes(reduction.dtype));
    return status;
  }
  Status run_gather(const std::byte* in, size_t count, DType dtype, Outputs outs, Counts out_counts,
                    int root, const CallOptions& options) override {
    if (!draw()) return inner_->gather(in, count, dtype, outs, out_counts, root, options);
    Tensor tensor(*this, in, count * dtype_bytes(dtype));
    return inner_->gather(tensor.data(), count, dtype, outs, out_counts, root, options);
  }
  Status run_scatter(Inputs ins, Counts in_counts, std::byte* out, size_t count, DType dtype,
                     int root, const CallOptions& options) override {
    if (!draw() || ins.empty())
      return inner_->scatter(ins, in_counts, out, count, dtype, root, options);
    Tensor tensor(*this, ins, in_counts, dtype_bytes(dtype));
    return inner_->scatter(tensor.blocks(), in_counts, out, count, dtype, root, options);
  }
  Status run_all_to_all(Inputs ins, Counts in_counts, Outputs outs, Counts out_counts, DType dtype,
                        const CallOptions& options) override {
    if (!draw()) return inner_->all_to_all(ins, in_counts, outs, out_counts, dtype, options);
    Tensor tensor(*this, ins, in_counts, dtype_bytes(dtype));
    return inner_->all_to_all(tensor.blocks(), in_counts, outs, out_counts, dtype, options);
  }
  Status run_barrier(const CallOptions& options) override { return inner_->barrier(options); }

  // A copy of a caller's data that ends like a user's tensor: overwritten, then freed.
  class Tensor {
   public:
    Tensor(PooledTeam& team, const void* from, size_t bytes) : team_(team), bytes_(bytes) {
      take();
      if (bytes > 0) std::memcpy(data(), from, bytes);
    }
    Tensor(PooledTeam& team, std::span<const void* const> from, std::span<const size_t> counts,
           size_t element_bytes)
        : team_(team) {
      for (size_t count : counts) bytes_ += count * element_bytes;
      take();
      std::byte* block = data();
      for (size_t k = 0; k < from.size(); ++k) {
        const size_t bytes = counts[k] * element_bytes;
        if (bytes > 0) std::memcpy(block, from[k], bytes);
        blocks_.push_back(block);
        block += bytes;
      }
    }
    ~Tensor() {
      // After a failed call a member may still read it, and then sees the failure. tests/spin
      // verifies that; for ThreadSanitizer it is a race.
      if (team_.failure().ok()) std::memset(data(), 0x5A, bytes_);
      team_.pool_->release(memory_);
    }
    Tensor(const Tensor&) = delete;
    Tensor& operator=(const Tensor&) = delete;

    std::byte* data() const { return memory_ + offset_; }
    std::span<const void* const> blocks() const { return blocks_; }
    void* block(int rank) const { return const_cast<void*>(blocks_[static_cast<size_t>(rank)]); }
    void copy_to(void* to) const {
      if (bytes_ > 0) std::memcpy(to, data(), bytes_);
    }

   private:
    void take() {
      memory_ = team_.pool_->allocate(bytes_ + 1024).value();
      offset_ = 16 * (team_.random_() % 64);  // a part of a tensor; elements have up to 16 bytes
    }

    PooledTeam& team_;
    size_t bytes_ = 0;
    std::byte* memory_ = nullptr;
    size_t offset_ = 0;
    std::vector<const void*> blocks_;
  };

  bool draw() { return std::uniform_real_distribution<>(0, 1)(random_) < share_; }

  std::unique_ptr<Team> inner_;
  std::shared_ptr<TensorPool> pool_;
  const double share_;
  std::mt19937 random_;
};

}  // namespace dscomm::test
