// Gather through memory: everyone but the root stages rounds, the root copies them out.
#include <cstring>

#include "core/shm/shm_team.h"

namespace dscomm {

Status ShmTeam::gather(const void* in, size_t count, DType dtype, std::span<void* const> outs,
                       std::span<const size_t> out_counts, int root, const CallOptions& options) {
  DSCOMM_RETURN_IF_ERROR(check_root("gather", root, size()));
  const size_t me = static_cast<size_t>(rank());
  if (rank() == root) {
    DSCOMM_RETURN_IF_ERROR(
        check_lists("gather", outs.size(), out_counts.size(), static_cast<size_t>(size())));
    DSCOMM_RETURN_IF_ERROR(check_own_count("gather", count, out_counts[me], rank()));
  }
  CallRecord call = make_record(Collective::kGather, dtype, 0, options);
  call.root = root;
  call.own_count = count;
  DSCOMM_RETURN_IF_ERROR(lines_->begin(call, options));
  const size_t element_bytes = dtype_bytes(dtype);
  const size_t chunk = tuning_.chunk_bytes;
  const size_t bytes = count * element_bytes;
  const auto* input = static_cast<const std::byte*>(in);

  if (rank() != root) {
    const uint32_t rounds = rounds_of(bytes, chunk);
    if (const std::optional<uint64_t> place = find_in_pool(in, bytes)) {
      stage_->open_nothing();
      stage_->open_tensor(bytes, *place, kInput);
      lines_->post(rounds);
      DSCOMM_RETURN_IF_ERROR(await_readers(rounds, root));
      return lines_->end();
    }
    DSCOMM_RETURN_IF_ERROR(stage_->open(bytes, std::min(bytes, chunk), rounds));
    for (uint32_t round = 0; round < rounds; ++round) {
      DSCOMM_ASSIGN_OR_RETURN(auto* stage, stage_->fill(round, root));
      size_t length = round_bytes(bytes, chunk, round);
      copy(stage, input + size_t{round} * chunk, length, stores());
      post_staged(round + 1);
    }
    stage_->close();
    return lines_->end();
  }
  lines_->post(1);
  if (outs[me] != in && bytes > 0) std::memcpy(outs[me], in, bytes);
  uint32_t rounds = 1;
  for (size_t out_count : out_counts)
    rounds = std::max(rounds, rounds_of(out_count * element_bytes, chunk));
  for (uint32_t round = 0; round < rounds; ++round) {
    for (int k = 0; k < size(); ++k) {
      size_t their_bytes = out_counts[static_cast<size_t>(k)] * element_bytes;
      if (k == rank() || round >= rounds_of(their_bytes, chunk)) continue;
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
  return lines_->end();
}

}  // namespace dscomm
