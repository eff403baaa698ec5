// Reduce through memory: everyone but the root stages rounds, the root reduces them in rank order.
#include "core/reduce/reduce.h"

#include <cstring>

#include "core/shm/shm_team.h"

namespace dscomm {

Status ShmTeam::reduce(const void* in, void* out, size_t count, const Reduction& reduction,
                       int root, const CallOptions& options) {
  DSCOMM_RETURN_IF_ERROR(check_reduction(reduction));
  DSCOMM_RETURN_IF_ERROR(check_root("reduce", root, size()));
  CallRecord call = make_record(Collective::kReduce, reduction, count, options);
  call.root = root;
  DSCOMM_RETURN_IF_ERROR(lines_->begin(call, options));
  const size_t element_bytes = dtype_bytes(reduction.dtype);
  const size_t chunk_count = tuning_.chunk_bytes / element_bytes;
  const uint32_t rounds = rounds_of(count, chunk_count);
  const auto* input = static_cast<const std::byte*>(in);

  if (rank() != root) {
    if (const std::optional<uint64_t> place = find_in_pool(in, count * element_bytes)) {
      stage_->open_nothing();
      stage_->open_tensor(count * element_bytes, *place, kInput);
      lines_->post(rounds);
      DSCOMM_RETURN_IF_ERROR(await_readers(rounds, root));
      return lines_->end();
    }
    DSCOMM_RETURN_IF_ERROR(
        stage_->open(count * element_bytes, std::min(count, chunk_count) * element_bytes, rounds));
    for (uint32_t round = 0; round < rounds; ++round) {
      DSCOMM_ASSIGN_OR_RETURN(auto* stage, stage_->fill(round, root));
      size_t length = round_bytes(count, chunk_count, round);
      copy(stage, input + size_t{round} * chunk_count * element_bytes, length * element_bytes,
           stores());
      post_staged(round + 1);
    }
    stage_->close();
    return lines_->end();
  }
  lines_->post(1);
  auto* output = static_cast<std::byte*>(out);
  for (uint32_t round = 0; round < rounds; ++round) {
    size_t begin = size_t{round} * chunk_count * element_bytes;
    size_t length = round_bytes(count, chunk_count, round);
    for (int k = 0; k < size(); ++k) {
      if (k == rank()) {
        sources_[static_cast<size_t>(k)] = input + begin;
        continue;
      }
      DSCOMM_RETURN_IF_ERROR(lines_->wait_posted(k, round + 1));
      DSCOMM_ASSIGN_OR_RETURN(auto* theirs,
                              stage_->read(k, round, 0, begin, length * element_bytes));
      sources_[static_cast<size_t>(k)] = theirs;
    }
    if (length > 0)
      dscomm::reduce(output + begin, sources_.data(), size(), length, reduction, size());
    lines_->acknowledge(round + 1);
  }
  return lines_->end();
}

}  // namespace dscomm
