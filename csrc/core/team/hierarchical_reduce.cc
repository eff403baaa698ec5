// The reductions of HierarchicalTeam: reduce inside, reduce across, deliver inside.

#include <algorithm>
#include <bit>
#include <cstring>

#include "core/reduce/reduce.h"
#include "core/team/arguments.h"
#include "core/team/hierarchical_team.h"
#include "core/team/widen.h"

namespace dscomm {

// One reduction as two levels: what each of them does, and in which type.
struct HierarchicalTeam::Levels {
  Levels(const Reduction& whole_reduction, bool halves_as_float32) : whole(whole_reduction) {
    bool is_half = whole.dtype == DType::kFloat16 || whole.dtype == DType::kBFloat16;
    // MIN and MAX choose one of their sources, so there is nothing to round.
    bool is_choice = whole.op == ReduceOp::kMin || whole.op == ReduceOp::kMax;
    // Their sums may be out of the range of halves, though what comes of them is not.
    bool is_scaled = whole.op == ReduceOp::kAvg || whole.op == ReduceOp::kPremulSum;
    is_widened = is_half && !is_choice && (halves_as_float32 || is_scaled);
    inner = whole;
    if (is_widened) inner.dtype = DType::kFloat32;
    if (is_average()) inner.op = ReduceOp::kSum;
    outer = inner;
    if (outer.op == ReduceOp::kPremulSum) outer = {inner.dtype, ReduceOp::kSum};
  }
  bool is_average() const { return whole.op == ReduceOp::kAvg; }
  size_t sum_bytes() const { return dtype_bytes(inner.dtype); }
  size_t element_bytes() const { return dtype_bytes(whole.dtype); }

  Reduction whole, inner, outer;
  bool is_widened;  // sums are float32, results are not
};

// The shares of the slices in a chunk. They begin at multiples of 64 bytes (of elements in place),
// so that leaders do not write the same cache line; a chunk of a few lines is carried by a few
// leaders.
class HierarchicalTeam::Slicing {
 public:
  Slicing(size_t count, int slice_count, size_t element_bytes)
      : count_(count), slice_count_(slice_count) {
    size_t line = std::max<size_t>(64 / element_bytes, 1);
    size_t share = (count + slice_count - 1) / slice_count;
    share_ = (share + line - 1) / line * line;
  }
  size_t begin(int slice) const { return std::min(slice * share_, count_); }
  size_t count(int slice) const {
    return slice < slice_count_ ? begin(slice + 1) - begin(slice) : 0;
  }
  size_t total() const { return count_; }
  // Slice 0 takes part even when it is empty, see "Agreement"; the others need not.
  bool takes_part(int slice) const { return slice == 0 || count(slice) > 0; }

 private:
  size_t count_;
  size_t share_;
  int slice_count_;
};

// From complete sums to results: AVG's division, and the one rounding. `results` may be `sums`
// where they have one type.
void HierarchicalTeam::settle(std::byte* sums, std::byte* results, size_t count,
                              const Levels& levels) const {
  if (count == 0) return;
  if (levels.is_average()) {
    const void* source = sums;
    std::byte* quotients = levels.is_widened ? sums : results;
    dscomm::reduce(quotients, &source, 1, count, {levels.inner.dtype, ReduceOp::kAvg}, size());
  } else if (!levels.is_widened && results != sums) {
    std::memcpy(results, sums, count * levels.element_bytes());
  }
  // Staging is aligned for float.
  if (levels.is_widened)
    narrow(results, reinterpret_cast<const float*>(sums), count, levels.whole.dtype);
}

// Reduces `values` over the domain, and the slices that this rank leads across, to the root's
// domain or, with root_domain -1, to all. The results of these slices go to their places in
// `results`, the sums to `sums`, which may be `values` or `results`. One inner call for every
// local_count() slices.
Status HierarchicalTeam::reduce_slices(const std::byte* values, std::byte* sums, std::byte* results,
                                       const Slicing& slicing, const Levels& levels,
                                       int root_domain, const CallOptions& piece) {
  if (levels.is_widened) {
    widen(reinterpret_cast<float*>(sums), values, slicing.total(), levels.whole.dtype);
    values = sums;
  }
  std::vector<const void*> ins(members().size());
  std::vector<size_t> counts(members().size());
  for (int first = 0; first < slice_count_ && slicing.takes_part(first); first += local_count()) {
    for (int local = 0; local < local_count(); ++local) {
      ins[local] = values + slicing.begin(first + local) * levels.sum_bytes();
      counts[local] = slicing.count(first + local);
    }
    std::byte* mine = sums + slicing.begin(first + index_) * levels.sum_bytes();
    DSCOMM_RETURN_IF_ERROR(inner_->reduce_scatter(ins, counts, mine, levels.inner, piece));
  }

  const CallOptions across_piece = later(piece, 1);
  const bool has_results = root_domain < 0 || root_domain == domain_;
  for (Slice& slice : led_) {
    if (!slicing.takes_part(slice.index)) continue;
    const size_t begin = slicing.begin(slice.index), count = slicing.count(slice.index);
    std::byte* mine = sums + begin * levels.sum_bytes();
    DSCOMM_RETURN_IF_ERROR(
        root_domain < 0 ? slice.team->all_reduce(mine, mine, count, levels.outer, across_piece)
                        : slice.team->reduce(mine, has_results ? mine : nullptr, count,
                                             levels.outer, root_domain, across_piece));
    if (has_results) settle(mine, results + begin * levels.element_bytes(), count, levels);
  }
  return {};
}

// An outer Team cuts a chunk into a few pieces.
constexpr size_t kLeastChunk = 16;
// Of a reduce_scatter's blocks a chunk has a part each; with more of them pieces would be messages
// of less than 4 KiB, by which more is lost than overlap gains.
constexpr size_t kMostOverlappedBlocks = 64;

// Small enough that little is left without overlap at both ends, large enough for the outer Team's
// own pieces.
size_t HierarchicalTeam::overlapped_chunk(size_t count, size_t element_bytes) const {
  const size_t bytes = count * element_bytes;
  const size_t chunk_bytes =
      std::clamp(bytes / 8, options_.staging_bytes / 4, options_.staging_bytes * 2);
  const size_t chunk = chunk_bytes / element_bytes;
  return !overlaps_ || bytes < 2 * chunk_bytes || chunk < kLeastChunk ? 0 : chunk;
}

// One outer call for the whole slice; what is done inside goes along with it. All of it happens in
// `out`.
Status HierarchicalTeam::run_all_reduce_overlapped(const std::byte* in, std::byte* out,
                                                   const Slicing& slicing, const Levels& levels,
                                                   size_t chunk, const CallOptions& piece) {
  const CallOptions last_piece = later(piece, 2);
  const size_t element_bytes = levels.element_bytes();
  const size_t in_all = (slicing.count(0) + chunk - 1) / chunk;  // slice 0 is longest
  const int me = index_;
  std::vector<const void*> ins(members().size());
  std::vector<void*> outs(members().size());
  std::vector<size_t> counts(members().size());
  // Where chunk k of each slice is.
  const auto locate = [&](size_t k) {
    for (size_t local = 0; local < counts.size(); ++local) {
      const int slice = static_cast<int>(local);
      const size_t skipped = std::min(k * chunk, slicing.count(slice));
      const size_t offset = (slicing.begin(slice) + skipped) * element_bytes;
      ins[local] = in + offset;
      outs[local] = out + offset;
      counts[local] = std::min(chunk, slicing.count(slice) - skipped);
    }
  };
  size_t reduced = 0, spread = 0;  // chunks
  const auto make_next_inner_call = [&]() -> Status {
    if (reduced < in_all && reduced < spread + 2) {
      locate(reduced++);
      // The members of a domain may be waiting across by then, which is a later step.
      return inner_->reduce_scatter(ins, counts, outs[me], levels.inner,
                                    reduced == 1 ? piece : last_piece);
    }
    locate(spread++);
    auto* mine = static_cast<std::byte*>(outs[me]);
    settle(mine, mine, counts[me], levels);
    return inner_->all_gather(mine, counts[me], levels.whole.dtype, outs, counts, last_piece);
  };

  Chunks chunks;
  chunks.count = chunk;
  chunks.make = [&](size_t end) -> Status {
    while (reduced < in_all && reduced * chunk < end) {
      DSCOMM_CHECK(reduced < spread + 2, "at most two chunks are in progress");
      DSCOMM_RETURN_IF_ERROR(make_next_inner_call());
    }
    return {};
  };
  chunks.take = [&](size_t end) -> Status {
    while (spread < in_all && (spread + 1) * chunk <= end)
      DSCOMM_RETURN_IF_ERROR(make_next_inner_call());
    return {};
  };
  DSCOMM_RETURN_IF_ERROR(chunks.make(1));
  CallOptions across_piece = later(piece, 1);
  across_piece.chunks = &chunks;
  std::byte* mine = out + slicing.begin(index_) * element_bytes;
  DSCOMM_RETURN_IF_ERROR(
      led_.front().team->all_reduce(mine, mine, slicing.count(index_), levels.outer, across_piece));
  while (spread < in_all) DSCOMM_RETURN_IF_ERROR(make_next_inner_call());
  return {};
}

// By chunks: reduce-scatter inside, all-reduce every slice across, all-gather inside. Where nothing
// is widened, all of it happens in `out`.
Status HierarchicalTeam::run_all_reduce(const std::byte* in, std::byte* out, size_t count,
                                        const Reduction& reduction, const CallOptions& piece) {
  const Levels levels(reduction, options_.halves_as_float32);
  const Slicing whole(count, slice_count_, levels.element_bytes());
  const size_t overlapped =
      levels.is_widened ? 0 : overlapped_chunk(whole.count(0), levels.element_bytes());
  if (overlapped > 0) return run_all_reduce_overlapped(in, out, whole, levels, overlapped, piece);

  const CallOptions last_piece = later(piece, 2);
  const size_t element_bytes = levels.element_bytes();
  const size_t chunk = std::max<size_t>(options_.staging_bytes / levels.sum_bytes(), 1);
  std::vector<void*> outs(members().size());
  std::vector<size_t> counts(members().size());

  size_t begin = 0;
  do {
    const size_t chunk_count = std::min(chunk, count - begin);
    const Slicing slicing(chunk_count, slice_count_, element_bytes);
    std::byte* results = out + begin * element_bytes;
    std::byte* sums = results;
    if (levels.is_widened) {
      DSCOMM_ASSIGN_OR_RETURN(sums, staging(0, chunk_count * levels.sum_bytes()));
    }
    DSCOMM_RETURN_IF_ERROR(
        reduce_slices(in + begin * element_bytes, sums, results, slicing, levels, -1, piece));

    for (int first = 0; first < slice_count_ && slicing.takes_part(first); first += local_count()) {
      for (int local = 0; local < local_count(); ++local) {
        outs[local] = results + slicing.begin(first + local) * element_bytes;
        counts[local] = slicing.count(first + local);
      }
      DSCOMM_RETURN_IF_ERROR(inner_->all_gather(outs[index_], counts[index_], reduction.dtype, outs,
                                                counts, last_piece));
    }
    begin += chunk_count;
  } while (begin < count);
  return {};
}

// As all_reduce, but across to the root's domain alone, and there to the root.
Status HierarchicalTeam::run_reduce(const std::byte* in, std::byte* out, size_t count,
                                    const Reduction& reduction, int root,
                                    const CallOptions& piece) {
  const Levels levels(reduction, options_.halves_as_float32);
  const CallOptions last_piece = later(piece, 2);
  const size_t element_bytes = levels.element_bytes();
  const size_t chunk = std::max<size_t>(options_.staging_bytes / levels.sum_bytes(), 1);
  const int root_domain = domain_of(root);
  const bool is_root = rank_ == root;
  std::vector<void*> outs(is_root ? members().size() : 0);
  std::vector<size_t> out_counts(outs.size());

  size_t begin = 0;
  do {
    const size_t chunk_count = std::min(chunk, count - begin);
    const Slicing slicing(chunk_count, slice_count_, element_bytes);
    // The root works in its out, the others in staging, where results of another type than the sums
    // have a buffer of their own.
    std::byte* results = is_root ? out + begin * element_bytes : nullptr;
    std::byte* sums = results;
    if (!is_root || levels.is_widened) {
      DSCOMM_ASSIGN_OR_RETURN(sums, staging(0, chunk_count * levels.sum_bytes()));
    }
    if (!is_root && levels.is_widened) {
      DSCOMM_ASSIGN_OR_RETURN(results, staging(1, chunk_count * element_bytes));
    } else if (!is_root) {
      results = sums;
    }
    DSCOMM_RETURN_IF_ERROR(reduce_slices(in + begin * element_bytes, sums, results, slicing, levels,
                                         root_domain, piece));

    if (domain_ == root_domain) {
      for (int first = 0; first < slice_count_ && slicing.takes_part(first);
           first += local_count()) {
        for (size_t local = 0; local < outs.size(); ++local) {
          const int slice = first + static_cast<int>(local);
          outs[local] = results + slicing.begin(slice) * element_bytes;
          out_counts[local] = slicing.count(slice);
        }
        DSCOMM_RETURN_IF_ERROR(inner_->gather(
            results + slicing.begin(first + index_) * element_bytes, slicing.count(first + index_),
            reduction.dtype, outs, out_counts, index_of(root), last_piece));
      }
    }
    begin += chunk_count;
  } while (begin < count);
  return {};
}

// The block for a rank travels in the slice of its local number, whose leader in its domain is the
// rank itself. By chunks of every block: packed by leader, reduce-scattered inside so that each
// leader has its domain's sums for its slices' destinations, then reduce-scattered across.
Status HierarchicalTeam::run_reduce_scatter(std::span<const void* const> ins,
                                            std::span<const size_t> counts, std::byte* out,
                                            const Reduction& reduction, const CallOptions& piece) {
  const Levels levels(reduction, options_.halves_as_float32);
  const size_t element_bytes = levels.element_bytes(), sum_bytes = levels.sum_bytes();
  const size_t most = *std::max_element(counts.begin(), counts.end());
  const size_t chunk = std::max<size_t>(options_.staging_bytes / (sum_bytes * counts.size()), 1);
  if (overlaps_ && !levels.is_widened && counts.size() <= kMostOverlappedBlocks &&
      chunk >= kLeastChunk && most >= 2 * chunk)
    return run_reduce_scatter_overlapped(ins, counts, out, std::bit_floor(chunk), levels, piece);
  std::vector<std::byte*> place(counts.size());  // by rank
  std::vector<size_t> block_count(counts.size());
  std::vector<const void*> regions(members().size());
  std::vector<size_t> region_counts(members().size());
  std::vector<const void*> across(domains_.size());
  std::vector<size_t> across_counts(domains_.size());

  size_t begin = 0;
  do {
    size_t packed_count = 0;
    for (size_t rank = 0; rank < counts.size(); ++rank) {
      block_count[rank] = in_chunk(counts[rank], begin, chunk);
      packed_count += block_count[rank];
    }
    DSCOMM_ASSIGN_OR_RETURN(auto* packed, staging(0, packed_count * sum_bytes));
    std::byte* cursor = packed;
    for (size_t local = 0; local < members().size(); ++local) {
      std::byte* region = cursor;
      for (const Destination& destination : destinations_[local]) {
        const int rank = destination.rank;
        place[rank] = cursor;
        if (block_count[rank] == 0) continue;
        const auto* values = static_cast<const std::byte*>(ins[rank]) + begin * element_bytes;
        if (levels.is_widened) {
          widen(reinterpret_cast<float*>(cursor), values, block_count[rank], reduction.dtype);
        } else {
          std::memcpy(cursor, values, block_count[rank] * sum_bytes);
        }
        cursor += block_count[rank] * sum_bytes;
      }
      regions[local] = region;
      region_counts[local] = static_cast<size_t>(cursor - region) / sum_bytes;
    }
    auto* mine = const_cast<void*>(regions[index_]);  // ours, in staging
    DSCOMM_RETURN_IF_ERROR(
        inner_->reduce_scatter(regions, region_counts, mine, levels.inner, piece));

    for (Slice& slice : led_) {
      size_t slice_elements = 0;
      for (int domain = 0; domain < domain_count(); ++domain) {
        const int rank = member(domain, slice.index);
        across[domain] = rank >= 0 ? place[rank] : nullptr;
        across_counts[domain] = rank >= 0 ? block_count[rank] : 0;
        slice_elements += across_counts[domain];
      }
      if (slice.index > 0 && slice_elements == 0) continue;
      // This rank's block is in the slice of its number; from the others it gets nothing.
      std::byte* sums = slice.index == index_ ? place[rank_] : nullptr;
      DSCOMM_RETURN_IF_ERROR(
          slice.team->reduce_scatter(across, across_counts, sums, levels.outer, later(piece, 1)));
    }
    if (const size_t own_count = block_count[rank_]; own_count > 0)
      settle(place[rank_], out + begin * element_bytes, own_count, levels);
    begin += chunk;
  } while (begin < most);
  return {};
}

// One outer call; chunks are packed and reduced inside while it goes on. A domain's sums lie in
// rings, one for the block of each domain's rank of this slice; results go straight to `out`.
Status HierarchicalTeam::run_reduce_scatter_overlapped(std::span<const void* const> ins,
                                                       std::span<const size_t> counts,
                                                       std::byte* out, size_t chunk,
                                                       const Levels& levels,
                                                       const CallOptions& piece) {
  const CallOptions later_piece = later(piece, 2);
  const size_t element_bytes = levels.element_bytes(), ring = 2 * chunk;
  const size_t in_all = (*std::max_element(counts.begin(), counts.end()) + chunk - 1) / chunk;
  const int me = index_;
  DSCOMM_ASSIGN_OR_RETURN(auto* packed, staging(0, counts.size() * chunk * element_bytes));
  DSCOMM_ASSIGN_OR_RETURN(auto* rings, staging(1, domains_.size() * ring * element_bytes));
  std::vector<const void*> regions(members().size());
  std::vector<size_t> region_counts(members().size());
  size_t reduced = 0;  // chunks
  const auto reduce_next = [&]() -> Status {
    const size_t begin = reduced * chunk;
    const auto block = [&](int rank) { return in_chunk(counts[rank], begin, chunk); };
    std::byte* cursor = packed;
    for (size_t local = 0; local < members().size(); ++local) {
      regions[local] = cursor;
      region_counts[local] = 0;
      for (const Destination& destination : destinations_[local]) {
        const size_t count = block(destination.rank);
        if (count == 0) continue;
        const auto* values = static_cast<const std::byte*>(ins[destination.rank]);
        std::memcpy(cursor, values + begin * element_bytes, count * element_bytes);
        cursor += count * element_bytes;
        region_counts[local] += count;
      }
    }
    auto* sums = static_cast<std::byte*>(const_cast<void*>(regions[me]));  // ours, in staging
    // The members of a domain may be waiting across, which is a later step, but for the first
    // chunk.
    DSCOMM_RETURN_IF_ERROR(inner_->reduce_scatter(regions, region_counts, sums, levels.inner,
                                                  reduced == 0 ? piece : later_piece));
    for (const Destination& destination : destinations_[me]) {
      const size_t count = block(destination.rank);
      if (count == 0) continue;
      std::byte* at = rings + (destination.domain * ring + begin % ring) * element_bytes;
      std::memcpy(at, sums, count * element_bytes);
      sums += count * element_bytes;
    }
    ++reduced;
    return {};
  };

  Chunks chunks;
  chunks.count = chunk;
  chunks.ring = ring;
  chunks.make = [&](size_t end) -> Status {
    while (reduced < in_all && reduced * chunk < end) DSCOMM_RETURN_IF_ERROR(reduce_next());
    return {};
  };
  DSCOMM_RETURN_IF_ERROR(chunks.make(1));
  std::vector<const void*> across(domains_.size());
  std::vector<size_t> across_counts(domains_.size());
  size_t slice_elements = 0;
  for (size_t domain = 0; domain < domains_.size(); ++domain) {
    across[domain] = rings + domain * ring * element_bytes;
    across_counts[domain] = counts[domains_[domain][me]];
    slice_elements += across_counts[domain];
  }
  if (index_ == 0 || slice_elements > 0) {
    CallOptions across_piece = later(piece, 1);
    across_piece.chunks = &chunks;
    DSCOMM_RETURN_IF_ERROR(
        led_.front().team->reduce_scatter(across, across_counts, out, levels.outer, across_piece));
  }
  while (reduced < in_all) DSCOMM_RETURN_IF_ERROR(reduce_next());
  settle(out, out, counts[rank_], levels);
  return {};
}

}  // namespace dscomm
