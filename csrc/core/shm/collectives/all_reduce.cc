// All-reduce through memory, by size:
//
//   tiny      the data travels in the slot, beside the sequence number: one hand-over;
//   one shot  each rank stages all its data, reads all the others' and reduces;
//   chunked   reduce-scatter and all-gather, chunk by chunk: each rank stages the next chunk,
//             reduces its slice of this one from all ranks' staging, posts the result, and then
//             gathers the others' slices of the previous chunk.
//
// All ranks choose the same form: by the size, the number of ranks and the settings of rank 0.
// Staged data needs no closing barrier: a buffer is reused once its readers have acknowledged it.
//
// In the chunked form, each rank decides for itself whether the others read its tensor in place.
// They then read its input there and, if in == out, its results. Only rank k reads slice k of the
// input. The tensor's owner overwrites slice k with rank k's result, after rank k has posted that
// result. So once the owner has gathered, nobody reads its input any more. Before the owner
// returns, the others must have acknowledged that they have gathered its results.
#include "core/base/round_up.h"
#include "core/shm/shm_team.h"

namespace dscomm {
namespace {

// Four chunks overlap well; chunks of less than 256 KiB lose more in hand-overs than they gain.
constexpr size_t kWantedChunks = 4;
constexpr size_t kLeastChunkBytes = 256 << 10;

// How many elements each chunk has (the last may have fewer): they fill whole cache lines, and at
// most `most_bytes`, which is a multiple of a page.
size_t elements_of_chunk(size_t count, size_t element_bytes, size_t most_bytes) {
  const size_t bytes = count * element_bytes;
  const size_t wanted_bytes = std::max(bytes / kWantedChunks, kLeastChunkBytes);
  const size_t chunks = std::max(bytes / wanted_bytes, (bytes + most_bytes - 1) / most_bytes);
  const size_t line = std::max<size_t>(64 / element_bytes, 1);
  return round_up((count + chunks - 1) / chunks, line);
}

// Bytes that are reduced at a time, then copied to staging while they are in the L1 cache.
constexpr size_t kBlockBytes = 8192;

// Tensors of this size exceed the last-level cache.
constexpr size_t kPastCachesBytes = 16 << 20;

}  // namespace

Status ShmTeam::run_all_reduce(const std::byte* in, std::byte* out, size_t count,
                               const Reduction& reduction, const CallOptions&) {
  size_t bytes = count * dtype_bytes(reduction.dtype);
  if (bytes <= kTinyBytes) {
    note(Collective::kAllReduce, "tiny", bytes);
    return all_reduce_tiny(in, out, count, reduction);
  }
  const size_t others_bytes = bytes * (static_cast<size_t>(size()) - 1);
  if (bytes <= tuning_.chunk_bytes && others_bytes <= tuning_.one_shot_bytes) {
    note(Collective::kAllReduce, "one shot", bytes);
    return all_reduce_one_shot(in, out, count, reduction);
  }
  note(Collective::kAllReduce, "chunked", bytes);
  return all_reduce_chunked(in, out, count, reduction);
}

Status ShmTeam::all_reduce_tiny(const void* in, void* out, size_t count,
                                const Reduction& reduction) {
  mailboxes_->put_tiny(in, count * dtype_bytes(reduction.dtype));
  mailboxes_->post(1);
  DSCOMM_RETURN_IF_ERROR(mailboxes_->wait_all_posted(1));
  if (count > 0) {
    for (int k = 0; k < size(); ++k) sources_[k] = mailboxes_->slot(k).tiny;
    reduce_sources(out, count, reduction);
  }
  return staging_->end();
}

Status ShmTeam::all_reduce_one_shot(const void* in, void* out, size_t count,
                                    const Reduction& reduction) {
  size_t bytes = count * dtype_bytes(reduction.dtype);
  DSCOMM_RETURN_IF_ERROR(staging_->open({.bytes = bytes, .buffer_bytes = bytes, .rounds = 1}));
  DSCOMM_ASSIGN_OR_RETURN(auto* buffer, staging_->fill(0));
  copy(buffer, in, bytes, stores());
  post_staged(1);
  DSCOMM_RETURN_IF_ERROR(
      find_sources(in, 0, [&](int k) { return staging_->read(k, 0, 0, 0, bytes); }));
  reduce_sources(out, count, reduction);
  return staging_->end();
}

// A chunked all-reduce in progress. "at" is an offset in bytes from the tensor's beginning.
struct ShmTeam::ChunkedAllReduce {
  // Rank k's slice of a chunk: elements, and the bytes before it in the chunk and in the tensor.
  struct Part {
    size_t count, before, at;
  };

  ShmTeam& team;
  const std::byte* in;
  std::byte* out;
  const size_t count;
  const Reduction& reduction;
  const size_t element_bytes = dtype_bytes(reduction.dtype);
  const size_t bytes = count * element_bytes;
  const size_t chunk_count =
      std::min(count, elements_of_chunk(count, element_bytes, team.tuning_.chunk_bytes));
  const uint32_t chunks = rounds_of(count, chunk_count);
  const std::optional<uint64_t> pool_offset = team.find_in_pool(in, bytes);
  const bool input_in_place = pool_offset.has_value();
  // Only the input is looked up in the pool, because c10d's all-reduce has in == out.
  const bool result_in_place = input_in_place && in == out;
  // In place, rank k has just read the memory into which its slice is gathered: ordinary stores
  // would first fetch each cache line back from rank k's cache.
  const Stores gather_stores =
      result_in_place && bytes >= kPastCachesBytes ? Stores::kStreaming : Stores::kOrdinary;

  // Rounds, in the order in which ranks stage and read them: input 0, input 1, result 0, input 2,
  // result 1, ... Round r is posted and acknowledged as phase r + 1.
  static uint32_t input_round(uint32_t chunk) { return chunk == 0 ? 0 : 2 * chunk - 1; }
  uint32_t result_round(uint32_t chunk) const { return std::min(2 * chunk + 2, 2 * chunks - 1); }

  // Slices are cut at cache lines so that ranks write to different ones.
  Part part_of(int k, uint32_t chunk) const {
    const auto ranks = static_cast<size_t>(team.size());
    const size_t elements = round_bytes(count, chunk_count, chunk);
    const size_t line = std::max<size_t>(64 / element_bytes, 1);
    const size_t longest = round_up(elements, line * ranks) / ranks;
    const size_t begin = std::min(elements, longest * static_cast<size_t>(k));
    const size_t before = begin * element_bytes;
    return {in_chunk(elements, begin, longest), before,
            chunk * chunk_count * element_bytes + before};
  }

  // Lets the others read this rank's values of the chunk.
  Status stage(uint32_t chunk) const {
    if (input_in_place) {
      team.mailboxes_->post(input_round(chunk) + 1);
      return {};
    }
    DSCOMM_ASSIGN_OR_RETURN(auto* buffer, team.staging_->fill(input_round(chunk)));
    // Copies all but this rank's slice, which reduce() reads from the tensor.
    const Part own = part_of(team.rank(), chunk);
    const std::byte* from = in + own.at - own.before;
    const size_t after = own.before + own.count * element_bytes;
    copy(buffer, from, own.before, team.stores());
    copy(buffer + after, from + after,
         round_bytes(count, chunk_count, chunk) * element_bytes - after, team.stores());
    team.post_staged(input_round(chunk) + 1);
    return {};
  }

  // Reduces this rank's slice of all ranks' values, and lets the others read the results.
  Status reduce(uint32_t chunk) const {
    const Part own = part_of(team.rank(), chunk);
    DSCOMM_RETURN_IF_ERROR(team.find_sources(in + own.at, input_round(chunk), [&](int k) {
      return team.staging_->read(k, input_round(chunk), own.before, own.at,
                                 own.count * element_bytes);
    }));
    std::byte* staged = nullptr;
    if (!result_in_place) {
      DSCOMM_ASSIGN_OR_RETURN(staged, team.staging_->fill(result_round(chunk)));
    }
    const size_t most = kBlockBytes / element_bytes;
    for (size_t done = 0; done < own.count; done += most) {
      const size_t block = std::min(most, own.count - done);
      std::byte* reduced = out + own.at + done * element_bytes;
      team.reduce_sources(reduced, block, reduction);
      if (staged != nullptr)
        copy(staged + done * element_bytes, reduced, block * element_bytes, team.stores());
      for (const void*& source : team.sources_)
        source = static_cast<const std::byte*>(source) + block * element_bytes;
    }
    team.post_staged(result_round(chunk) + 1);
    team.mailboxes_->acknowledge(input_round(chunk) + 1);
    return {};
  }

  // Copies the other ranks' results.
  Status gather(uint32_t chunk) const {
    for (int step = 1; step < team.size(); ++step) {
      const int k = (team.rank() + step) % team.size();
      const Part part = part_of(k, chunk);
      DSCOMM_RETURN_IF_ERROR(team.mailboxes_->wait_posted(k, result_round(chunk) + 1));
      DSCOMM_ASSIGN_OR_RETURN(auto* theirs,
                              team.staging_->read(k, result_round(chunk), 0, part.at,
                                                  part.count * element_bytes, kResult));
      copy(out + part.at, theirs, part.count * element_bytes, gather_stores);
    }
    team.mailboxes_->acknowledge(result_round(chunk) + 1);
    return {};
  }

  Status run() const {
    DSCOMM_RETURN_IF_ERROR(
        team.staging_->open({.bytes = bytes,
                             .buffer_bytes = chunk_count * element_bytes,
                             .rounds = 2 * chunks,
                             .tensor = pool_offset,
                             .in_place = result_in_place ? kEverything : kInput}));
    // Gather a chunk's results while the next chunk is in flight, so that no rank waits for results
    // that the others are about to post.
    DSCOMM_RETURN_IF_ERROR(stage(0));
    for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
      if (chunk + 1 < chunks) DSCOMM_RETURN_IF_ERROR(stage(chunk + 1));
      DSCOMM_RETURN_IF_ERROR(reduce(chunk));
      if (chunk > 0) DSCOMM_RETURN_IF_ERROR(gather(chunk - 1));
    }
    DSCOMM_RETURN_IF_ERROR(gather(chunks - 1));
    finish_copies();  // of the gathered slices: the caller may hand them to another thread
    return team.staging_->end();
  }
};

Status ShmTeam::all_reduce_chunked(const std::byte* in, std::byte* out, size_t count,
                                   const Reduction& reduction) {
  return ChunkedAllReduce{*this, in, out, count, reduction}.run();
}

}  // namespace dscomm
