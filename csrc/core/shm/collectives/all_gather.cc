// All-gather through memory: each rank stages its data in rounds and copies the others' rounds out,
// starting with its successor so that readers spread over the sources. Counts may differ by rank.
#include <cstring>

#include "core/shm/shm_team.h"

namespace dscomm {

Status ShmTeam::run_all_gather(const std::byte* in, size_t count, DType dtype, Outputs outs,
                               Counts out_counts, const CallOptions&) {
  const size_t element_bytes = dtype_bytes(dtype);
  const size_t bytes = count * element_bytes;
  note(Collective::kAllGather, "in rounds", bytes);
  if (outs[rank()] != in && bytes > 0) std::memcpy(outs[rank()], in, bytes);

  const uint32_t rounds =
      rounds_of(std::ranges::max(out_counts) * element_bytes, tuning_.chunk_bytes);
  const void* const block = in;
  DSCOMM_ASSIGN_OR_RETURN(const PublishedBlocks own,
                          open_blocks({&block, 1}, {&count, 1}, element_bytes));
  for (uint32_t round = 0; round < rounds; ++round) {
    DSCOMM_RETURN_IF_ERROR(stage_round(own, round));
    for (int step = 1; step < size(); ++step) {
      const int k = (rank() + step) % size();
      DSCOMM_RETURN_IF_ERROR(receive_round(k, round, out_counts[k] * element_bytes, outs[k]));
    }
    mailboxes_->acknowledge(round + 1);
  }
  return staging_->end();
}

}  // namespace dscomm
