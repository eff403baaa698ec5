// All-reduce of sparse COO tensors.
//
// Ranks have entries at different positions, so nothing can be reduced in place. All ranks gather
// the shapes and numbers of entries, then the indices, then the values, as three parts of one call.
// Each rank then adds up the ranks' tensors in rank order, which gives the same bits everywhere.
#pragma once

#include <ATen/core/Tensor.h>

#include "core/team/team.h"
#include "torch/convert.h"

namespace dscomm {

struct SparseAllReduceBody {
  at::Tensor tensor;
  Reduction reduction;

  SparseAllReduceBody(const at::Tensor& sparse, const c10d::ReduceOp& op);
  DType dtype() const { return reduction.dtype; }
  size_t count() const { return static_cast<size_t>(tensor._values().numel()); }
  Status operator()(Team& team, const CallOptions& options) const;
};

}  // namespace dscomm
