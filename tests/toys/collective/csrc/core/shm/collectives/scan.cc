// Scan through memory: all ranks stage rounds; each reduces those of the ranks up to itself, in
// rank order.
#include "core/reduce/reduce.h"
#include "core/shm/shm_team.h"

namespace dscomm {

Status ShmTeam::run_scan(const std::byte* in, std::byte* out, size_t count,
                         const Reduction& reduction, const CallOptions&) {
  const size_t element_bytes = dtype_bytes(reduction.dtype);
  const size_t chunk = tuning_.chunk_bytes, bytes = count * element_bytes;
  note(Collective::kScan, "in rounds", bytes);
  const uint32_t rounds = rounds_of(bytes, chunk);
  DSCOMM_RETURN_IF_ERROR(
      staging_->open({.bytes = bytes, .buffer_bytes = std::min(bytes, chunk), .rounds = rounds}));
  for (uint32_t round = 0; round < rounds; ++round) {
    const size_t begin = size_t{round} * chunk, length = round_bytes(bytes, chunk, round);
    DSCOMM_ASSIGN_OR_RETURN(auto* buffer, staging_->fill(round));
    if (length > 0) copy(buffer, in + begin, length, stores());
    post_staged(round + 1);
    DSCOMM_RETURN_IF_ERROR(find_sources(
        in + begin, round, [&](int k) { return staging_->read(k, round, 0, begin, length); }));
    if (length > 0)
      dscomm::reduce(out + begin, sources_.data(), rank() + 1, length / element_bytes, reduction,
                     rank() + 1);
    mailboxes_->acknowledge(round + 1);
  }
  return staging_->end();
}

}  // namespace dscomm
