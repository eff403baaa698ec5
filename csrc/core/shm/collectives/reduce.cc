// Reduce through memory: the other ranks stage rounds, the root reduces them in rank order.
#include "core/shm/shm_team.h"

namespace dscomm {

Status ShmTeam::run_reduce(const std::byte* in, std::byte* out, size_t count,
                           const Reduction& reduction, int root, const CallOptions&) {
  const size_t element_bytes = dtype_bytes(reduction.dtype);
  const size_t chunk = tuning_.chunk_bytes, bytes = count * element_bytes;
  note(Collective::kReduce, "in rounds", bytes);
  if (rank() != root) return publish(in, count, reduction.dtype, root);

  mailboxes_->post(1);
  const uint32_t rounds = rounds_of(bytes, chunk);
  for (uint32_t round = 0; round < rounds; ++round) {
    const size_t begin = size_t{round} * chunk, length = round_bytes(bytes, chunk, round);
    DSCOMM_RETURN_IF_ERROR(find_sources(
        in + begin, round, [&](int k) { return staging_->read(k, round, 0, begin, length); }));
    if (length > 0) reduce_sources(out + begin, length / element_bytes, reduction);
    mailboxes_->acknowledge(round + 1);
  }
  return staging_->end();
}

}  // namespace dscomm
