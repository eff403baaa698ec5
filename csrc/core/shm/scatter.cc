// Scatter through memory: a round stages a piece of every other rank's block on the root; each rank
// copies its own pieces out. The root's table says how many elements each rank is to get.
#include <cstring>
#include <numeric>

#include "core/shm/shm_team.h"

namespace dscomm {

Status ShmTeam::scatter(std::span<const void* const> ins, std::span<const size_t> in_counts,
                        void* out, size_t count, DType dtype, int root,
                        const CallOptions& options) {
  DSCOMM_RETURN_IF_ERROR(check_root("scatter", root, size()));
  const size_t me = static_cast<size_t>(rank());
  if (rank() == root) {
    DSCOMM_RETURN_IF_ERROR(
        check_lists("scatter", ins.size(), in_counts.size(), static_cast<size_t>(size())));
    DSCOMM_RETURN_IF_ERROR(check_own_count("scatter", count, in_counts[me], rank()));
  }
  CallRecord call = make_record(Collective::kScatter, dtype, 0, options);
  call.root = root;
  call.own_count = count;
  DSCOMM_RETURN_IF_ERROR(lines_->begin(call, options));
  const size_t element_bytes = dtype_bytes(dtype);
  const size_t piece = tuning_.chunk_bytes / (element_bytes * static_cast<size_t>(size()));
  const size_t piece_bytes = piece * element_bytes;
  auto* output = static_cast<std::byte*>(out);

  if (rank() == root) {
    size_t longest = 0;
    for (size_t in_count : in_counts) longest = std::max(longest, in_count);
    const uint32_t rounds = rounds_of(longest, piece);
    const size_t stride = std::min(piece, longest) * element_bytes;
    const std::optional<uint64_t> place = find_in_pool(ins, in_counts, element_bytes);
    if (place.has_value()) {
      DSCOMM_RETURN_IF_ERROR(stage_->open_table());
      stage_->open_tensor(longest * element_bytes, *place, kInput);
    } else {
      DSCOMM_RETURN_IF_ERROR(stage_->open_pieces(longest * element_bytes, stride, rounds));
    }
    DSCOMM_ASSIGN_OR_RETURN(auto* table, stage_->fill_table());
    std::copy(in_counts.begin(), in_counts.end(), table);
    if (place.has_value()) lines_->post(rounds);
    for (uint32_t round = 0; round < rounds && !place.has_value(); ++round) {
      DSCOMM_ASSIGN_OR_RETURN(auto* stage, stage_->fill(round));
      for (size_t k = 0; k < in_counts.size(); ++k) {
        size_t length = round_bytes(in_counts[k], piece, round);
        if (k == me || length == 0) continue;
        copy(stage + k * stride,
             static_cast<const std::byte*>(ins[k]) + size_t{round} * piece_bytes,
             length * element_bytes, stores());
      }
      post_staged(round + 1);
    }
    if (output != ins[me] && count > 0) std::memcpy(output, ins[me], count * element_bytes);
    // Each reads the block for it, and then says no more than that.
    for (int k = 0; k < size() && place.has_value(); ++k)
      DSCOMM_RETURN_IF_ERROR(await_readers(rounds_of(in_counts[static_cast<size_t>(k)], piece), k));
    stage_->close();
    return lines_->end();
  }
  lines_->post(1);
  DSCOMM_RETURN_IF_ERROR(lines_->wait_posted(root, 1));
  DSCOMM_ASSIGN_OR_RETURN(auto* table, stage_->read_table(root));
  if (table[me] != count)
    return lines_->fail(Code::kMismatch, lines_->name_member(root) + " scatters " +
                                             std::to_string(table[me]) + " elements to " +
                                             lines_->name_member(rank()) + ", whose output holds " +
                                             std::to_string(count));
  const uint32_t rounds = rounds_of(count, piece);
  const size_t own_begin = std::accumulate(table, table + me, size_t{0}) * element_bytes;
  for (uint32_t round = 0; round < rounds; ++round) {
    DSCOMM_RETURN_IF_ERROR(lines_->wait_posted(root, round + 1));
    size_t length = round_bytes(count, piece, round);
    DSCOMM_ASSIGN_OR_RETURN(auto* theirs,
                            stage_->read_piece(root, round, own_begin + size_t{round} * piece_bytes,
                                               length * element_bytes));
    if (length > 0)
      std::memcpy(output + size_t{round} * piece_bytes, theirs, length * element_bytes);
    lines_->acknowledge(round + 1);
  }
  return lines_->end();
}

}  // namespace dscomm
