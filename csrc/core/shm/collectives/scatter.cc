// Scatter through memory: in each round the root stages a piece of every other rank's block; each
// rank copies its pieces out. The root's table has the number of elements for each rank.
#include <cstring>

#include "core/shm/shm_team.h"

namespace dscomm {

Status ShmTeam::run_scatter(Inputs ins, Counts in_counts, std::byte* out, size_t count, DType dtype,
                            int root, const CallOptions&) {
  const size_t element_bytes = dtype_bytes(dtype), bytes = count * element_bytes;
  note(Collective::kScatter, "in rounds", bytes);

  if (rank() == root) {
    DSCOMM_ASSIGN_OR_RETURN(const PublishedBlocks blocks,
                            open_blocks(ins, in_counts, element_bytes, true));
    for (uint32_t round = 0; round < blocks.rounds; ++round)
      DSCOMM_RETURN_IF_ERROR(stage_round(blocks, round));
    if (out != ins[rank()] && count > 0) std::memcpy(out, ins[rank()], bytes);
    return staging_->end();
  }
  mailboxes_->post(1);
  DSCOMM_RETURN_IF_ERROR(mailboxes_->wait_posted(root, 1));
  DSCOMM_ASSIGN_OR_RETURN(const Counts table, staging_->read_table(root));
  if (table[rank()] != count)
    return mailboxes_->fail(
        Code::kMismatch,
        format_text("{} scatters {} elements to {}, whose output holds {}; make both equal",
                    mailboxes_->name_member(root), table[rank()], mailboxes_->name_member(rank()),
                    count));
  const size_t piece = piece_bytes(element_bytes, size());
  const uint32_t rounds = rounds_of(bytes, piece);
  const size_t own_begin = total_count(table.first(rank())) * element_bytes;
  for (uint32_t round = 0; round < rounds; ++round) {
    DSCOMM_RETURN_IF_ERROR(mailboxes_->wait_posted(root, round + 1));
    DSCOMM_RETURN_IF_ERROR(receive_piece(root, round, own_begin, bytes, piece, out));
    mailboxes_->acknowledge(round + 1);
  }
  return staging_->end();
}

}  // namespace dscomm
