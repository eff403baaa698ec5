// All-gather through memory: everyone stages rounds of its own data and copies the others' out,
// each starting with its successor so that readers spread over the sources. Counts may differ by
// rank.
#include <cstring>

#include "core/shm/shm_team.h"

namespace dscomm {

Status ShmTeam::all_gather(const void* in, size_t count, DType dtype, std::span<void* const> outs,
                           std::span<const size_t> out_counts, const CallOptions& options) {
  DSCOMM_RETURN_IF_ERROR(
      check_lists("all_gather", outs.size(), out_counts.size(), static_cast<size_t>(size())));
  const size_t me = static_cast<size_t>(rank());
  DSCOMM_RETURN_IF_ERROR(check_own_count("all_gather", count, out_counts[me], rank()));
  CallRecord call = make_record(Collective::kAllGather, dtype, 0, options);
  call.own_count = count;
  DSCOMM_RETURN_IF_ERROR(lines_->begin(call, options));
  const size_t element_bytes = dtype_bytes(dtype);
  const size_t chunk = tuning_.chunk_bytes;
  const size_t bytes = count * element_bytes;
  const auto* input = static_cast<const std::byte*>(in);
  if (outs[me] != in && bytes > 0) std::memcpy(outs[me], in, bytes);

  const uint32_t own_rounds = rounds_of(bytes, chunk);
  uint32_t rounds = 1;
  for (size_t out_count : out_counts)
    rounds = std::max(rounds, rounds_of(out_count * element_bytes, chunk));
  const std::optional<uint64_t> place = find_in_pool(in, bytes);
  if (place.has_value()) {
    stage_->open_nothing();
    stage_->open_tensor(bytes, *place, kInput);
    lines_->post(own_rounds);
  } else {
    DSCOMM_RETURN_IF_ERROR(stage_->open(bytes, std::min(bytes, chunk), own_rounds));
  }
  for (uint32_t round = 0; round < rounds; ++round) {
    if (round < own_rounds && !place.has_value()) {
      DSCOMM_ASSIGN_OR_RETURN(auto* stage, stage_->fill(round));
      size_t length = round_bytes(bytes, chunk, round);
      copy(stage, input + size_t{round} * chunk, length, stores());
      post_staged(round + 1);
    }
    for (int step = 1; step < size(); ++step) {
      int k = (rank() + step) % size();
      size_t their_bytes = out_counts[static_cast<size_t>(k)] * element_bytes;
      if (round >= rounds_of(their_bytes, chunk)) continue;
      DSCOMM_RETURN_IF_ERROR(lines_->wait_posted(k, round + 1));
      if (round == 0) DSCOMM_RETURN_IF_ERROR(check_bytes(k, their_bytes));
      size_t length = round_bytes(their_bytes, chunk, round);
      DSCOMM_ASSIGN_OR_RETURN(auto* theirs,
                              stage_->read(k, round, 0, size_t{round} * chunk, length));
      if (length > 0)
        std::memcpy(static_cast<std::byte*>(outs[static_cast<size_t>(k)]) + size_t{round} * chunk,
                    theirs, length);
    }
    lines_->acknowledge(round + 1);
  }
  if (place.has_value())
    DSCOMM_RETURN_IF_ERROR(await_readers(own_rounds));
  else
    stage_->close();
  return lines_->end();
}

}  // namespace dscomm
