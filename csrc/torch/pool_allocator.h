// The allocator of tensors that peers on this host read in place, from a TensorPool.
#pragma once

#include <ATen/core/Tensor.h>

namespace dscomm {

// Never destroyed; any thread may use it. Memory comes from the pool of the process's Context. It
// comes from torch's own allocator if the process (or forked child) has no Context yet or no pool,
// if the pool is full (logged once, at level info), and for less than a page. Calls on tensors
// outside the pool go through staging. A block keeps its pool alive and may outlive its group.
c10::Allocator* pool_allocator();

// An uninitialised, contiguous CPU tensor from pool_allocator().
at::Tensor empty_in_pool(at::IntArrayRef size, at::ScalarType dtype);

// Whether a dense tensor's memory lies entirely in the pool.
bool is_in_pool(const at::Tensor& tensor);

}  // namespace dscomm
