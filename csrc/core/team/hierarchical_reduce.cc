// The reductions of HierarchicalTeam: reduce inside domains, reduce across them, distribute inside.
// The chunks of a large tensor overlap (see overlapped_chunk()).

#include <algorithm>
#include <bit>
#include <cstring>

#include "core/reduce/reduce.h"
#include "core/team/chunk.h"
#include "core/team/hierarchical_team.h"
#include "core/team/widen.h"

namespace dscomm {

// One reduction as two levels: the operator and the dtype of each.
struct HierarchicalTeam::Levels {
  Levels(const Reduction& whole_reduction, bool halves_as_float32)
      : whole(whole_reduction),
        inner(whole),
        is_widened(dscomm::is_widened(whole, halves_as_float32)) {
    if (is_widened) inner.dtype = DType::kFloat32;
    if (is_average()) inner.op = ReduceOp::kSum;
    outer = inner;
    if (outer.op == ReduceOp::kPremulSum) outer = {inner.dtype, ReduceOp::kSum};
  }
  bool is_average() const { return whole.op == ReduceOp::kAvg; }
  size_t sum_bytes() const { return dtype_bytes(inner.dtype); }
  size_t element_bytes() const { return dtype_bytes(whole.dtype); }

  Reduction whole, inner, outer;
  const bool is_widened;  // sums are float32, results are not
};

// The slices of a chunk. They begin at multiples of 64 bytes of the tensor (of 128 bytes in widened
// sums), so that leaders do not write to the same cache line. A chunk of a few cache lines has few
// slices.
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
  // Slice 0 takes part even if empty (see "Agreement" in hierarchical_team.h); others need not.
  bool takes_part(int slice) const { return slice == 0 || count(slice) > 0; }

 private:
  size_t count_;
  size_t share_;
  int slice_count_;
};

// Turns complete sums into results: divides for AVG, and rounds widened sums to halves. `results`
// may be `sums`.
void HierarchicalTeam::make_results(std::byte* sums, std::byte* results, size_t count,
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

// Reduces `values` over the domain, and then the slices that this rank leads across domains: to the
// root's domain or, with root_domain -1, to all. The results of these slices go to their places in
// `results`, the sums to `sums`, which may be `values` or `results`. Makes one inner call for each
// local_count() slices.
Status HierarchicalTeam::reduce_slices(const std::byte* values, std::byte* sums, std::byte* results,
                                       const Slicing& slicing, const Levels& levels,
                                       int root_domain, const CallOptions& sub_call) {
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
    DSCOMM_RETURN_IF_ERROR(inner_->reduce_scatter(ins, counts, mine, levels.inner, sub_call));
  }

  const CallOptions across_call = later(sub_call, 1);
  const bool has_results = root_domain < 0 || root_domain == domain_;
  for (LedSlice& slice : led_) {
    if (!slicing.takes_part(slice.index)) continue;
    const size_t begin = slicing.begin(slice.index), count = slicing.count(slice.index);
    std::byte* mine = sums + begin * levels.sum_bytes();
    DSCOMM_RETURN_IF_ERROR(
        root_domain < 0 ? slice.team->all_reduce(mine, mine, count, levels.outer, across_call)
                        : slice.team->reduce(mine, has_results ? mine : nullptr, count,
                                             levels.outer, root_domain, across_call));
    if (has_results) make_results(mine, results + begin * levels.element_bytes(), count, levels);
  }
  return {};
}

// The fewest elements of a chunk: an outer Team cuts each chunk into a few messages.
constexpr size_t kLeastChunk = 16;
// A reduce_scatter of more blocks than this does not overlap. A chunk has a part of each block, so
// messages would be shorter than 4 KiB, which costs more than overlap gains.
constexpr size_t kMostOverlappedBlocks = 64;
constexpr size_t kMostStaging = 16;  // times staging_bytes

// If only some ranks of the larger domains carry data across, or values are copied to rings,
// overlap pays only with more chunks. (2 hosts, 4 ranks on 2 cores, unthrottled network, time
// without overlap divided by time with overlap: 2 + 2 ranks, 16 MiB: reduce 1.01, all-reduce of
// halves with AVG 1.04; 1 MiB: 0.90, 0.93. 1 + 3 ranks, 16 MiB: all-reduce 1.22, broadcast 1.30,
// all-gather 1.14, reduce 0.91; 1 MiB: 0.87, 0.76, 0.97, 0.76.)
constexpr size_t kLeastChunksOfRings = 8, kLeastChunksOfUneven = 16;

// Chunks are small, so that only a little work at the two ends does not overlap, but large enough
// for the messages of the outer Team.
size_t HierarchicalTeam::overlapped_chunk(size_t count, size_t element_bytes, size_t least_bytes,
                                          size_t least_chunks) const {
  const size_t bytes = count * element_bytes;
  const size_t chunk_bytes = std::max(
      std::clamp(bytes / 8, options_.staging_bytes / 4, options_.staging_bytes * 2), least_bytes);
  const size_t chunk = chunk_bytes / element_bytes;
  if (!is_even()) least_chunks = std::max(least_chunks, kLeastChunksOfUneven);
  const bool is_long = bytes >= least_chunks * std::max(options_.staging_bytes / 4, least_bytes);
  return overlaps_ && is_long && chunk >= kLeastChunk ? chunk : 0;
}

size_t HierarchicalTeam::overlapped_chunk(const Slicing& slicing, const Levels& levels,
                                          bool is_in_place) const {
  const size_t least_bytes = outer().least_chunk_bytes();
  const size_t chunk = overlapped_chunk(slicing.count(0), levels.sum_bytes(), least_bytes,
                                        is_in_place ? 2 : kLeastChunksOfRings);
  if (is_in_place || chunk == 0) return chunk;
  // Limits the chunk, so that a ring stays in the cache if possible.
  const size_t most_bytes = std::max(options_.staging_bytes / 4, least_bytes);
  const size_t of_ring =
      ring_chunk(std::min(chunk, most_bytes / levels.sum_bytes()), levels.sum_bytes(), least_bytes);
  const size_t wide_bytes = static_cast<size_t>(least_domain_) * of_ring * levels.sum_bytes();
  const bool fits = !levels.is_widened || wide_bytes <= kMostStaging * options_.staging_bytes;
  return fits ? of_ring : 0;
}

size_t HierarchicalTeam::ring_chunk(size_t chunk, size_t element_bytes, size_t least_bytes) const {
  const size_t unit = 4 * (outer().piece_bytes() / element_bytes);
  const bool has_power = unit == 0 || chunk < unit;
  const size_t less = has_power ? std::bit_floor(chunk) : chunk - chunk % unit;
  if (less * element_bytes >= least_bytes) return less;
  return has_power ? std::bit_ceil(chunk) : less + unit;
}

// An all_reduce, or with root >= 0 a reduce: one outer call for each slice, overlapped with the
// inner calls. The sums lie in `out` in an all_reduce that does not widen them, else in a ring of
// two chunks.
Status HierarchicalTeam::run_reduction_overlapped(const std::byte* in, std::byte* out,
                                                  const Slicing& slicing, const Levels& levels,
                                                  int root, size_t chunk,
                                                  const CallOptions& sub_call) {
  const CallOptions last_call = later(sub_call, 2);
  const bool has_root = root >= 0, is_in_place = !has_root && !levels.is_widened;
  note(has_root ? Collective::kReduce : Collective::kAllReduce, "overlapped",
       slicing.total() * levels.element_bytes());
  const bool gets_results = !has_root || domain_of(root) == domain_;
  const bool writes_results = !has_root || rank_ == root;
  const size_t element_bytes = levels.element_bytes(), sum_bytes = levels.sum_bytes();
  const size_t in_all = (slicing.count(0) + chunk - 1) / chunk;  // slice 0 is the longest
  const int me = index_;
  std::byte *wide = nullptr, *ring = nullptr;
  if (levels.is_widened) {
    DSCOMM_ASSIGN_OR_RETURN(wide, staging(0, least_domain_ * chunk * sum_bytes));
  }
  if (!is_in_place) {
    DSCOMM_ASSIGN_OR_RETURN(ring, staging(1, 2 * chunk * sum_bytes));
  }

  std::vector<const void*> ins(members().size());
  std::vector<void*> outs(members().size());
  std::vector<size_t> counts(members().size());
  // Sets ins, outs and counts to chunk k of each slice.
  const auto locate = [&](size_t k) {
    for (size_t local = 0; local < counts.size(); ++local) {
      const int slice = static_cast<int>(local);
      const size_t skipped = std::min(k * chunk, slicing.count(slice));
      const size_t offset = (slicing.begin(slice) + skipped) * element_bytes;
      ins[local] = in + offset;
      outs[local] = writes_results ? out + offset : nullptr;
      counts[local] = std::min(chunk, slicing.count(slice) - skipped);
    }
  };
  const auto sums_of = [&](size_t k) {
    return is_in_place ? static_cast<std::byte*>(outs[me]) : ring + k % 2 * chunk * sum_bytes;
  };
  const auto reduce_inside = [&](size_t k) -> Status {
    locate(k);
    for (size_t local = 0; levels.is_widened && local < counts.size(); ++local) {
      if (counts[local] == 0) continue;
      std::byte* values = wide + local * chunk * sum_bytes;
      widen(reinterpret_cast<float*>(values), static_cast<const std::byte*>(ins[local]),
            counts[local], levels.whole.dtype);
      ins[local] = values;
    }
    // From the second chunk on, members of the domain may wait in an outer call, which is a later
    // step. So the inner call gets the deadline of the last step.
    return inner_->reduce_scatter(ins, counts, sums_of(k), levels.inner,
                                  k == 0 ? sub_call : last_call);
  };
  const auto spread_inside = [&](size_t k) -> Status {
    if (!gets_results) return {};
    locate(k);
    // The root gathers results from the rings. Without a root they are in `out`.
    auto* mine = has_root ? sums_of(k) : static_cast<std::byte*>(outs[me]);
    make_results(sums_of(k), mine, counts[me], levels);
    if (!has_root)
      return inner_->all_gather(mine, counts[me], levels.whole.dtype, outs, counts, last_call);
    const size_t blocks = writes_results ? counts.size() : 0;
    return inner_->gather(mine, counts[me], levels.whole.dtype, {outs.data(), blocks},
                          {counts.data(), blocks}, index_of(root), last_call);
  };
  size_t reduced = 0, spread = 0;  // chunks so far
  const auto make_next_inner_call = [&]() -> Status {
    return reduced < in_all && reduced < spread + 2 ? reduce_inside(reduced++)
                                                    : spread_inside(spread++);
  };

  Chunks chunks;
  chunks.count = chunk;
  chunks.ring = chunks.out_ring = is_in_place ? 0 : 2 * chunk;
  chunks.make = [&](size_t end) -> Status {
    while (reduced < in_all && reduced * chunk < end) {
      DSCOMM_CHECK(reduced < spread + 2, "at most two chunks are in progress");
      DSCOMM_RETURN_IF_ERROR(make_next_inner_call());
    }
    return {};
  };
  chunks.consume = [&](size_t end) -> Status {
    while (spread < in_all && (spread + 1) * chunk <= end)
      DSCOMM_RETURN_IF_ERROR(make_next_inner_call());
    return {};
  };
  DSCOMM_RETURN_IF_ERROR(chunks.make(1));
  if (me == 0 || slicing.count(me) > 0) {
    const CallOptions across = later(sub_call, 1, &chunks);
    const size_t count = slicing.count(me);
    std::byte* mine = is_in_place ? out + slicing.begin(me) * element_bytes : ring;
    DSCOMM_RETURN_IF_ERROR(has_root ? outer().reduce(mine, gets_results ? mine : nullptr, count,
                                                     levels.outer, domain_of(root), across)
                                    : outer().all_reduce(mine, mine, count, levels.outer, across));
  }
  while (spread < in_all) DSCOMM_RETURN_IF_ERROR(make_next_inner_call());
  return {};
}

// For each chunk: reduce-scatter inside, all-reduce of each slice across, all-gather inside.
// Without widening, all of it happens in `out`.
Status HierarchicalTeam::run_all_reduce(const std::byte* in, std::byte* out, size_t count,
                                        const Reduction& reduction, const CallOptions& sub_call) {
  const Levels levels(reduction, options_.halves_as_float32);
  const Slicing whole(count, least_domain_, levels.element_bytes());
  if (const size_t chunk = overlapped_chunk(whole, levels, !levels.is_widened); chunk > 0)
    return run_reduction_overlapped(in, out, whole, levels, -1, chunk, sub_call);
  note(Collective::kAllReduce, "in steps", count * levels.element_bytes());

  const CallOptions last_call = later(sub_call, 2);
  const size_t element_bytes = levels.element_bytes();
  const size_t least_bytes = 2 * outer().least_chunk_bytes() * static_cast<size_t>(slice_count_);
  const size_t chunk_bytes = std::max(options_.staging_bytes, levels.is_widened ? 0 : least_bytes);
  const size_t chunk = std::max<size_t>(chunk_bytes / levels.sum_bytes(), 1);
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
        reduce_slices(in + begin * element_bytes, sums, results, slicing, levels, -1, sub_call));

    for (int first = 0; first < slice_count_ && slicing.takes_part(first); first += local_count()) {
      for (int local = 0; local < local_count(); ++local) {
        outs[local] = results + slicing.begin(first + local) * element_bytes;
        counts[local] = slicing.count(first + local);
      }
      DSCOMM_RETURN_IF_ERROR(inner_->all_gather(outs[index_], counts[index_], reduction.dtype, outs,
                                                counts, last_call));
    }
    begin += chunk_count;
  } while (begin < count);
  return {};
}

// As all_reduce, but slices are reduced only to the root's domain, and gathered only by the root.
Status HierarchicalTeam::run_reduce(const std::byte* in, std::byte* out, size_t count,
                                    const Reduction& reduction, int root,
                                    const CallOptions& sub_call) {
  const Levels levels(reduction, options_.halves_as_float32);
  const Slicing whole(count, least_domain_, levels.element_bytes());
  if (const size_t chunk = overlapped_chunk(whole, levels, false); is_even() && chunk > 0)
    return run_reduction_overlapped(in, out, whole, levels, root, chunk, sub_call);
  note(Collective::kReduce, "in steps", count * levels.element_bytes());

  const CallOptions last_call = later(sub_call, 2);
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
    // The root works in its out, the others in staging. Results of another type than the sums have
    // a separate buffer there.
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
                                         root_domain, sub_call));

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
            reduction.dtype, outs, out_counts, index_of(root), last_call));
      }
    }
    begin += chunk_count;
  } while (begin < count);
  return {};
}

// Packs `chunk` elements of each block, from `begin` on. The region of a leader has the blocks of
// its destinations.
void HierarchicalTeam::pack(Inputs ins, Counts counts, size_t begin, size_t chunk,
                            const Levels& levels, std::byte* packed,
                            std::vector<const void*>* regions,
                            std::vector<size_t>* region_counts) const {
  for (size_t local = 0; local < destinations_.size(); ++local) {
    (*regions)[local] = packed;
    (*region_counts)[local] = 0;
    for (int rank : destinations_[local]) {
      const size_t count = in_chunk(counts[rank], begin, chunk);
      if (count == 0) continue;
      const auto* values =
          static_cast<const std::byte*>(ins[rank]) + begin * levels.element_bytes();
      if (levels.is_widened)
        widen(reinterpret_cast<float*>(packed), values, count, levels.whole.dtype);
      else
        std::memcpy(packed, values, count * levels.sum_bytes());
      packed += count * levels.sum_bytes();
      (*region_counts)[local] += count;
    }
  }
}

// A rank's block travels in the slice of its local rank, which it leads in its domain. For each
// chunk of all blocks: pack by leader; reduce-scatter inside, so that each leader has its domain's
// sums for the destinations of its slices; reduce-scatter across.
Status HierarchicalTeam::run_reduce_scatter(Inputs ins, Counts counts, std::byte* out,
                                            const Reduction& reduction,
                                            const CallOptions& sub_call) {
  const Levels levels(reduction, options_.halves_as_float32);
  const size_t element_bytes = levels.element_bytes(), sum_bytes = levels.sum_bytes();
  const size_t most = *std::max_element(counts.begin(), counts.end());
  // Among many domains, chunks of blocks would be too short. So staging grows with the number of
  // ranks, up to a limit.
  const size_t chunk_bytes =
      std::clamp(outer().least_chunk_bytes() * static_cast<size_t>(slice_count_),
                 options_.staging_bytes, kMostStaging * options_.staging_bytes);
  const size_t chunk = std::max<size_t>(chunk_bytes / (sum_bytes * counts.size()), 1);
  if (overlaps_ && is_even() && counts.size() <= kMostOverlappedBlocks && chunk >= kLeastChunk &&
      most >= (levels.is_widened ? kLeastChunksOfRings : 2) * chunk)
    return run_reduce_scatter_overlapped(ins, counts, out, ring_chunk(chunk, sum_bytes), levels,
                                         sub_call);
  note(Collective::kReduceScatter, "in steps", total_count(counts) * element_bytes);
  std::vector<const void*> regions(members().size());
  std::vector<size_t> region_counts(members().size());
  std::vector<const void*> across(domains_.size());
  std::vector<size_t> across_counts(domains_.size());

  size_t begin = 0;
  do {
    size_t packed_count = 0;
    for (size_t count : counts) packed_count += in_chunk(count, begin, chunk);
    DSCOMM_ASSIGN_OR_RETURN(auto* packed, staging(0, packed_count * sum_bytes));
    pack(ins, counts, begin, chunk, levels, packed, &regions, &region_counts);
    auto* block = static_cast<std::byte*>(const_cast<void*>(regions[index_]));  // in staging
    DSCOMM_RETURN_IF_ERROR(
        inner_->reduce_scatter(regions, region_counts, block, levels.inner, sub_call));

    std::byte* own_block = nullptr;
    for (LedSlice& slice : led_) {
      size_t slice_elements = 0;
      for (int domain = 0; domain < domain_count(); ++domain) {
        const int rank = member(domain, slice.index);
        if (rank == rank_) own_block = block;
        across[domain] = block;
        across_counts[domain] = rank >= 0 ? in_chunk(counts[rank], begin, chunk) : 0;
        slice_elements += across_counts[domain];
        block += across_counts[domain] * sum_bytes;
      }
      if (slice.index > 0 && slice_elements == 0) continue;
      // This rank's block is in the slice of its local rank; the other slices have nothing for it.
      std::byte* sums = slice.index == index_ ? own_block : nullptr;
      DSCOMM_RETURN_IF_ERROR(slice.team->reduce_scatter(across, across_counts, sums, levels.outer,
                                                        later(sub_call, 1)));
    }
    if (const size_t own_count = in_chunk(counts[rank_], begin, chunk); own_count > 0)
      make_results(own_block, out + begin * element_bytes, own_count, levels);
    begin += chunk;
  } while (begin < most);
  return {};
}

// Makes one outer call. While it moves some chunks, the ranks of each domain pack and reduce later
// chunks. This rank has one ring for each domain, with the sums for the domain's rank that has the
// same local rank as this one. Results go directly to `out`, widened ones first to another ring.
Status HierarchicalTeam::run_reduce_scatter_overlapped(Inputs ins, Counts counts, std::byte* out,
                                                       size_t chunk, const Levels& levels,
                                                       const CallOptions& sub_call) {
  const CallOptions later_call = later(sub_call, 2);
  const size_t element_bytes = levels.element_bytes(), sum_bytes = levels.sum_bytes();
  note(Collective::kReduceScatter, "overlapped", total_count(counts) * element_bytes);
  const size_t ring = 2 * chunk, ring_bytes = ring * sum_bytes;
  const size_t in_all = (*std::max_element(counts.begin(), counts.end()) + chunk - 1) / chunk;
  const int me = index_;
  DSCOMM_ASSIGN_OR_RETURN(auto* packed, staging(0, counts.size() * chunk * sum_bytes));
  DSCOMM_ASSIGN_OR_RETURN(auto* rings, staging(1, (domains_.size() + 1) * ring_bytes));
  std::byte* const results = levels.is_widened ? rings + domains_.size() * ring_bytes : out;
  std::vector<const void*> regions(members().size());
  std::vector<size_t> region_counts(members().size());
  size_t reduced = 0;  // chunks so far
  const auto reduce_next = [&]() -> Status {
    const size_t begin = reduced * chunk;
    pack(ins, counts, begin, chunk, levels, packed, &regions, &region_counts);
    auto* sums = static_cast<std::byte*>(const_cast<void*>(regions[me]));  // not const: in staging
    // From the second chunk on, members of the domain may wait in an outer call, which is a later
    // step. So the inner call gets the deadline of the last step.
    DSCOMM_RETURN_IF_ERROR(inner_->reduce_scatter(regions, region_counts, sums, levels.inner,
                                                  reduced == 0 ? sub_call : later_call));
    for (int rank : destinations_[me]) {
      const size_t count = in_chunk(counts[rank], begin, chunk);
      if (count == 0) continue;
      std::byte* at = rings + domain_of(rank) * ring_bytes + begin % ring * sum_bytes;
      std::memcpy(at, sums, count * sum_bytes);
      sums += count * sum_bytes;
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
  size_t finished = 0;  // results made so far, in elements
  const auto make_next_results = [&] {
    const size_t count = in_chunk(counts[rank_], finished, chunk);
    make_results(results + finished % ring * sum_bytes, out + finished * element_bytes, count,
                 levels);
    finished += chunk;
  };
  if (levels.is_widened) {
    chunks.out_ring = ring;
    chunks.consume = [&](size_t end) -> Status {
      while (finished < counts[rank_] && finished + chunk <= end) make_next_results();
      return {};
    };
  }
  DSCOMM_RETURN_IF_ERROR(chunks.make(1));
  std::vector<const void*> across(domains_.size());
  std::vector<size_t> across_counts(domains_.size());
  size_t slice_elements = 0;
  for (size_t domain = 0; domain < domains_.size(); ++domain) {
    across[domain] = rings + domain * ring_bytes;
    across_counts[domain] = counts[domains_[domain][me]];
    slice_elements += across_counts[domain];
  }
  if (index_ == 0 || slice_elements > 0)
    DSCOMM_RETURN_IF_ERROR(outer().reduce_scatter(across, across_counts, results, levels.outer,
                                                  later(sub_call, 1, &chunks)));
  while (reduced < in_all) DSCOMM_RETURN_IF_ERROR(reduce_next());
  if (!levels.is_widened) make_results(out, out, counts[rank_], levels);
  while (levels.is_widened && finished < counts[rank_]) make_next_results();
  return {};
}

}  // namespace dscomm
