// The collectives of HierarchicalTeam that move data, and the barrier.

#include <algorithm>
#include <cstring>

#include "core/team/chunk.h"
#include "core/team/hierarchical_team.h"

namespace dscomm {

// The data goes first to the leader of slice 0 in the root's domain, then to the other domains,
// then inside them. If the root is this leader, it sends to the other domains before its own.
Status HierarchicalTeam::run_broadcast(std::byte* buffer, size_t count, DType dtype, int root,
                                       const CallOptions& sub_call) {
  const int root_domain = domain_of(root);
  const bool root_is_beside = domain_ == root_domain && index_of(root) != 0;
  if (const size_t chunk = overlapped_chunk(count, dtype_bytes(dtype)); chunk > 0)
    return run_broadcast_overlapped(buffer, count, dtype, root, chunk, sub_call);
  note(Collective::kBroadcast, "in steps", count * dtype_bytes(dtype));
  const size_t chunk = std::max<size_t>(options_.staging_bytes / dtype_bytes(dtype), 1);
  size_t begin = 0;
  do {
    const size_t chunk_count = std::min(chunk, count - begin);
    std::byte* data = buffer + begin * dtype_bytes(dtype);
    if (root_is_beside)
      DSCOMM_RETURN_IF_ERROR(inner_->broadcast(data, chunk_count, dtype, index_of(root), sub_call));
    if (index_ == 0)
      DSCOMM_RETURN_IF_ERROR(
          outer().broadcast(data, chunk_count, dtype, root_domain, later(sub_call, 1)));
    if (!root_is_beside)
      DSCOMM_RETURN_IF_ERROR(inner_->broadcast(data, chunk_count, dtype, 0, later(sub_call, 2)));
    begin += chunk_count;
  } while (begin < count);
  return {};
}

// A broadcast by one outer call: while some chunks travel, others are distributed inside.
Status HierarchicalTeam::run_broadcast_overlapped(std::byte* buffer, size_t count, DType dtype,
                                                  int root, size_t chunk,
                                                  const CallOptions& sub_call) {
  note(Collective::kBroadcast, "overlapped", count * dtype_bytes(dtype));
  const CallOptions later_call = later(sub_call, 2);
  const int root_domain = domain_of(root);
  const bool root_is_beside = domain_ == root_domain && index_of(root) != 0;
  const size_t in_all = (count + chunk - 1) / chunk;
  size_t spread = 0;  // chunks distributed so far
  const auto spread_next = [&]() -> Status {
    const size_t begin = spread++ * chunk;
    return inner_->broadcast(buffer + begin * dtype_bytes(dtype), std::min(chunk, count - begin),
                             dtype, root_is_beside ? index_of(root) : 0,
                             root_is_beside && begin == 0 ? sub_call : later_call);
  };
  if (index_ == 0) {
    Chunks chunks;
    chunks.count = chunk;
    const auto make = [&](size_t end) -> Status {
      while (spread < in_all && spread * chunk < end) DSCOMM_RETURN_IF_ERROR(spread_next());
      return {};
    };
    if (root_is_beside) {
      DSCOMM_RETURN_IF_ERROR(make(1));
      chunks.make = make;
    } else {
      chunks.consume = [&](size_t end) -> Status {
        while (spread < in_all && (spread + 1) * chunk <= end)
          DSCOMM_RETURN_IF_ERROR(spread_next());
        return {};
      };
    }
    DSCOMM_RETURN_IF_ERROR(
        outer().broadcast(buffer, count, dtype, root_domain, later(sub_call, 1, &chunks)));
  }
  while (spread < in_all) DSCOMM_RETURN_IF_ERROR(spread_next());
  return {};
}

// Blocks are gathered first inside each domain. Then each rank carries its block across, in the
// slice of its local rank. Then leaders distribute the blocks of the other domains. Small blocks
// are packed, so that the last step is one inner call. Large blocks are distributed from their
// place in `outs`, which saves two copies.
Status HierarchicalTeam::run_all_gather(const std::byte* in, size_t own_count, DType dtype,
                                        Outputs outs, Counts counts, const CallOptions& sub_call) {
  std::vector<void*> inner_outs;
  std::vector<size_t> inner_counts;
  for (int rank : members()) {
    inner_outs.push_back(outs[rank]);
    inner_counts.push_back(counts[rank]);
  }
  DSCOMM_RETURN_IF_ERROR(
      inner_->all_gather(in, own_count, dtype, inner_outs, inner_counts, sub_call));
  const size_t most = *std::max_element(counts.begin(), counts.end());
  if (const size_t chunk = overlapped_chunk(most, dtype_bytes(dtype)); chunk > 0)
    return spread_overlapped(dtype, outs, counts, chunk, sub_call);
  note(Collective::kAllGather, "in steps", counts[rank_] * dtype_bytes(dtype));
  const size_t total = total_count(counts);
  if (total * dtype_bytes(dtype) <= options_.staging_bytes)
    return spread_packed(dtype, outs, counts, sub_call);
  DSCOMM_RETURN_IF_ERROR(gather_across(dtype, outs, counts, sub_call));
  const CallOptions last_call = later(sub_call, 2);
  for (int domain = 0; domain < domain_count(); ++domain) {
    if (domain == domain_) continue;
    for (int first = 0; member(domain, first) >= 0; first += local_count())
      DSCOMM_RETURN_IF_ERROR(
          spread_blocks(dtype, outs, counts, domain, first, local_count(), 0, SIZE_MAX, last_call));
  }
  return {};
}

// Each pass of the loop carries the blocks of `least_domain_` ranks of each domain: each outer call
// carries one block of each domain. The received part of each block is distributed inside while the
// rest travels. Each rank already has all blocks of its own domain.
Status HierarchicalTeam::spread_overlapped(DType dtype, Outputs outs, Counts counts, size_t chunk,
                                           const CallOptions& sub_call) {
  note(Collective::kAllGather, "overlapped", counts[rank_] * dtype_bytes(dtype));
  const CallOptions later_call = later(sub_call, 2);
  std::vector<void*> across(domains_.size());
  std::vector<size_t> across_counts(domains_.size());
  for (int first = 0; first < slice_count_; first += least_domain_) {
    size_t most = 0, slice_elements = 0;
    for (int domain = 0; domain < domain_count(); ++domain) {
      for (int local = 0; local < least_domain_; ++local) {
        const int rank = member(domain, first + local);
        const size_t count = rank >= 0 ? counts[rank] : 0;
        most = std::max(most, count);
        if (local != index_) continue;
        across[domain] = rank >= 0 ? outs[rank] : nullptr;
        across_counts[domain] = count;
        slice_elements += count;
      }
    }
    size_t spread = 0;  // elements of each block distributed so far
    const auto spread_next = [&]() -> Status {
      for (int domain = 0; domain < domain_count(); ++domain)
        if (domain != domain_)
          DSCOMM_RETURN_IF_ERROR(spread_blocks(dtype, outs, counts, domain, first, least_domain_,
                                               spread, chunk, later_call));
      spread += chunk;
      return {};
    };
    Chunks chunks;
    chunks.count = chunk;
    chunks.consume = [&](size_t end) -> Status {
      while (spread < most && spread + chunk <= end) DSCOMM_RETURN_IF_ERROR(spread_next());
      return {};
    };
    // Slice 0 takes part in any case, see "Agreement" in hierarchical_team.h.
    const bool is_first = first == 0 && index_ == 0;
    if (index_ < least_domain_ && (is_first || slice_elements > 0))
      DSCOMM_RETURN_IF_ERROR(outer().all_gather(across[domain_], across_counts[domain_], dtype,
                                                across, across_counts,
                                                later(sub_call, 1, &chunks)));
    while (spread < most) DSCOMM_RETURN_IF_ERROR(spread_next());
  }
  return {};
}

// In each slice that this rank leads, all-gathers between domains the blocks of the ranks whose
// local rank is the slice's number, into `blocks` (by rank). This rank's block is already there.
Status HierarchicalTeam::gather_across(DType dtype, Outputs blocks, Counts counts,
                                       const CallOptions& sub_call) {
  std::vector<void*> outs(domains_.size());
  std::vector<size_t> out_counts(domains_.size());
  for (LedSlice& slice : led_) {
    size_t slice_elements = 0;
    for (int domain = 0; domain < domain_count(); ++domain) {
      const int rank = member(domain, slice.index);
      outs[domain] = rank >= 0 ? blocks[rank] : nullptr;
      out_counts[domain] = rank >= 0 ? counts[rank] : 0;
      slice_elements += out_counts[domain];
    }
    if (slice.index > 0 && slice_elements == 0) continue;
    DSCOMM_RETURN_IF_ERROR(slice.team->all_gather(outs[domain_], out_counts[domain_], dtype, outs,
                                                  out_counts, later(sub_call, 1)));
  }
  return {};
}

Status HierarchicalTeam::spread_packed(DType dtype, Outputs outs, Counts counts,
                                       const CallOptions& sub_call) {
  const size_t element_bytes = dtype_bytes(dtype);
  size_t foreign_count = 0;
  for (size_t rank = 0; rank < counts.size(); ++rank)
    if (domain_of_[rank] != domain_) foreign_count += counts[rank];
  DSCOMM_ASSIGN_OR_RETURN(auto* packed, staging(0, foreign_count * element_bytes));

  // Foreign blocks lie in staging, by leader; blocks of this domain are in place.
  std::vector<void*> blocks(outs.begin(), outs.end());
  std::vector<void*> regions;
  std::vector<size_t> region_counts;
  std::byte* cursor = packed;
  for (const std::vector<int>& destinations : destinations_) {
    std::byte* region = cursor;
    for (int rank : destinations) {
      if (domain_of(rank) == domain_) continue;
      blocks[rank] = cursor;
      cursor += counts[rank] * element_bytes;
    }
    regions.push_back(region);
    region_counts.push_back(static_cast<size_t>(cursor - region) / element_bytes);
  }
  DSCOMM_RETURN_IF_ERROR(gather_across(dtype, blocks, counts, sub_call));
  if (foreign_count == 0) return {};
  DSCOMM_RETURN_IF_ERROR(inner_->all_gather(regions[index_], region_counts[index_], dtype, regions,
                                            region_counts, later(sub_call, 2)));
  for (size_t rank = 0; rank < counts.size(); ++rank)
    if (domain_of_[rank] != domain_ && counts[rank] > 0)
      std::memcpy(outs[rank], blocks[rank], counts[rank] * element_bytes);
  return {};
}

// Local rank k < `width` of this domain has the block of local rank `first` + k of another domain,
// `domain`. Distributes `chunk` elements of each block inside, from element `begin` on.
Status HierarchicalTeam::spread_blocks(DType dtype, Outputs outs, Counts counts, int domain,
                                       int first, int width, size_t begin, size_t chunk,
                                       const CallOptions& sub_call) {
  std::vector<void*> round_outs(members().size());
  std::vector<size_t> round_counts(members().size());
  size_t elements = 0;
  for (int local = 0; local < width; ++local) {
    const int rank = member(domain, first + local);
    const size_t count = rank >= 0 ? in_chunk(counts[rank], begin, chunk) : 0;
    if (count > 0)
      round_outs[local] = static_cast<std::byte*>(outs[rank]) + begin * dtype_bytes(dtype);
    round_counts[local] = count;
    elements += count;
  }
  if (elements == 0) return {};  // on all ranks, because all know the counts
  return inner_->all_gather(round_outs[index_], round_counts[index_], dtype, round_outs,
                            round_counts, sub_call);
}

// Gather, scatter and all_to_all split their lists into inside() and outside().
template <typename Entry>
std::vector<Entry> HierarchicalTeam::inside(std::span<Entry const> entries) const {
  std::vector<Entry> chosen;
  for (int rank : members())
    if (!entries.empty()) chosen.push_back(entries[rank]);
  return chosen;
}
std::vector<size_t> HierarchicalTeam::outside(Counts counts) const {
  std::vector<size_t> chosen(counts.begin(), counts.end());
  for (int rank : members())
    if (!counts.empty()) chosen[rank] = 0;
  return chosen;
}

// Within a domain, blocks go by the inner Team; between domains, by the direct Team. The inner call
// runs while the first direct messages travel, or before them if the direct Team cannot overlap
// (takes_chunks()). Without options_.compare_calls, the domains agree on the call after the inner
// call, in a barrier of slice 0.
template <typename CallInner, typename CallDirect>
Status HierarchicalTeam::exchange_blocks(const CallOptions& sub_call, const CallInner& call_inner,
                                         const CallDirect& call_direct) {
  const std::function<Status()> agree = [&]() -> Status {
    DSCOMM_RETURN_IF_ERROR(call_inner());
    if (index_ != 0 || options_.compare_calls) return {};
    return outer().barrier(later(sub_call, 1));
  };
  CallOptions options = later(sub_call, 2);
  options.domains = &domain_of_;
  if (direct_->takes_chunks())
    options.meanwhile = &agree;
  else
    DSCOMM_RETURN_IF_ERROR(agree());
  return call_direct(options);
}

// The agreement inside a domain that exchanges blocks only with another domain, the root's.
Status HierarchicalTeam::agree_inside(const CallOptions& sub_call) {
  return options_.compare_calls ? Status() : inner_->barrier(sub_call);
}

Status HierarchicalTeam::run_gather(const std::byte* in, size_t count, DType dtype, Outputs outs,
                                    Counts out_counts, int root, const CallOptions& sub_call) {
  note(Collective::kGather, "in blocks", count * dtype_bytes(dtype));
  const bool is_here = domain_of(root) == domain_;
  return exchange_blocks(
      sub_call,
      [&] {
        return is_here ? inner_->gather(in, count, dtype, inside(outs), inside(out_counts),
                                        index_of(root), sub_call)
                       : agree_inside(sub_call);
      },
      [&](const CallOptions& options) {
        return direct_->gather(in, is_here ? 0 : count, dtype, outs, outside(out_counts), root,
                               options);
      });
}

Status HierarchicalTeam::run_scatter(Inputs ins, Counts in_counts, std::byte* out, size_t count,
                                     DType dtype, int root, const CallOptions& sub_call) {
  note(Collective::kScatter, "in blocks", count * dtype_bytes(dtype));
  const bool is_here = domain_of(root) == domain_;
  return exchange_blocks(
      sub_call,
      [&] {
        return is_here ? inner_->scatter(inside(ins), inside(in_counts), out, count, dtype,
                                         index_of(root), sub_call)
                       : agree_inside(sub_call);
      },
      [&](const CallOptions& options) {
        return direct_->scatter(ins, outside(in_counts), out, is_here ? 0 : count, dtype, root,
                                options);
      });
}

Status HierarchicalTeam::run_all_to_all(Inputs ins, Counts in_counts, Outputs outs,
                                        Counts out_counts, DType dtype,
                                        const CallOptions& sub_call) {
  note(Collective::kAllToAll, "in blocks", total_count(in_counts) * dtype_bytes(dtype));
  return exchange_blocks(
      sub_call,
      [&] {
        return inner_->all_to_all(inside(ins), inside(in_counts), inside(outs), inside(out_counts),
                                  dtype, sub_call);
      },
      [&](const CallOptions& options) {
        return direct_->all_to_all(ins, outside(in_counts), outs, outside(out_counts), dtype,
                                   options);
      });
}

Status HierarchicalTeam::run_barrier(const CallOptions& sub_call) {
  note(Collective::kBarrier, "in steps", 0);
  DSCOMM_RETURN_IF_ERROR(inner_->barrier(sub_call));
  if (index_ == 0) DSCOMM_RETURN_IF_ERROR(outer().barrier(later(sub_call, 1)));
  return inner_->barrier(later(sub_call, 2));
}

}  // namespace dscomm
