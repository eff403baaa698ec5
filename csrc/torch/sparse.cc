#include "torch/sparse.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sparse_coo_tensor.h>

#include <algorithm>
#include <span>
#include <string>

#include "core/base/format.h"
#include "torch/tensors.h"

namespace dscomm {
namespace {

constexpr size_t kMostDimensions = 12;  // keeps a Header within two cache lines

// Sent by each rank before its data.
struct Header {
  int64_t entries = 0;
  int64_t sparse_dimensions = 0;
  int64_t dimensions = 0;
  int64_t dtype = 0;
  int64_t sizes[kMostDimensions] = {};

  bool same_shape(const Header& other) const {
    return sparse_dimensions == other.sparse_dimensions && dimensions == other.dimensions &&
           dtype == other.dtype && std::equal(sizes, sizes + kMostDimensions, other.sizes);
  }
  std::string text() const {
    const auto count = std::clamp<int64_t>(dimensions, 0, kMostDimensions);
    return format_text("{}[{}] with {} sparse dimensions", dtype_name(static_cast<DType>(dtype)),
                       join_text(std::span(sizes, count), ", "), sparse_dimensions);
  }
};
constexpr size_t kHeaderElements = sizeof(Header) / sizeof(int64_t);

CallOptions part_of(const CallOptions& options, uint32_t part) {
  CallOptions part_options = options;
  part_options.part = part;
  part_options.part_count = 3;
  return part_options;
}

// One tensor from each rank; their numbers of elements may differ.
struct Gathered {
  std::vector<at::Tensor> pieces;

  Status fill(Team& team, const at::Tensor& mine, DType dtype, const CallOptions& options) {
    std::vector<void*> pointers;
    std::vector<size_t> counts;
    for (at::Tensor& piece : pieces) {
      pointers.push_back(piece.data_ptr());
      counts.push_back(static_cast<size_t>(piece.numel()));
    }
    return team.all_gather(mine.data_ptr(), static_cast<size_t>(mine.numel()), dtype, pointers,
                           counts, options);
  }
};

}  // namespace

SparseAllReduceBody::SparseAllReduceBody(const at::Tensor& sparse, const c10d::ReduceOp& op)
    : tensor(sparse) {
  if (!sparse.device().is_cpu())
    raise_value_error("tensor: got a sparse tensor on {}, expected one on the CPU",
                      sparse.device().str());
  if (sparse.dim() > static_cast<int64_t>(kMostDimensions))
    raise_value_error("tensor: got a sparse tensor of {} dimensions, expected at most {}",
                      sparse.dim(), kMostDimensions);
  check_memory(sparse._indices(), {"indices of tensor"});
  check_memory(sparse._values(), {"values of tensor"});
  reduction = to_reduction(op, to_dtype(sparse.scalar_type(), {"tensor"}));
  // A sparse tensor's missing entries are zeros, which only a sum can ignore.
  if (reduction.op != ReduceOp::kSum)
    raise_value_error("op: got {} for a sparse tensor, expected SUM", reduce_op_name(reduction.op));
}

Status SparseAllReduceBody::operator()(Team& team, const CallOptions& options) const {
  at::AutoDispatchBelowADInplaceOrView plain;  // autograd must not record the operators below
  (void)options.deadline.remaining_ns();       // starts the deadline of all three parts
  const auto ranks = static_cast<size_t>(team.size());
  // fp16 and bf16 are summed in fp32 and rounded once, as for dense tensors. So coalesce() adds up
  // this rank's own entries with the same index in fp32, too.
  const at::ScalarType type = tensor.scalar_type();
  const bool is_short = type == at::kHalf || type == at::kBFloat16;
  const DType sum_dtype = is_short ? DType::kFloat32 : reduction.dtype;
  const at::Tensor mine = (is_short ? tensor.to(at::kFloat) : tensor).coalesce();
  const at::Tensor indices = mine._indices().contiguous(), values = mine._values().contiguous();

  std::vector<Header> headers(ranks);
  Header& header = headers[static_cast<size_t>(team.rank())];
  header.entries = values.size(0);
  header.sparse_dimensions = mine.sparse_dim();
  header.dimensions = mine.dim();
  header.dtype = static_cast<int64_t>(reduction.dtype);
  std::copy(mine.sizes().begin(), mine.sizes().end(), header.sizes);
  std::vector<void*> pointers;
  for (Header& one : headers) pointers.push_back(&one);
  const std::vector<size_t> counts(ranks, kHeaderElements);
  DSCOMM_RETURN_IF_ERROR(team.all_gather(&header, kHeaderElements, DType::kInt64, pointers, counts,
                                         part_of(options, 0)));
  for (size_t k = 0; k < ranks; ++k) {
    if (headers[k].same_shape(header) && headers[k].entries >= 0) continue;
    // All ranks compare the same headers, so all find the mismatch, and the group ends.
    Status status =
        make_status(Code::kMismatch,
                    "rank {} has a sparse tensor of {}, rank {} one of {}; every rank must pass "
                    "the same shape, dtype and number of sparse dimensions",
                    k, headers[k].text(), team.rank(), header.text());
    team.abort(status);
    return team.failure();
  }

  Gathered all_indices, all_values;
  for (const Header& one : headers) {
    all_indices.pieces.push_back(
        at::empty({header.sparse_dimensions, one.entries}, indices.options()));
    std::vector<int64_t> shape = values.sizes().vec();
    shape[0] = one.entries;
    all_values.pieces.push_back(at::empty(shape, values.options()));
  }
  DSCOMM_RETURN_IF_ERROR(all_indices.fill(team, indices, DType::kInt64, part_of(options, 1)));
  DSCOMM_RETURN_IF_ERROR(all_values.fill(team, values, sum_dtype, part_of(options, 2)));

  at::Tensor sum;
  for (size_t k = 0; k < ranks; ++k) {
    at::Tensor one = at::sparse_coo_tensor(all_indices.pieces[k], all_values.pieces[k],
                                           mine.sizes(), values.options().layout(at::kSparse));
    one._coalesced_(true);  // coalesced by its sender
    sum = k == 0 ? one : sum.add(one).coalesce();
  }
  tensor.copy_(sum);
  return {};
}

}  // namespace dscomm
