// One rank of an MPI: MPI_Allreduce in place, or MPI_Send and MPI_Recv. Compiled once for each MPI.
#include <mpi.h>

#include <cstdint>
#include <cstring>

#include "all_reduce.h"
#include "ping_pong.h"

namespace {

void require(int result) {
  if (result != MPI_SUCCESS) one_host::fail("MPI failed with " + std::to_string(result));
}

// The operator that users of an MPI without bfloat16 write. Rounds to nearest, ties to even.
[[maybe_unused]] void add_bfloat16(void* from, void* to, int* count, MPI_Datatype*) {
  const auto* in = static_cast<const uint16_t*>(from);
  auto* out = static_cast<uint16_t*>(to);
  for (int i = 0; i < *count; ++i) {
    const float sum = one_host::from_bfloat16(in[i]) + one_host::from_bfloat16(out[i]);
    uint32_t bits;
    std::memcpy(&bits, &sum, sizeof bits);
    out[i] = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
}

}  // namespace

int main(int count, char** arguments) {
  const one_host::Options options = one_host::parse(count, arguments);
  require(MPI_Init(&count, &arguments));
  int rank = -1;
  require(MPI_Comm_rank(MPI_COMM_WORLD, &rank));
  if (rank != options.rank) one_host::fail("MPI numbers the ranks in another order");
#ifdef MPIX_C_BF16  // Intel MPI
  const MPI_Datatype bfloat16 = MPIX_C_BF16;
  const MPI_Op sum = MPI_SUM;
#else
  const MPI_Datatype bfloat16 = MPI_UINT16_T;
  MPI_Op sum;
  require(MPI_Op_create(add_bfloat16, 1, &sum));
#endif
  one_host::Meeting meeting(options);
  if (options.op == one_host::Op::kPingPong) {
    const one_host::Messages messages{
        [](const void* data, size_t bytes, int to) {
          require(MPI_Send(data, static_cast<int>(bytes), MPI_BYTE, to, 0, MPI_COMM_WORLD));
        },
        [](void* data, size_t bytes, int from) {
          require(MPI_Recv(data, static_cast<int>(bytes), MPI_BYTE, from, 0, MPI_COMM_WORLD,
                           MPI_STATUS_IGNORE));
        }};
    one_host::measure_messages(options, meeting, messages);
    require(MPI_Finalize());
    return 0;
  }
  one_host::measure(options, meeting, [&](void* data, size_t n, one_host::DType dtype) {
    const bool is_float = dtype == one_host::DType::kFloat32;
    require(MPI_Allreduce(MPI_IN_PLACE, data, static_cast<int>(n), is_float ? MPI_FLOAT : bfloat16,
                          is_float ? MPI_SUM : sum, MPI_COMM_WORLD));
  });
  require(MPI_Finalize());
  return 0;
}
