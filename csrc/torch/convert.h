// From torch's words to the core's (dtypes, reductions) and from a Status to an exception.
#pragma once

#include <exception>
#include <string>

#include "core/base/status.h"
#include "core/types/dtype.h"
#include "core/types/reduce_op.h"
#include "torch/compat.h"

namespace dscomm {

// How a message names one tensor: "tensor", or "output_tensors[3]". Holds no text of its own, so
// that naming every argument costs nothing until one is wrong.
struct Argument {
  const char* name;
  int64_t index = -1;
  std::string text() const;
};

// The caller's mistake, as Python's ValueError and TypeError.
[[noreturn]] void raise_value_error(const std::string& message);
[[noreturn]] void raise_type_error(const std::string& message);

// TypeError for a dtype that dscomm does not carry.
DType to_dtype(at::ScalarType type, const Argument& argument);

// ValueError for an op that does not exist, NotImplementedError for one without a meaning for the
// dtype; both say what is allowed.
Reduction to_reduction(const c10d::ReduceOp& op, DType dtype);

// What torch calls "SUM", "AVG", ...: ValueError for another name. PREMUL_SUM, which needs a
// factor, has none.
c10d::ReduceOp reduce_op_of_name(const std::string& name);

// The exception for a status that is not OK: ValueError for what is the caller's mistake,
// NotImplementedError for what dscomm does not carry, DistBackendError for what went wrong between
// ranks. `where` says which call of which group.
std::exception_ptr to_exception(const Status& status, const std::string& where);

}  // namespace dscomm
