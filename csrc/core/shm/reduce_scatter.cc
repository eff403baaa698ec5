// Reduce-scatter through memory: a round stages a piece of every other rank's block; each rank
// reduces its own pieces from all ranks' staging, straight into its output.
#include <cstring>
#include <numeric>

#include "core/reduce/reduce.h"
#include "core/shm/shm_team.h"

namespace dscomm {

Status ShmTeam::reduce_scatter(std::span<const void* const> ins, std::span<const size_t> counts,
                               void* out, const Reduction& reduction, const CallOptions& options) {
  DSCOMM_RETURN_IF_ERROR(check_reduction(reduction));
  DSCOMM_RETURN_IF_ERROR(
      check_lists("reduce_scatter", ins.size(), counts.size(), static_cast<size_t>(size())));
  size_t total = 0, longest = 0;
  for (size_t count : counts) {
    total += count;
    longest = std::max(longest, count);
  }
  CallRecord call = make_record(Collective::kReduceScatter, reduction, total, options);
  call.digest = hash_counts(counts);
  DSCOMM_RETURN_IF_ERROR(lines_->begin(call, options));

  const size_t element_bytes = dtype_bytes(reduction.dtype);
  const size_t piece = tuning_.chunk_bytes / (element_bytes * static_cast<size_t>(size()));
  const size_t piece_bytes = piece * element_bytes;
  const uint32_t rounds = rounds_of(longest, piece);
  const size_t me = static_cast<size_t>(rank());
  const auto* own_input = static_cast<const std::byte*>(ins[me]);
  auto* output = static_cast<std::byte*>(out);
  const size_t stride = std::min(piece, longest) * element_bytes;
  const std::optional<uint64_t> place = find_in_pool(ins, counts, element_bytes);
  const size_t own_begin =
      std::accumulate(counts.begin(), counts.begin() + rank(), size_t{0}) * element_bytes;
  if (place.has_value()) {
    stage_->open_nothing();
    stage_->open_tensor(total * element_bytes, *place, kInput);
    lines_->post(rounds);
  } else {
    DSCOMM_RETURN_IF_ERROR(stage_->open_pieces(total * element_bytes, stride, rounds));
  }

  auto stage_round = [&](uint32_t round) -> Status {
    if (place.has_value()) return {};
    DSCOMM_ASSIGN_OR_RETURN(auto* stage, stage_->fill(round));
    for (size_t k = 0; k < counts.size(); ++k) {
      size_t length = round_bytes(counts[k], piece, round);
      if (k == me || length == 0) continue;
      copy(stage + k * stride, static_cast<const std::byte*>(ins[k]) + size_t{round} * piece_bytes,
           length * element_bytes, stores());
    }
    post_staged(round + 1);
    return {};
  };

  DSCOMM_RETURN_IF_ERROR(stage_round(0));
  for (uint32_t round = 0; round < rounds; ++round) {
    if (round + 1 < rounds) DSCOMM_RETURN_IF_ERROR(stage_round(round + 1));
    const size_t length = round_bytes(counts[me], piece, round);
    for (int k = 0; k < size(); ++k) {
      if (k == rank()) {
        sources_[me] = own_input + size_t{round} * piece_bytes;
        continue;
      }
      DSCOMM_RETURN_IF_ERROR(lines_->wait_posted(k, round + 1));
      DSCOMM_ASSIGN_OR_RETURN(auto* theirs,
                              stage_->read_piece(k, round, own_begin + size_t{round} * piece_bytes,
                                                 length * element_bytes));
      sources_[static_cast<size_t>(k)] = theirs;
    }
    if (length > 0)
      dscomm::reduce(output + size_t{round} * piece_bytes, sources_.data(), size(), length,
                     reduction, size());
    lines_->acknowledge(round + 1);
  }
  if (place.has_value())
    DSCOMM_RETURN_IF_ERROR(await_readers(rounds));
  else
    stage_->close();
  return lines_->end();
}

}  // namespace dscomm
