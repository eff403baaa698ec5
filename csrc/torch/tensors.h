// Gives a Team plain contiguous memory for each tensor.
//
// A contiguous tensor is used in place, unless buffers of a call overlap. Any other one (strided,
// expanded, with a conjugate or negative bit) is staged: load() fills a dense copy just before the
// Team reads it, and store() writes the result back just after. In a collective both run on the
// thread that runs it, because an operation queued before it may still be changing the tensor.
//
// A tensor without memory is refused before peers see the call: one whose storage was freed
// (`untyped_storage().resize_(0)`), and a zero tensor (see math_bits.cc) that the call would write.
//
// A written tensor whose elements share memory (an expanded one) is accepted if elements at the
// same address get the same value; verify() checks this, and otherwise returns kInvalidArgument.
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

// Raises ValueError for a tensor that reaches beyond its storage, such as one that was freed.
void check_memory(const at::Tensor& tensor, const Argument& argument);

class Buffer {
 public:
  Buffer() = default;
  // Raises for a tensor that is undefined, not on the CPU, not strided, of an unsupported dtype, or
  // without memory. Allocates the staging, so that a lack of memory raises here.
  Buffer(const at::Tensor& tensor, Use use, const Argument& argument);

  void* data() const { return data_; }
  char* bytes() const { return static_cast<char*>(data_); }
  size_t count() const { return count_; }
  size_t size_bytes() const { return count_ * dtype_bytes(dtype_); }
  DType dtype() const { return dtype_; }
  const Argument& argument() const { return argument_; }
  const at::Tensor& tensor() const { return tensor_; }
  bool staged() const { return staging_.defined(); }

  // Whether the two buffers overlap in the memory that a Team would access.
  bool overlaps(const Buffer& other) const;
  // From now on, data() is a dense copy of the tensor, which overlaps nothing.
  void stage();
  // verify() will compare the tensor with what store() wrote.
  void verify_when_stored() { verify_ = true; }

  // Fills the staging from the tensor, if it is staged and the call reads it.
  void load() const;
  // Writes the staging to the tensor, if it is staged and the call writes it.
  void store() const;
  // After store() of all outputs, which may share memory: kInvalidArgument if a value was lost.
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

// One buffer per tensor; messages name them argument[0], argument[1], ... Raises TypeError unless
// all have the dtype of the first.
std::vector<Buffer> make_buffers(const std::vector<at::Tensor>& tensors, Use use,
                                 const char* argument);

// Raises ValueError if two tensors that one call writes share memory. If strides cannot tell, as
// for columns of one matrix, each output is received in separate staging memory. When all have been
// copied out, Buffer::verify() finds an overlap by the values.
void check_outputs(std::vector<Buffer>& outputs);

// Raises TypeError unless both have the same dtype.
void check_same_dtype(const Buffer& a, const Buffer& b);

// The buffers as arguments of a Team's calls.
std::vector<const void*> read_pointers(std::span<const Buffer> buffers);
std::vector<void*> write_pointers(std::span<const Buffer> buffers);
std::vector<size_t> counts_of(std::span<const Buffer> buffers);

// The buffers of one part of a coalesced call; a buffer may be in both lists.
struct PartBuffers {
  std::span<Buffer> reads;
  std::span<Buffer> writes;
};

// Stages every buffer that one part reads and another part writes, and returns whether it staged
// any. If all parts are loaded before the first one runs, each then reads the values from before
// the call.
bool stage_shared_buffers(std::span<const PartBuffers> parts);

void load_all(std::span<const Buffer> buffers);
Status store_all(std::span<const Buffer> buffers);

}  // namespace dscomm
