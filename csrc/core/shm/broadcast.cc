// Broadcast through memory: the root stages rounds, everyone else copies them out. The root runs
// ahead of its readers by as many rounds, and calls, as there are buffers and slots; one whose
// tensor is read in place waits for them.
#include <cstring>

#include "core/shm/shm_team.h"

namespace dscomm {

Status ShmTeam::broadcast(void* buffer, size_t count, DType dtype, int root,
                          const CallOptions& options) {
  DSCOMM_RETURN_IF_ERROR(check_root("broadcast", root, size()));
  CallRecord call = make_record(Collective::kBroadcast, dtype, count, options);
  call.root = root;
  DSCOMM_RETURN_IF_ERROR(lines_->begin(call, options));
  auto* data = static_cast<std::byte*>(buffer);
  const size_t bytes = count * dtype_bytes(dtype);

  if (bytes <= kTinyBytes) {
    if (rank() == root) lines_->put_tiny(data, bytes);
    lines_->post(1);
    if (rank() != root) {
      DSCOMM_RETURN_IF_ERROR(lines_->wait_posted(root, 1));
      if (bytes > 0) std::memcpy(data, lines_->slot(root).tiny, bytes);
    }
    return lines_->end();
  }

  const size_t chunk = tuning_.chunk_bytes;
  const uint32_t rounds = rounds_of(bytes, chunk);
  const std::optional<uint64_t> place = find_in_pool(data, bytes);
  if (rank() == root && place.has_value()) {
    stage_->open_nothing();
    stage_->open_tensor(bytes, *place, kInput);
    lines_->post(rounds);
    DSCOMM_RETURN_IF_ERROR(await_readers(rounds));
    return lines_->end();
  }
  if (rank() == root) {
    DSCOMM_RETURN_IF_ERROR(stage_->open(bytes, std::min(bytes, chunk), rounds));
    for (uint32_t round = 0; round < rounds; ++round) {
      DSCOMM_ASSIGN_OR_RETURN(auto* stage, stage_->fill(round));
      copy(stage, data + size_t{round} * chunk, round_bytes(bytes, chunk, round), stores());
      post_staged(round + 1);
    }
    stage_->close();
    return lines_->end();
  }
  lines_->post(1);
  for (uint32_t round = 0; round < rounds; ++round) {
    DSCOMM_RETURN_IF_ERROR(lines_->wait_posted(root, round + 1));
    const size_t begin = size_t{round} * chunk, length = round_bytes(bytes, chunk, round);
    DSCOMM_ASSIGN_OR_RETURN(auto* stage, stage_->read(root, round, 0, begin, length));
    std::memcpy(data + begin, stage, length);
    lines_->acknowledge(round + 1);
  }
  return lines_->end();
}

}  // namespace dscomm
