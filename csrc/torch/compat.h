// Differences between the supported torches: PyPI's from 2.9 on, whose backends derive from
// c10d::Backend, and Debian's 1.13.1, whose backends derive from c10d::ProcessGroup. Newer features
// of torch 2 are detected from its headers, not from its version.
#pragma once

#include <torch/version.h>

#include <chrono>
#include <memory>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <type_traits>
#include <utility>
#include <vector>

#if TORCH_VERSION_MAJOR >= 2
#define DSCOMM_TORCH_2 1
#define DSCOMM_OVERRIDE_TORCH_2 override
#define DSCOMM_CONST_TORCH_1
#include <torch/csrc/distributed/c10d/Backend.hpp>
#else
#define DSCOMM_TORCH_2 0
#define DSCOMM_OVERRIDE_TORCH_2     // the base class lacks the method
#define DSCOMM_CONST_TORCH_1 const  // c10::Allocator::allocate() was const
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#endif

namespace dscomm {

#if DSCOMM_TORCH_2
using BackendBase = c10d::Backend;
using DistBackendError = c10::DistBackendError;
#else
using BackendBase = c10d::ProcessGroup;
using DistBackendError = c10::Error;  // raised in Python as RuntimeError
#endif

// Whether the call may return before it is done. In torch 1.13 always: its Python code waits.
template <typename Options>
bool is_asynchronous(const Options& options) {
  if constexpr (requires { options.asyncOp; })
    return options.asyncOp;
  else
    return true;
}

// The OpType of a coalesced reduce_scatter_tensor; torch 2.12 added one for it.
template <typename OpType>
constexpr OpType reduce_scatter_tensor_coalesced() {
  if constexpr (requires { OpType::REDUCE_SCATTER_TENSOR_COALESCED; })
    return OpType::REDUCE_SCATTER_TENSOR_COALESCED;
  else
    return OpType::_REDUCE_SCATTER_BASE;
}

// Describes a call to the profiler. torch 2.12 added a last argument, `asynchronous`; torch 2.13
// added the call's number, which set_sequence() sets.
template <typename Info, typename... Arguments>
std::shared_ptr<Info> make_profiled_info(bool asynchronous, Arguments&&... arguments) {
  if constexpr (std::is_constructible_v<Info, Arguments..., bool>)
    return std::make_shared<Info>(std::forward<Arguments>(arguments)..., asynchronous);
  else
    return std::make_shared<Info>(std::forward<Arguments>(arguments)...);
}
template <typename Info>
void set_sequence(Info& info, int64_t sequence, bool is_message) {
  if constexpr (requires { info.setSequenceInfo(sequence, is_message); })
    info.setSequenceInfo(sequence, is_message);
}

// The call's timeout; 0, which means the group's timeout, if the caller set none (c10d passes -1).
template <typename Options>
std::chrono::milliseconds call_timeout(const Options& options) {
  return options.timeout.count() > 0 ? options.timeout : std::chrono::milliseconds(0);
}

// The tensors that hold the factor of PREMUL_SUM; empty if the factor is a plain number.
inline std::vector<at::Tensor> premul_tensors(const c10d::NCCLPreMulSumSupplement& supplement) {
#if DSCOMM_TORCH_2
  if (!supplement.tensor_factor.defined()) return {};
  return {supplement.tensor_factor};
#else
  return supplement.tensor_factors;
#endif
}

}  // namespace dscomm
