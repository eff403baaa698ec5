// The allocator of tensors that peers on this host read in place, from a TensorPool.
#pragma once

#include <ATen/core/Tensor.h>

namespace dscomm {

// Never destroyed; any thread may use it. Memory comes from the pool of the process's Context. It
// comes from torch's own allocator before there is a Context, when the pool is full (logged once,
// at level info), for less than a page, and in a forked child; calls on tensors outside the pool go
// through staging. A block keeps its pool alive and may outlive groups and backends.
c10::Allocator* pool_allocator();

// An uninitialised, contiguous CPU tensor from pool_allocator().
at::Tensor empty_in_pool(at::IntArrayRef size, at::ScalarType dtype);

// Whether a dense tensor's memory lies entirely in the pool.
bool is_in_pool(const at::Tensor& tensor);

}  // namespace dscomm
