// Tensors as a Team sees them: plain contiguous memory.
//
// A tensor that is contiguous is used where it lies. Any other (strided, transposed, expanded, with
// a conjugate or negative bit) is staged: load() fills a dense copy just before the Team reads it,
// and store() writes the result back just after the Team wrote it, both on the thread that runs the
// call, because an operation queued earlier may still be changing the tensor when the call is made.
//
// A tensor without memory is refused before anything is published: one whose storage was freed
// (`untyped_storage().resize_(0)`), and a zero tensor that the call writes.
//
// A written tensor whose elements share memory (an expanded one) is accepted if all elements that
// share a place receive the same value; store() looks, and reports kInvalidArgument otherwise.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <span>
#include <vector>

#include "core/base/status.h"
#include "core/types/dtype.h"
#include "torch/convert.h"

namespace dscomm {

enum class Use { kRead, kWrite, kReadWrite };

// ValueError for a tensor whose elements reach beyond its storage, as where that was freed.
void check_memory(const at::Tensor& tensor, const Argument& argument);

class Buffer {
 public:
  Buffer() = default;
  // Raises for a tensor that is undefined, not on the CPU, not strided, of an unknown dtype, or
  // without memory.
  // Allocates the staging, so that a lack of memory is raised on the calling thread too.
  Buffer(const at::Tensor& tensor, Use use, const Argument& argument);

  void* data() const { return data_; }
  char* bytes() const { return static_cast<char*>(data_); }
  size_t count() const { return count_; }
  size_t size_bytes() const { return count_ * dtype_bytes(dtype_); }
  DType dtype() const { return dtype_; }
  const Argument& argument() const { return argument_; }
  const at::Tensor& tensor() const { return tensor_; }
  bool staged() const { return staging_.defined(); }

  // Whether the memory that a Team would see of the two intersects.
  bool overlaps(const Buffer& other) const;
  // Goes through a dense copy from now on, so that it aliases nothing.
  void stage();
  // store() compares what it wrote with what the tensor then holds.
  void verify_when_stored() { verify_ = true; }

  // Fills the staging from the tensor, where there is one and the call reads it.
  void load() const;
  // Writes the staging to the tensor, where there is one and the call writes it.
  Status store() const;
  // The second half of store(), for a set of outputs that may share memory with each other.
  Status verify() const;

 private:
  at::Tensor tensor_;
  at::Tensor staging_;
  void* data_ = nullptr;
  size_t count_ = 0;
  DType dtype_ = DType::kUInt8;
  Use use_ = Use::kRead;
  bool verify_ = false;
  Argument argument_{""};
};

// One buffer per tensor of a list; messages name them argument[0], argument[1], ... All have the
// dtype of the first (TypeError otherwise).
std::vector<Buffer> make_buffers(const std::vector<at::Tensor>& tensors, Use use,
                                 const char* argument);

// ValueError if two of these tensors, all written by one call, share memory; where that cannot be
// seen from their strides they are compared after the call instead.
void check_outputs(std::vector<Buffer>& outputs);

// TypeError unless both have the same dtype.
void check_same_dtype(const Buffer& a, const Buffer& b);

// What a Team takes.
std::vector<const void*> read_pointers(std::span<const Buffer> buffers);
std::vector<void*> write_pointers(std::span<const Buffer> buffers);
std::vector<size_t> counts_of(std::span<const Buffer> buffers);

// The buffers of one part of a coalesced call; a buffer may be among both.
struct PartBuffers {
  std::span<Buffer> reads;
  std::span<Buffer> writes;
};

// Stages every buffer that a part reads and another part writes. If all parts are loaded before the
// first one runs, each part then reads what its tensors held when the call began. True if a buffer
// was staged.
bool separate_parts(std::span<const PartBuffers> parts);

void load_all(std::span<const Buffer> buffers);
Status store_all(std::span<const Buffer> buffers);

}  // namespace dscomm
