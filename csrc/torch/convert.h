// Converts torch's dtypes and reductions to dscomm's, and a Status to an exception.
#pragma once

#include <exception>
#include <string>

#include "core/base/format.h"
#include "core/base/status.h"
#include "core/types/dtype.h"
#include "core/types/reduce_op.h"
#include "torch/compat.h"

namespace dscomm {

// The name of a tensor in a message: "tensor", or "output_tensors[3]". The text is made on demand.
struct Argument {
  const char* name;
  int64_t index = -1;
  std::string text() const;
};

// Raise Python's ValueError and TypeError, for a mistake of the caller.
[[noreturn]] void raise_value_error(const std::string& message);
[[noreturn]] void raise_type_error(const std::string& message);
// Like raise_value_error() above, with a message made by format_text().
template <typename First, typename... Rest>
[[noreturn]] void raise_value_error(fmt::format_string<First, Rest...> format, First&& first,
                                    Rest&&... rest) {
  raise_value_error(format_text(format, std::forward<First>(first), std::forward<Rest>(rest)...));
}
template <typename First, typename... Rest>
[[noreturn]] void raise_type_error(fmt::format_string<First, Rest...> format, First&& first,
                                   Rest&&... rest) {
  raise_type_error(format_text(format, std::forward<First>(first), std::forward<Rest>(rest)...));
}

// Raises TypeError for a dtype that dscomm does not support.
DType to_dtype(at::ScalarType type, const Argument& argument);

// Raises ValueError for an unknown op, and NotImplementedError for an op that is undefined for the
// dtype; both messages name the alternatives.
Reduction to_reduction(const c10d::ReduceOp& op, DType dtype);

// The operation by torch's name ("SUM", "AVG", ...). Raises ValueError for any other name,
// including PREMUL_SUM, which needs a factor.
c10d::ReduceOp reduce_op_of_name(const std::string& name);

// The exception for a status that is not OK: ValueError for a mistake of the caller,
// NotImplementedError for an unsupported operation, DistBackendError for any other failure.
// `where` names the call and its group.
std::exception_ptr to_exception(const Status& status, const std::string& where);

}  // namespace dscomm
