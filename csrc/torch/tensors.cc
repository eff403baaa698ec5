#include "torch/tensors.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/conj_physical.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstring>

namespace dscomm {
namespace {

struct Dimension {
  int64_t size;
  int64_t stride_bytes;
};

// The dimensions with more than one element, outermost first. Two adjacent dimensions are merged if
// one stride reaches all elements of both.
c10::SmallVector<Dimension, 6> merged_dimensions(const at::Tensor& tensor) {
  c10::SmallVector<Dimension, 6> dimensions;
  const int64_t element_bytes = static_cast<int64_t>(tensor.element_size());
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    const int64_t size = tensor.size(i), stride_bytes = tensor.stride(i) * element_bytes;
    if (size == 1) continue;
    if (!dimensions.empty() && dimensions.back().stride_bytes == size * stride_bytes) {
      dimensions.back() = {dimensions.back().size * size, stride_bytes};
    } else {
      dimensions.push_back({size, stride_bytes});
    }
  }
  return dimensions;
}

// Calls visit(strided, dense, bytes) in row-major order: for each contiguous row, or for each
// element if rows are not contiguous. ATen's copy_() would start OpenMP threads for each thread
// that calls it, and depend on that thread's grad mode.
template <typename Visit>
void walk(const at::Tensor& tensor, char* dense, Visit visit) {
  if (tensor.numel() == 0) return;
  auto dimensions = merged_dimensions(tensor);
  int64_t run_bytes = static_cast<int64_t>(tensor.element_size());
  if (!dimensions.empty() && dimensions.back().stride_bytes == run_bytes) {
    run_bytes *= dimensions.back().size;
    dimensions.pop_back();
  }
  Dimension inner = dimensions.empty() ? Dimension{1, 0} : dimensions.back();
  if (!dimensions.empty()) dimensions.pop_back();

  c10::SmallVector<int64_t, 6> index(dimensions.size(), 0);
  char* row = static_cast<char*>(tensor.data_ptr());
  for (;;) {
    char* strided = row;
    for (int64_t i = 0; i < inner.size; ++i, strided += inner.stride_bytes, dense += run_bytes)
      visit(strided, dense, run_bytes);
    int64_t d = static_cast<int64_t>(dimensions.size()) - 1;
    for (; d >= 0; --d) {
      row += dimensions[d].stride_bytes;
      if (++index[d] < dimensions[d].size) break;
      row -= dimensions[d].stride_bytes * dimensions[d].size;
      index[d] = 0;
    }
    if (d < 0) return;
  }
}

// A memcpy whose size is a compile-time constant for single elements of up to 8 bytes.
template <typename To, typename From>
void copy_run(To* to, From* from, int64_t bytes) {
  switch (bytes) {
    case 1:
      std::memcpy(to, from, 1);
      return;
    case 2:
      std::memcpy(to, from, 2);
      return;
    case 4:
      std::memcpy(to, from, 4);
      return;
    case 8:
      std::memcpy(to, from, 8);
      return;
    default:
      std::memcpy(to, from, static_cast<size_t>(bytes));
  }
}

// False if every element certainly has its own memory, else true.
bool may_overlap_itself(const at::Tensor& tensor) {
  if (tensor.numel() <= 1) return false;
  auto dimensions = merged_dimensions(tensor);
  std::sort(dimensions.begin(), dimensions.end(),
            [](const Dimension& a, const Dimension& b) { return a.stride_bytes < b.stride_bytes; });
  int64_t reach =
      static_cast<int64_t>(tensor.element_size());  // bytes that the dimensions so far span
  for (const Dimension& dimension : dimensions) {
    if (dimension.stride_bytes < reach) return true;
    reach += (dimension.size - 1) * dimension.stride_bytes;
  }
  return false;
}

struct Range {
  const char* begin;
  const char* end;
  bool intersects(const Range& other) const { return begin < other.end && other.begin < end; }
};

// The extent of a non-empty tensor in memory, in elements.
int64_t reach_of(const at::Tensor& tensor) {
  int64_t elements = 1;
  for (int64_t i = 0; i < tensor.dim(); ++i) elements += (tensor.size(i) - 1) * tensor.stride(i);
  return elements;
}

Range range_of(const at::Tensor& tensor) {
  const char* begin = static_cast<const char*>(tensor.data_ptr());
  if (tensor.numel() == 0) return {begin, begin};
  return {begin, begin + reach_of(tensor) * static_cast<int64_t>(tensor.element_size())};
}

// Applies the tensor's conjugate and negative bits to a dense copy of it; its own inverse.
void apply_bits(const at::Tensor& tensor, at::Tensor staging) {
  if (!tensor.is_conj() && !tensor.is_neg()) return;
  at::AutoDispatchBelowADInplaceOrView plain;  // keeps autograd out: staging is internal
  if (tensor.is_conj()) staging.conj_physical_();
  if (tensor.is_neg()) staging.neg_();
}

// Zeros in memory for a zero tensor (torch._efficientzerotensor, a tangent of forward-mode AD),
// which is a shape without memory.
at::Tensor with_memory(const at::Tensor& zeros, Use use, const Argument& argument) {
  if (use != Use::kRead)
    raise_value_error(argument.text() +
                      ": got a zero tensor, which has no memory to write to, expected an ordinary "
                      "tensor; tensor.clone() makes one");
  at::AutoDispatchBelowADInplaceOrView plain;
  return at::zeros(zeros.sizes(), at::TensorOptions(zeros.scalar_type()));
}

template <typename Item, typename Get>
std::vector<Item> of_each(std::span<const Buffer> buffers, Get get) {
  std::vector<Item> items;
  items.reserve(buffers.size());
  for (const Buffer& buffer : buffers) items.push_back((buffer.*get)());
  return items;
}

}  // namespace

// A storage can shrink under its tensor: FSDP and DeepSpeed free parameters that way.
void check_memory(const at::Tensor& tensor, const Argument& argument) {
  const int64_t count = tensor.numel();
  if (count == 0) return;
  // Fast path: most tensors are contiguous.
  const int64_t elements =
      tensor.storage_offset() + (tensor.is_contiguous() ? count : reach_of(tensor));
  const size_t needed = static_cast<size_t>(elements) * tensor.element_size();
  const size_t present = tensor.has_storage() ? tensor.storage().nbytes() : 0;
  if (present >= needed && tensor.storage().data() != nullptr) return;
  raise_value_error(
      "{}: got a tensor without memory: its elements end at byte {} of its storage, which "
      "holds {}; if the storage was freed, resize_() the storage first",
      argument.text(), needed, present >= needed ? 0 : present);
}

Buffer::Buffer(const at::Tensor& tensor, Use use, const Argument& argument)
    : use_(use), argument_(argument) {
  if (!tensor.defined()) raise_value_error(argument.text() + ": got an undefined tensor");
  if (!tensor.device().is_cpu())
    raise_value_error("{}: got a tensor on {}, expected one on the CPU", argument.text(),
                      tensor.device().str());
  if (tensor.layout() != at::kStrided)
    raise_type_error("{}: got a tensor of layout {}, expected a dense one (tensor.to_dense())",
                     argument.text(), c10::str(tensor.layout()));
  dtype_ = to_dtype(tensor.scalar_type(), argument);
  tensor_ = tensor._is_zerotensor() ? with_memory(tensor, use, argument) : tensor;
  check_memory(tensor_, argument);
  count_ = static_cast<size_t>(tensor_.numel());
  if (tensor_.is_contiguous() && !tensor_.is_conj() && !tensor_.is_neg()) {
    data_ = tensor_.data_ptr();
  } else {
    stage();
    verify_ = use != Use::kRead && may_overlap_itself(tensor_);
  }
}

void Buffer::stage() {
  if (staged()) return;
  staging_ = at::empty({static_cast<int64_t>(count_)}, at::TensorOptions(tensor_.scalar_type()));
  data_ = staging_.data_ptr();
}

bool Buffer::overlaps(const Buffer& other) const {
  return bytes() < other.bytes() + other.size_bytes() && other.bytes() < bytes() + size_bytes();
}

void Buffer::load() const {
  if (!staged() || use_ == Use::kWrite) return;
  walk(tensor_, bytes(),
       [](char* strided, char* dense, int64_t run) { copy_run(dense, strided, run); });
  apply_bits(tensor_, staging_);
}

void Buffer::store() const {
  if (!staged() || use_ == Use::kRead) return;
  apply_bits(tensor_, staging_);
  walk(tensor_, bytes(),
       [](char* strided, char* dense, int64_t run) { copy_run(strided, dense, run); });
}

Status Buffer::verify() const {
  if (!verify_ || use_ == Use::kRead || count_ == 0) return {};
  bool equal = true;
  walk(tensor_, bytes(), [&equal](char* strided, char* dense, int64_t run) {
    equal = equal && std::memcmp(strided, dense, static_cast<size_t>(run)) == 0;
  });
  if (equal) return {};
  return make_status(
      Code::kInvalidArgument,
      "{}: elements of this tensor of shape {} share memory (an expanded tensor stores several "
      "elements at one address; tensors of a list can overlap) and were to receive different "
      "values; pass a copy made with .clone() or .contiguous()",
      argument_.text(), c10::str(tensor_.sizes()));
}

std::vector<Buffer> make_buffers(const std::vector<at::Tensor>& tensors, Use use,
                                 const char* argument) {
  std::vector<Buffer> buffers;
  buffers.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    buffers.emplace_back(tensors[i], use, Argument{argument, static_cast<int64_t>(i)});
    check_same_dtype(buffers.front(), buffers.back());
  }
  return buffers;
}

void check_outputs(std::vector<Buffer>& outputs) {
  std::vector<std::pair<Range, Buffer*>> ranges;
  ranges.reserve(outputs.size());
  for (Buffer& output : outputs)
    if (output.count() > 0) ranges.emplace_back(range_of(output.tensor()), &output);
  std::sort(ranges.begin(), ranges.end(),
            [](const auto& a, const auto& b) { return a.first.begin < b.first.begin; });
  // An output overlaps an earlier one only if it overlaps the earlier one that reaches farthest.
  for (size_t i = 1, farthest = 0; i < ranges.size(); ++i) {
    if (ranges[i].first.begin < ranges[farthest].first.end) {
      Buffer &a = *ranges[farthest].second, &b = *ranges[i].second;
      auto status = at::get_overlap_status(a.tensor(), b.tensor());
      if (status == at::MemOverlapStatus::Full || status == at::MemOverlapStatus::Partial)
        raise_value_error("{} shares memory with {}; expected output tensors that do not overlap",
                          b.argument().text(), a.argument().text());
      // Columns of one matrix interleave without overlapping: compare the values after the call.
      for (Buffer& output : outputs) {
        output.stage();
        output.verify_when_stored();
      }
      return;
    }
    if (ranges[i].first.end > ranges[farthest].first.end) farthest = i;
  }
}

void check_same_dtype(const Buffer& a, const Buffer& b) {
  if (a.dtype() == b.dtype()) return;
  raise_type_error("{}: got dtype {}, expected {} as in {}", b.argument().text(),
                   dtype_name(b.dtype()), dtype_name(a.dtype()), a.argument().text());
}

std::vector<const void*> read_pointers(std::span<const Buffer> buffers) {
  return of_each<const void*>(buffers, &Buffer::data);
}

std::vector<void*> write_pointers(std::span<const Buffer> buffers) {
  return of_each<void*>(buffers, &Buffer::data);
}

std::vector<size_t> counts_of(std::span<const Buffer> buffers) {
  return of_each<size_t>(buffers, &Buffer::count);
}

bool stage_shared_buffers(std::span<const PartBuffers> parts) {
  struct Extent {
    Range range;
    size_t part;
    bool written;
  };
  std::vector<Extent> extents;
  for (size_t k = 0; k < parts.size(); ++k)
    for (bool written : {false, true})
      for (const Buffer& buffer : written ? parts[k].writes : parts[k].reads)
        if (buffer.count() > 0) extents.push_back({range_of(buffer.tensor()), k, written});
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return a.range.begin < b.range.begin; });
  // Parts rarely overlap. One pass shows this. It keeps the farthest-reaching extent so far, and
  // the farthest-reaching one of the other parts.
  bool apart = true;
  Extent farthest{{nullptr, nullptr}, 0, false}, of_another_part = farthest;
  for (const Extent& extent : extents) {
    const Extent& before = farthest.part == extent.part ? of_another_part : farthest;
    if (extent.range.begin < before.range.end) {
      apart = false;
      break;
    }
    if (extent.range.end > farthest.range.end) {
      if (farthest.part != extent.part) of_another_part = farthest;
      farthest = extent;
    } else if (farthest.part != extent.part && extent.range.end > of_another_part.range.end) {
      of_another_part = extent;
    }
  }
  if (apart) return false;

  bool any = false;
  for (size_t k = 0; k < parts.size(); ++k)
    for (Buffer& read : parts[k].reads) {
      const Range range = range_of(read.tensor());
      for (const Extent& extent : extents) {
        if (extent.part == k || !extent.written || !extent.range.intersects(range)) continue;
        if (read.staged()) break;
        read.stage();
        any = true;
      }
    }
  return any;
}

void load_all(std::span<const Buffer> buffers) {
  for (const Buffer& buffer : buffers) buffer.load();
}

Status store_all(std::span<const Buffer> buffers) {
  for (const Buffer& buffer : buffers) buffer.store();
  for (const Buffer& buffer : buffers) DSCOMM_RETURN_IF_ERROR(buffer.verify());
  return {};
}

}  // namespace dscomm
