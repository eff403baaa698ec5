// All-to-all through memory: a round stages a piece of the block for every other rank; each rank
// copies the pieces that are its own out of everyone's staging, starting with its successor. Counts
// may be any that fit: each rank's table says what it sends to whom, and a reader compares before
// it copies.
#include <cstring>
#include <numeric>

#include "core/shm/shm_team.h"

namespace dscomm {

Status ShmTeam::all_to_all(std::span<const void* const> ins, std::span<const size_t> in_counts,
                           std::span<void* const> outs, std::span<const size_t> out_counts,
                           DType dtype, const CallOptions& options) {
  DSCOMM_RETURN_IF_ERROR(
      check_lists("all_to_all", ins.size(), in_counts.size(), static_cast<size_t>(size())));
  DSCOMM_RETURN_IF_ERROR(
      check_lists("all_to_all", outs.size(), out_counts.size(), static_cast<size_t>(size())));
  const size_t me = static_cast<size_t>(rank());
  DSCOMM_RETURN_IF_ERROR(check_own_count("all_to_all", in_counts[me], out_counts[me], rank()));
  CallRecord call = make_record(Collective::kAllToAll, dtype, 0, options);
  size_t longest_in = 0, longest_out = 0;
  for (size_t k = 0; k < in_counts.size(); ++k) {
    call.own_count += in_counts[k];
    longest_in = std::max(longest_in, in_counts[k]);
    longest_out = std::max(longest_out, out_counts[k]);
  }
  DSCOMM_RETURN_IF_ERROR(lines_->begin(call, options));
  const size_t element_bytes = dtype_bytes(dtype);
  const size_t piece = tuning_.chunk_bytes / (element_bytes * static_cast<size_t>(size()));
  const size_t piece_bytes = piece * element_bytes;
  const uint32_t own_rounds = rounds_of(longest_in, piece);
  const uint32_t rounds = std::max(own_rounds, rounds_of(longest_out, piece));

  const size_t stride = std::min(piece, longest_in) * element_bytes;
  const std::optional<uint64_t> place = find_in_pool(ins, in_counts, element_bytes);
  if (place.has_value()) {
    DSCOMM_RETURN_IF_ERROR(stage_->open_table());
    stage_->open_tensor(call.own_count * element_bytes, *place, kInput);
  } else {
    DSCOMM_RETURN_IF_ERROR(stage_->open_pieces(call.own_count * element_bytes, stride, own_rounds));
  }
  DSCOMM_ASSIGN_OR_RETURN(auto* table, stage_->fill_table());
  std::copy(in_counts.begin(), in_counts.end(), table);
  if (place.has_value()) lines_->post(own_rounds);
  if (out_counts[me] > 0) std::memcpy(outs[me], ins[me], out_counts[me] * element_bytes);
  // Where each rank's block for this one begins in its tensor: as its table says.
  std::vector<size_t> begins(outs.size(), 0);

  for (uint32_t round = 0; round < rounds; ++round) {
    if (round < own_rounds && !place.has_value()) {
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
    for (int step = 1; step < size(); ++step) {
      int k = (rank() + step) % size();
      size_t expected = out_counts[static_cast<size_t>(k)];
      size_t length = round_bytes(expected, piece, round);
      if (round > 0 && length == 0) continue;
      DSCOMM_RETURN_IF_ERROR(lines_->wait_posted(k, round + 1));
      if (round == 0) {
        DSCOMM_ASSIGN_OR_RETURN(auto* theirs, stage_->read_table(k));
        if (theirs[me] != expected)
          return lines_->fail(Code::kMismatch, lines_->name_member(k) + " sends " +
                                                   std::to_string(theirs[me]) + " elements to " +
                                                   lines_->name_member(rank()) +
                                                   ", which expects " + std::to_string(expected) +
                                                   "; the split sizes do not fit");
        begins[static_cast<size_t>(k)] =
            std::accumulate(theirs, theirs + me, size_t{0}) * element_bytes;
      }
      if (length == 0) continue;
      Result<const std::byte*> theirs =
          stage_->read_piece(k, round, begins[static_cast<size_t>(k)] + size_t{round} * piece_bytes,
                             length * element_bytes);
      if (!theirs.ok()) return theirs.status();
      std::memcpy(
          static_cast<std::byte*>(outs[static_cast<size_t>(k)]) + size_t{round} * piece_bytes,
          theirs.value(), length * element_bytes);
    }
    lines_->acknowledge(round + 1);
  }
  // Each reads the block for it, and then says no more than that.
  for (int k = 0; k < size() && place.has_value(); ++k)
    DSCOMM_RETURN_IF_ERROR(await_readers(rounds_of(in_counts[static_cast<size_t>(k)], piece), k));
  stage_->close();
  return lines_->end();
}

}  // namespace dscomm
