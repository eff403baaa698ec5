// All-reduce through memory, by size:
//
//   tiny      what fits into the line beside the sequence travels with it: one hand-over;
//   one shot  everyone stages everything, everyone reads all the others and reduces;
//   chunked   reduce-scatter and all-gather, chunk by chunk: each rank reduces its slice of the
//   chunk
//             from all ranks' staging, publishes the result, and gathers the others' slices, while
//             the next chunk has already been staged.
//
// The size decides alone, so all ranks choose alike. No closing barrier: a buffer is reused when
// its readers have said that they are done.
#include <cstring>

#include "core/reduce/reduce.h"
#include "core/shm/shm_team.h"

namespace dscomm {
namespace {

// The slice of rank k of `count` elements, cut at cache lines so that no two ranks write one.
struct Slice {
  size_t begin, length;
};
Slice slice_of(size_t count, int ranks, int k, size_t element_bytes) {
  size_t line = std::max<size_t>(64 / element_bytes, 1);
  size_t lines = (count + line - 1) / line;
  size_t per_rank = (lines + static_cast<size_t>(ranks) - 1) / static_cast<size_t>(ranks) * line;
  size_t begin = std::min(count, per_rank * static_cast<size_t>(k));
  return {begin, std::min(count, begin + per_rank) - begin};
}

// Phases of the chunked form. A rank stages chunk 0, then for each chunk c: stages c + 1, reduces
// c, gathers c. In the order in which they are posted: staged 0, staged 1, reduced 0, staged 2, ...
constexpr uint32_t staged_phase(uint32_t chunk) { return chunk == 0 ? 1 : 2 * chunk; }
constexpr uint32_t reduced_phase(uint32_t chunk) { return 2 * chunk + 3; }
// Buffers: input and result of a chunk take turns.
constexpr uint32_t input_round(uint32_t chunk) { return 2 * chunk; }
constexpr uint32_t result_round(uint32_t chunk) { return 2 * chunk + 1; }

}  // namespace

Status ShmTeam::all_reduce(const void* in, void* out, size_t count, const Reduction& reduction,
                           const CallOptions& options) {
  DSCOMM_RETURN_IF_ERROR(check_reduction(reduction));
  DSCOMM_RETURN_IF_ERROR(
      lines_->begin(make_record(Collective::kAllReduce, reduction, count, options), options));
  size_t bytes = count * dtype_bytes(reduction.dtype);
  if (bytes <= kTinyBytes) return all_reduce_tiny(in, out, count, reduction);
  if (bytes <= std::min(tuning_.one_shot_bytes, tuning_.chunk_bytes))
    return all_reduce_one_shot(in, out, count, reduction);
  return all_reduce_chunked(in, out, count, reduction);
}

Status ShmTeam::all_reduce_tiny(const void* in, void* out, size_t count,
                                const Reduction& reduction) {
  size_t bytes = count * dtype_bytes(reduction.dtype);
  if (bytes > 0) std::memcpy(lines_->own_slot().tiny, in, bytes);
  lines_->post(1);
  DSCOMM_RETURN_IF_ERROR(lines_->wait_all_posted(1));
  if (count > 0) {
    for (int k = 0; k < size(); ++k) sources_[static_cast<size_t>(k)] = lines_->slot(k).tiny;
    dscomm::reduce(out, sources_.data(), size(), count, reduction, size());
  }
  return lines_->end();
}

Status ShmTeam::all_reduce_one_shot(const void* in, void* out, size_t count,
                                    const Reduction& reduction) {
  size_t bytes = count * dtype_bytes(reduction.dtype);
  DSCOMM_RETURN_IF_ERROR(stage_->open(bytes));
  Result<std::byte*> buffer = stage_->fill(0);
  if (!buffer.ok()) return buffer.status();
  std::memcpy(buffer.value(), in, bytes);
  lines_->post(1);
  for (int k = 0; k < size(); ++k) {
    size_t index = static_cast<size_t>(k);
    if (k == rank()) {
      sources_[index] = in;
      continue;
    }
    DSCOMM_RETURN_IF_ERROR(lines_->wait_posted(k, 1));
    Result<const std::byte*> theirs = stage_->read(k, 0);
    if (!theirs.ok()) return theirs.status();
    sources_[index] = theirs.value();
  }
  dscomm::reduce(out, sources_.data(), size(), count, reduction, size());
  stage_->close(1);
  return lines_->end();
}

Status ShmTeam::all_reduce_chunked(const void* in, void* out, size_t count,
                                   const Reduction& reduction) {
  const size_t element_bytes = dtype_bytes(reduction.dtype);
  const size_t chunk_count = tuning_.chunk_bytes / element_bytes;
  const uint32_t chunks = rounds_of(count, chunk_count);
  const auto* input = static_cast<const std::byte*>(in);
  auto* output = static_cast<std::byte*>(out);
  DSCOMM_RETURN_IF_ERROR(stage_->open(count * element_bytes));

  auto stage_chunk = [&](uint32_t chunk) -> Status {
    Result<std::byte*> buffer = stage_->fill(input_round(chunk));
    if (!buffer.ok()) return buffer.status();
    size_t begin = size_t{chunk} * chunk_count;
    size_t length = round_bytes(count, chunk_count, chunk);
    // All but the own slice, which is reduced from where it is.
    Slice own = slice_of(length, size(), rank(), element_bytes);
    const std::byte* from = input + begin * element_bytes;
    std::memcpy(buffer.value(), from, own.begin * element_bytes);
    size_t after = (own.begin + own.length) * element_bytes;
    std::memcpy(buffer.value() + after, from + after, length * element_bytes - after);
    lines_->post(staged_phase(chunk));
    return {};
  };

  auto reduce_slice = [&](uint32_t chunk) -> Status {
    size_t begin = size_t{chunk} * chunk_count;
    Slice own = slice_of(round_bytes(count, chunk_count, chunk), size(), rank(), element_bytes);
    for (int k = 0; k < size(); ++k) {
      size_t index = static_cast<size_t>(k);
      if (k == rank()) {
        sources_[index] = input + (begin + own.begin) * element_bytes;
        continue;
      }
      DSCOMM_RETURN_IF_ERROR(lines_->wait_posted(k, staged_phase(chunk)));
      Result<const std::byte*> theirs = stage_->read(k, input_round(chunk));
      if (!theirs.ok()) return theirs.status();
      sources_[index] = theirs.value() + own.begin * element_bytes;
    }
    Result<std::byte*> buffer = stage_->fill(result_round(chunk));
    if (!buffer.ok()) return buffer.status();
    dscomm::reduce(buffer.value(), sources_.data(), size(), own.length, reduction, size());
    std::memcpy(output + (begin + own.begin) * element_bytes, buffer.value(),
                own.length * element_bytes);
    lines_->post(reduced_phase(chunk));
    lines_->acknowledge(input_round(chunk) + 1);
    return {};
  };

  auto gather_slices = [&](uint32_t chunk) -> Status {
    size_t begin = size_t{chunk} * chunk_count;
    for (int step = 1; step < size(); ++step) {
      int k = (rank() + step) % size();
      DSCOMM_RETURN_IF_ERROR(lines_->wait_posted(k, reduced_phase(chunk)));
      Result<const std::byte*> theirs = stage_->read(k, result_round(chunk));
      if (!theirs.ok()) return theirs.status();
      Slice slice = slice_of(round_bytes(count, chunk_count, chunk), size(), k, element_bytes);
      std::memcpy(output + (begin + slice.begin) * element_bytes, theirs.value(),
                  slice.length * element_bytes);
    }
    lines_->acknowledge(result_round(chunk) + 1);
    return {};
  };

  DSCOMM_RETURN_IF_ERROR(stage_chunk(0));
  for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
    if (chunk + 1 < chunks) DSCOMM_RETURN_IF_ERROR(stage_chunk(chunk + 1));
    DSCOMM_RETURN_IF_ERROR(reduce_slice(chunk));
    DSCOMM_RETURN_IF_ERROR(gather_slices(chunk));
  }
  stage_->close(2 * chunks);
  return lines_->end();
}

}  // namespace dscomm
