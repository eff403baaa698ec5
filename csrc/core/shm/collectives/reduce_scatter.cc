// Reduce-scatter through memory: in each round a rank stages a piece of every other rank's block,
// and reduces its own pieces from all ranks' staging directly into its output.
#include "core/shm/shm_team.h"

namespace dscomm {

Status ShmTeam::run_reduce_scatter(Inputs ins, Counts counts, std::byte* out,
                                   const Reduction& reduction, const CallOptions&) {
  const size_t element_bytes = dtype_bytes(reduction.dtype);
  note(Collective::kReduceScatter, "in rounds", total_count(counts) * element_bytes);
  const size_t own_begin = total_count(counts.first(rank())) * element_bytes;
  DSCOMM_ASSIGN_OR_RETURN(const PublishedBlocks blocks, open_blocks(ins, counts, element_bytes));
  DSCOMM_RETURN_IF_ERROR(stage_round(blocks, 0));
  for (uint32_t round = 0; round < blocks.rounds; ++round) {
    DSCOMM_RETURN_IF_ERROR(stage_round(blocks, round + 1));
    const size_t begin = size_t{round} * blocks.piece_bytes;
    const size_t length = round_bytes(counts[rank()] * element_bytes, blocks.piece_bytes, round);
    DSCOMM_RETURN_IF_ERROR(find_sources(
        static_cast<const std::byte*>(ins[rank()]) + begin, round,
        [&](int k) { return staging_->read_piece(k, round, own_begin + begin, length); }));
    if (length > 0) reduce_sources(out + begin, length / element_bytes, reduction);
    mailboxes_->acknowledge(round + 1);
  }
  return staging_->end();
}

}  // namespace dscomm
