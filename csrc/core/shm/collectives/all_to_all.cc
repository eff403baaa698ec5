// All-to-all through memory: in each round a rank stages a piece of its block for every other rank,
// and copies its own pieces out of the others' staging, starting with its successor. Blocks may
// differ in size: each rank's table has the counts that the rank sends, and a reader checks its own
// count before it copies.
#include <cstring>

#include "core/shm/shm_team.h"

namespace dscomm {

Status ShmTeam::run_all_to_all(Inputs ins, Counts in_counts, Outputs outs, Counts out_counts,
                               DType dtype, const CallOptions&) {
  const int me = rank();
  const size_t element_bytes = dtype_bytes(dtype);
  note(Collective::kAllToAll, "in rounds", total_count(in_counts) * element_bytes);
  DSCOMM_ASSIGN_OR_RETURN(const PublishedBlocks own,
                          open_blocks(ins, in_counts, element_bytes, true));
  const size_t piece = own.piece_bytes;
  const uint32_t rounds =
      std::max(own.rounds, rounds_of(std::ranges::max(out_counts) * element_bytes, piece));
  if (out_counts[me] > 0) std::memcpy(outs[me], ins[me], out_counts[me] * element_bytes);
  // For each rank k, from k's table: the byte of k's tensor where the block for this rank begins.
  std::vector<size_t> begins(outs.size(), 0);

  for (uint32_t round = 0; round < rounds; ++round) {
    DSCOMM_RETURN_IF_ERROR(stage_round(own, round));
    for (int step = 1; step < size(); ++step) {
      int k = (rank() + step) % size();
      const size_t expected = out_counts[k];
      const size_t length = round_bytes(expected * element_bytes, piece, round);
      if (round > 0 && length == 0) continue;
      DSCOMM_RETURN_IF_ERROR(mailboxes_->wait_posted(k, round + 1));
      if (round == 0) {
        DSCOMM_ASSIGN_OR_RETURN(const Counts theirs, staging_->read_table(k));
        if (theirs[me] != expected)
          return mailboxes_->fail(Code::kMismatch,
                                  format_text("{} sends {} elements to {}, which expects {}; "
                                              "make both equal",
                                              mailboxes_->name_member(k), theirs[me],
                                              mailboxes_->name_member(rank()), expected));
        begins[k] = total_count(theirs.first(me)) * element_bytes;
      }
      if (length == 0) continue;
      DSCOMM_RETURN_IF_ERROR(
          receive_piece(k, round, begins[k], expected * element_bytes, piece, outs[k]));
    }
    mailboxes_->acknowledge(round + 1);
  }
  return staging_->end();
}

}  // namespace dscomm
