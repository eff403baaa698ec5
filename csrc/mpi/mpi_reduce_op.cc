#include "mpi/mpi_reduce_op.h"

#include <array>
#include <mutex>
#include <utility>

#include "core/reduce/reduce.h"
#include "mpi/mpi_error.h"

namespace dscomm {
namespace {

// The function of an MPI_Op: second = first op second. MPI passes no context, so each pair of dtype
// and operator has its own function.
template <int dtype, int op>
void combine(void* first, void* second, int* count, MPI_Datatype*) {
  const void* sources[2] = {first, second};
  reduce(second, sources, 2, static_cast<size_t>(*count),
         {static_cast<DType>(dtype), static_cast<ReduceOp>(op)}, 1);
}

constexpr int kPairs = kDTypeCount * kReduceOpCount;

template <int... pair>
constexpr std::array<MPI_User_function*, kPairs> functions(std::integer_sequence<int, pair...>) {
  return {&combine<pair / kReduceOpCount, pair % kReduceOpCount>...};
}
constexpr auto kFunctions = functions(std::make_integer_sequence<int, kPairs>());

}  // namespace

MPI_Datatype mpi_datatype(DType dtype) {
  const size_t bytes = dtype_bytes(dtype);
  if (bytes == 1) return MPI_UINT8_T;
  if (bytes == 2) return MPI_UINT16_T;
  if (bytes == 4) return MPI_UINT32_T;
  return bytes == 8 ? MPI_UINT64_T : MPI_C_DOUBLE_COMPLEX;
}

Result<MPI_Op> mpi_reduce_op(DType dtype, ReduceOp op) {
  static std::mutex mutex;
  static std::array<MPI_Op, kPairs> made{};
  static std::array<bool, kPairs> is_made{};
  const auto pair = static_cast<size_t>(dtype) * kReduceOpCount + static_cast<size_t>(op);
  DSCOMM_CHECK(check_reduction({dtype, op}).ok(), "an operator that its dtype does not have");
  std::lock_guard lock(mutex);
  if (!is_made[pair]) {
    int code = MPI_Op_create(kFunctions[pair], /*commute=*/1, &made[pair]);
    if (code != MPI_SUCCESS) return mpi_error("MPI_Op_create", code);
    is_made[pair] = true;
  }
  return made[pair];
}

}  // namespace dscomm
