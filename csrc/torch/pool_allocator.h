// The allocator of tensors that the peers of this host read where they are: a TensorPool's.
#pragma once

#include <ATen/core/Tensor.h>

namespace dscomm {

// Never destroyed. Memory comes from the pool of the process's Context, and from torch's own
// allocator before there is one, where the pool is full (said once, at level info), for less than a
// page, and in a forked child: calls on such tensors go through staging. A block outlives groups
// and backends, and keeps its pool. Any thread.
c10::Allocator* pool_allocator();

// An uninitialized, contiguous CPU tensor in that memory.
at::Tensor empty_in_pool(at::IntArrayRef size, at::ScalarType dtype);

// Whether all of a dense tensor's memory lies in the pool.
bool is_in_pool(const at::Tensor& tensor);

}  // namespace dscomm
