// Gather through memory: the root copies the other ranks' data out, round by round. They stage each
// round, unless the root reads their tensors in place.
#include <cstring>

#include "core/shm/shm_team.h"

namespace dscomm {

Status ShmTeam::run_gather(const std::byte* in, size_t count, DType dtype, Outputs outs,
                           Counts out_counts, int root, const CallOptions&) {
  const size_t element_bytes = dtype_bytes(dtype);
  const size_t bytes = count * element_bytes;
  note(Collective::kGather, "in rounds", bytes);
  if (rank() != root) return publish(in, count, dtype, root);

  mailboxes_->post(1);
  if (outs[root] != in && bytes > 0) std::memcpy(outs[root], in, bytes);
  const uint32_t rounds =
      rounds_of(std::ranges::max(out_counts) * element_bytes, tuning_.chunk_bytes);
  for (uint32_t round = 0; round < rounds; ++round) {
    for (int k = 0; k < size(); ++k)
      if (k != root)
        DSCOMM_RETURN_IF_ERROR(receive_round(k, round, out_counts[k] * element_bytes, outs[k]));
    mailboxes_->acknowledge(round + 1);
  }
  return staging_->end();
}

}  // namespace dscomm
