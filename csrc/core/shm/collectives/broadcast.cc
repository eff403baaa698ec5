// Broadcast through memory: the root stages rounds, the others copy them out. The root may be ahead
// of its readers by as many rounds as there are buffers, and by as many calls as there are slots.
// But if they read its tensor in place, the root waits for them before it returns.
#include <cstring>

#include "core/shm/shm_team.h"

namespace dscomm {

Status ShmTeam::run_broadcast(std::byte* data, size_t count, DType dtype, int root,
                              const CallOptions&) {
  const size_t bytes = count * dtype_bytes(dtype);

  note(Collective::kBroadcast, bytes <= kTinyBytes ? "tiny" : "in rounds", bytes);
  if (bytes <= kTinyBytes) {
    if (rank() == root) mailboxes_->put_tiny(data, bytes);
    mailboxes_->post(1);
    if (rank() != root) {
      DSCOMM_RETURN_IF_ERROR(mailboxes_->wait_posted(root, 1));
      if (bytes > 0) std::memcpy(data, mailboxes_->slot(root).tiny, bytes);
    }
    return staging_->end();
  }

  if (rank() == root) return publish(data, count, dtype);
  mailboxes_->post(1);
  const uint32_t rounds = rounds_of(bytes, tuning_.chunk_bytes);
  for (uint32_t round = 0; round < rounds; ++round) {
    DSCOMM_RETURN_IF_ERROR(receive_round(root, round, bytes, data));
    mailboxes_->acknowledge(round + 1);
  }
  return staging_->end();
}

}  // namespace dscomm
