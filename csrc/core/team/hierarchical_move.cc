// The collectives of HierarchicalTeam that move data and the barrier.

#include <algorithm>
#include <cstring>

#include "core/team/arguments.h"
#include "core/team/hierarchical_team.h"

namespace dscomm {
namespace {

std::byte* offset(void* base, size_t bytes) { return static_cast<std::byte*>(base) + bytes; }
const std::byte* offset(const void* base, size_t bytes) {
  return static_cast<const std::byte*>(base) + bytes;
}

void copy(void* out, const void* in, size_t bytes) {
  if (bytes > 0) std::memcpy(out, in, bytes);
}

// Lays out one region for each domain, from `cursor` on, with room for the blocks of its ranks.
template <typename Pointer, typename CountOf>
void lay_out(std::byte* cursor, std::span<const int> ranks, std::span<const int> domain_of,
             size_t element_bytes, const CountOf& count_of, std::vector<Pointer>* regions,
             std::vector<size_t>* counts) {
  std::fill(counts->begin(), counts->end(), size_t{0});
  for (int rank : ranks) (*counts)[domain_of[rank]] += count_of(rank);
  for (size_t domain = 0; domain < counts->size(); ++domain) {
    (*regions)[domain] = cursor;
    cursor += (*counts)[domain] * element_bytes;
  }
}

// Copies a chunk of each rank's block, packed in the order of `ranks`, to element `begin` of that
// rank's output.
template <typename CountOf>
void unpack(const std::byte* packed, std::span<const int> ranks, std::span<void* const> outs,
            size_t begin, size_t element_bytes, const CountOf& count_of) {
  for (int rank : ranks) {
    const size_t bytes = count_of(rank) * element_bytes;
    if (bytes == 0) continue;
    copy(offset(outs[rank], begin * element_bytes), packed, bytes);
    packed += bytes;
  }
}

}  // namespace

// In the root's domain to the leader of slice 0, across, and inside the other domains. A root that
// leads slice 0 itself sends across first, so that the far domains do not wait for its own.
Status HierarchicalTeam::run_broadcast(std::byte* buffer, size_t count, DType dtype, int root,
                                       const CallOptions& piece) {
  const int root_domain = domain_of(root);
  const bool root_is_beside = domain_ == root_domain && index_of(root) != 0;
  if (const size_t chunk = overlapped_chunk(count, dtype_bytes(dtype)); chunk > 0)
    return run_broadcast_overlapped(buffer, count, dtype, root, chunk, piece);
  const size_t chunk = std::max<size_t>(options_.staging_bytes / dtype_bytes(dtype), 1);
  size_t begin = 0;
  do {
    const size_t chunk_count = std::min(chunk, count - begin);
    std::byte* data = buffer + begin * dtype_bytes(dtype);
    if (root_is_beside)
      DSCOMM_RETURN_IF_ERROR(inner_->broadcast(data, chunk_count, dtype, index_of(root), piece));
    if (index_ == 0)
      DSCOMM_RETURN_IF_ERROR(
          outer(0).broadcast(data, chunk_count, dtype, root_domain, later(piece, 1)));
    if (!root_is_beside)
      DSCOMM_RETURN_IF_ERROR(inner_->broadcast(data, chunk_count, dtype, 0, later(piece, 2)));
    begin += chunk_count;
  } while (begin < count);
  return {};
}

// The same in one outer call, while whose chunks travel others are spread inside.
Status HierarchicalTeam::run_broadcast_overlapped(std::byte* buffer, size_t count, DType dtype,
                                                  int root, size_t chunk,
                                                  const CallOptions& piece) {
  const CallOptions later_piece = later(piece, 2);
  const int root_domain = domain_of(root);
  const bool root_is_beside = domain_ == root_domain && index_of(root) != 0;
  const size_t in_all = (count + chunk - 1) / chunk;
  size_t spread = 0;  // chunks
  const auto spread_next = [&]() -> Status {
    const size_t begin = spread++ * chunk;
    return inner_->broadcast(buffer + begin * dtype_bytes(dtype), std::min(chunk, count - begin),
                             dtype, root_is_beside ? index_of(root) : 0,
                             root_is_beside && begin == 0 ? piece : later_piece);
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
      chunks.take = [&](size_t end) -> Status {
        while (spread < in_all && (spread + 1) * chunk <= end)
          DSCOMM_RETURN_IF_ERROR(spread_next());
        return {};
      };
    }
    CallOptions across_piece = later(piece, 1);
    across_piece.chunks = &chunks;
    DSCOMM_RETURN_IF_ERROR(outer(0).broadcast(buffer, count, dtype, root_domain, across_piece));
  }
  while (spread < in_all) DSCOMM_RETURN_IF_ERROR(spread_next());
  return {};
}

// Own domains first; then every rank carries its block across in the slice of its number; then
// leaders spread what came from the other domains. Small blocks are packed, so that the last step
// is one inner call; large ones are spread from where they belong, which saves two copies of
// everything.
Status HierarchicalTeam::run_all_gather(const void* in, DType dtype, std::span<void* const> outs,
                                        std::span<const size_t> counts, const CallOptions& piece) {
  std::vector<void*> inner_outs;
  std::vector<size_t> inner_counts;
  for (int rank : members()) {
    inner_outs.push_back(outs[rank]);
    inner_counts.push_back(counts[rank]);
  }
  DSCOMM_RETURN_IF_ERROR(
      inner_->all_gather(in, counts[rank_], dtype, inner_outs, inner_counts, piece));
  const size_t most = *std::max_element(counts.begin(), counts.end());
  if (const size_t chunk = overlapped_chunk(most, dtype_bytes(dtype)); chunk > 0)
    return spread_overlapped(dtype, outs, counts, chunk, piece);
  size_t total = 0;
  for (size_t count : counts) total += count;
  if (total * dtype_bytes(dtype) <= options_.staging_bytes)
    return spread_packed(dtype, outs, counts, piece);
  DSCOMM_RETURN_IF_ERROR(cross(dtype, outs, counts, piece));
  return spread_in_place(dtype, outs, counts, 0, most, later(piece, 2));
}

// One outer call; what has come of each block is spread while the rest travels.
Status HierarchicalTeam::spread_overlapped(DType dtype, std::span<void* const> outs,
                                           std::span<const size_t> counts, size_t chunk,
                                           const CallOptions& piece) {
  const CallOptions later_piece = later(piece, 2);
  const size_t most = *std::max_element(counts.begin(), counts.end());
  size_t spread = 0;  // elements of each block
  const auto spread_next = [&]() -> Status {
    spread += chunk;
    return spread_in_place(dtype, outs, counts, spread - chunk, chunk, later_piece);
  };
  Chunks chunks;
  chunks.count = chunk;
  chunks.take = [&](size_t end) -> Status {
    while (spread < most && spread + chunk <= end) DSCOMM_RETURN_IF_ERROR(spread_next());
    return {};
  };
  CallOptions across_piece = piece;
  across_piece.chunks = &chunks;
  DSCOMM_RETURN_IF_ERROR(cross(dtype, outs, counts, across_piece));
  while (spread < most) DSCOMM_RETURN_IF_ERROR(spread_next());
  return {};
}

// All-gathers, in every slice that this rank leads, the blocks of the slice's destinations into
// `blocks` (by rank), where this rank's own already is.
Status HierarchicalTeam::cross(DType dtype, std::span<void* const> blocks,
                               std::span<const size_t> counts, const CallOptions& piece) {
  std::vector<void*> outs(domains_.size());
  std::vector<size_t> out_counts(domains_.size());
  for (Slice& slice : led_) {
    size_t slice_elements = 0;
    for (int domain = 0; domain < domain_count(); ++domain) {
      const int rank = member(domain, slice.index);
      outs[domain] = rank >= 0 ? blocks[rank] : nullptr;
      out_counts[domain] = rank >= 0 ? counts[rank] : 0;
      slice_elements += out_counts[domain];
    }
    if (slice.index > 0 && slice_elements == 0) continue;
    DSCOMM_RETURN_IF_ERROR(slice.team->all_gather(outs[domain_], out_counts[domain_], dtype, outs,
                                                  out_counts, later(piece, 1)));
  }
  return {};
}

Status HierarchicalTeam::spread_packed(DType dtype, std::span<void* const> outs,
                                       std::span<const size_t> counts, const CallOptions& piece) {
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
  for (const std::vector<Destination>& destinations : destinations_) {
    std::byte* region = cursor;
    for (const Destination& destination : destinations) {
      if (destination.domain == domain_) continue;
      blocks[destination.rank] = cursor;
      cursor += counts[destination.rank] * element_bytes;
    }
    regions.push_back(region);
    region_counts.push_back(static_cast<size_t>(cursor - region) / element_bytes);
  }
  DSCOMM_RETURN_IF_ERROR(cross(dtype, blocks, counts, piece));
  if (foreign_count == 0) return {};
  DSCOMM_RETURN_IF_ERROR(inner_->all_gather(regions[index_], region_counts[index_], dtype, regions,
                                            region_counts, later(piece, 2)));
  for (size_t rank = 0; rank < counts.size(); ++rank)
    if (domain_of_[rank] != domain_) copy(outs[rank], blocks[rank], counts[rank] * element_bytes);
  return {};
}

// Spreads inside what leaders have of the other domains' blocks, of each the `chunk` elements from
// `begin` on, from where it belongs.
Status HierarchicalTeam::spread_in_place(DType dtype, std::span<void* const> outs,
                                         std::span<const size_t> counts, size_t begin, size_t chunk,
                                         const CallOptions& piece) {
  std::vector<void*> round_outs(members().size());
  std::vector<size_t> round_counts(members().size());
  for (int domain = 0; domain < domain_count(); ++domain) {
    if (domain == domain_) continue;
    for (int first = 0; member(domain, first) >= 0; first += local_count()) {
      size_t elements = 0;
      for (int local = 0; local < local_count(); ++local) {
        const int rank = member(domain, first + local);
        const size_t count = rank >= 0 ? in_chunk(counts[rank], begin, chunk) : 0;
        round_outs[local] = count > 0 ? offset(outs[rank], begin * dtype_bytes(dtype)) : nullptr;
        round_counts[local] = count;
        elements += count;
      }
      if (elements == 0) continue;  // all ranks know the counts
      DSCOMM_RETURN_IF_ERROR(inner_->all_gather(round_outs[index_], round_counts[index_], dtype,
                                                round_outs, round_counts, piece));
    }
  }
  return {};
}

// Tells every rank every rank's count. With the calls' hash on it, this also settles that all ranks
// make the same call, so that what follows may choose its slice by the root.
Status HierarchicalTeam::share_counts(size_t count, std::vector<size_t>* counts,
                                      const CallOptions& piece) {
  std::vector<uint64_t> words(size());
  std::vector<void*> outs;
  for (uint64_t& word : words) outs.push_back(&word);
  const std::vector<size_t> ones(words.size(), 1);
  const uint64_t mine = count;
  DSCOMM_RETURN_IF_ERROR(run_all_gather(&mine, DType::kUInt64, outs, ones, piece));
  counts->assign(words.begin(), words.end());
  return {};
}

// After the counts, by chunks: inside to the leader of the root's slice, and across to the root.
Status HierarchicalTeam::run_gather(const std::byte* in, size_t count, DType dtype,
                                    std::span<void* const> outs, std::span<const size_t> out_counts,
                                    int root, const CallOptions& piece) {
  std::vector<size_t> counts;
  DSCOMM_RETURN_IF_ERROR(share_counts(count, &counts, piece));
  for (size_t rank = 0; rank < out_counts.size(); ++rank)
    if (counts[rank] != out_counts[rank])
      return misfit(static_cast<int>(rank), counts[rank], root, out_counts[rank],
                    "the counts of the ranks do not fit");

  const size_t element_bytes = dtype_bytes(dtype);
  const size_t chunk =
      std::max<size_t>(options_.staging_bytes / (element_bytes * counts.size()), 1);
  const size_t most = *std::max_element(counts.begin(), counts.end());
  const int slice = index_of(root);
  const int leader = slice % local_count();  // the root itself in its own domain
  const bool is_root = rank_ == root;

  std::vector<void*> blocks(index_ == leader ? members().size() : 0);
  std::vector<size_t> block_counts(blocks.size());
  std::vector<void*> regions(is_root ? domains_.size() : 0);
  std::vector<size_t> region_counts(regions.size());
  for (size_t begin = 0; begin < most; begin += chunk) {
    auto count_of = [&](int rank) { return in_chunk(counts[rank], begin, chunk); };
    DSCOMM_ASSIGN_OR_RETURN(auto* packed,
                            staging(0, std::min(most, chunk) * counts.size() * element_bytes));

    std::byte* cursor = packed;
    for (size_t local = 0; local < blocks.size(); ++local) {
      const int rank = members()[local];
      block_counts[local] = count_of(rank);
      // No pointer is formed beyond a block that has ended before this chunk.
      if (is_root && block_counts[local] > 0)
        blocks[local] = offset(outs[rank], begin * element_bytes);
      if (!is_root) {
        blocks[local] = cursor;
        cursor += block_counts[local] * element_bytes;
      }
    }
    const size_t own_count = count_of(rank_);
    const std::byte* own = own_count > 0 ? in + begin * element_bytes : nullptr;
    DSCOMM_RETURN_IF_ERROR(
        inner_->gather(own, own_count, dtype, blocks, block_counts, leader, later(piece, 3)));
    if (index_ != leader) continue;

    if (!is_root) {
      const auto packed_count = static_cast<size_t>(cursor - packed) / element_bytes;
      DSCOMM_RETURN_IF_ERROR(outer(slice).gather(packed, packed_count, dtype, regions,
                                                 region_counts, domain_of(root), later(piece, 4)));
      continue;
    }
    lay_out(cursor, foreign_, domain_of_, element_bytes, count_of, &regions, &region_counts);
    DSCOMM_RETURN_IF_ERROR(
        outer(slice).gather(nullptr, 0, dtype, regions, region_counts, domain_, later(piece, 4)));
    unpack(packed, foreign_, outs, begin, element_bytes, count_of);
  }
  return {};
}

// After the counts, by chunks: from the root across to the leaders of its slice, and inside.
Status HierarchicalTeam::run_scatter(std::span<const void* const> ins,
                                     std::span<const size_t> in_counts, std::byte* out,
                                     size_t count, DType dtype, int root,
                                     const CallOptions& piece) {
  std::vector<size_t> counts;
  DSCOMM_RETURN_IF_ERROR(share_counts(count, &counts, piece));
  for (size_t rank = 0; rank < in_counts.size(); ++rank)
    if (counts[rank] != in_counts[rank])
      return misfit(root, in_counts[rank], static_cast<int>(rank), counts[rank],
                    "the counts of the ranks do not fit");

  const size_t element_bytes = dtype_bytes(dtype);
  const size_t chunk =
      std::max<size_t>(options_.staging_bytes / (element_bytes * counts.size()), 1);
  const size_t most = *std::max_element(counts.begin(), counts.end());
  const int slice = index_of(root);
  const int leader = slice % local_count();  // the root itself in its own domain
  const bool is_root = rank_ == root;

  std::vector<const void*> regions(is_root ? domains_.size() : 0);
  std::vector<size_t> region_counts(regions.size());
  std::vector<const void*> blocks(index_ == leader ? members().size() : 0);
  std::vector<size_t> block_counts(blocks.size());
  for (size_t begin = 0; begin < most; begin += chunk) {
    auto count_of = [&](int rank) { return in_chunk(counts[rank], begin, chunk); };
    DSCOMM_ASSIGN_OR_RETURN(auto* packed,
                            staging(0, std::min(most, chunk) * counts.size() * element_bytes));

    if (is_root) {
      lay_out(packed, foreign_, domain_of_, element_bytes, count_of, &regions, &region_counts);
      std::byte* cursor = packed;
      for (int rank : foreign_) {
        const size_t bytes = count_of(rank) * element_bytes;
        if (bytes == 0) continue;
        copy(cursor, offset(ins[rank], begin * element_bytes), bytes);
        cursor += bytes;
      }
      DSCOMM_RETURN_IF_ERROR(outer(slice).scatter(regions, region_counts, nullptr, 0, dtype,
                                                  domain_, later(piece, 3)));
    } else if (index_ == leader) {
      size_t packed_count = 0;
      for (int rank : members()) packed_count += count_of(rank);
      DSCOMM_RETURN_IF_ERROR(outer(slice).scatter(regions, region_counts, packed, packed_count,
                                                  dtype, domain_of(root), later(piece, 3)));
    }

    const std::byte* cursor = packed;
    for (size_t local = 0; local < blocks.size(); ++local) {
      const int rank = members()[local];
      block_counts[local] = count_of(rank);
      if (is_root && block_counts[local] > 0)
        blocks[local] = offset(ins[rank], begin * element_bytes);
      if (!is_root) {
        blocks[local] = cursor;
        cursor += block_counts[local] * element_bytes;
      }
    }
    const size_t own_count = count_of(rank_);
    std::byte* own = own_count > 0 ? out + begin * element_bytes : nullptr;
    DSCOMM_RETURN_IF_ERROR(
        inner_->scatter(blocks, block_counts, own, own_count, dtype, leader, later(piece, 4)));
  }
  return {};
}

// Who sends how much to whom, as far as this rank must know: `domain_counts` holds a row for each
// local rank of what it sends to every rank, `counts_to_me` what every rank sends here, and
// `largest` is the most that any rank sends to any.
Status HierarchicalTeam::exchange_counts(std::span<const size_t> in_counts,
                                         std::vector<uint64_t>* domain_counts,
                                         std::vector<uint64_t>* counts_to_me, uint64_t* largest,
                                         const CallOptions& piece) {
  const size_t n = in_counts.size(), local_ranks = members().size();
  const std::vector<uint64_t> row(in_counts.begin(), in_counts.end());
  domain_counts->resize(local_ranks * n);
  std::vector<void*> rows;
  for (size_t local = 0; local < local_ranks; ++local) rows.push_back(&(*domain_counts)[local * n]);
  const std::vector<size_t> row_counts(local_ranks, n);
  DSCOMM_RETURN_IF_ERROR(
      inner_->all_gather(row.data(), n, DType::kUInt64, rows, row_counts, piece));
  const uint64_t largest_here = *std::max_element(domain_counts->begin(), domain_counts->end());

  // To the destination of each domain go this domain's counts for it, and the largest.
  counts_to_me->resize(n);
  std::vector<std::vector<uint64_t>> sent(domains_.size()), received(domains_.size());
  std::vector<const void*> ins(domains_.size());
  std::vector<void*> outs(domains_.size());
  std::vector<size_t> sent_counts(domains_.size()), received_counts(domains_.size());
  for (Slice& slice : led_) {
    const bool carries_me = slice.index == index_;
    for (size_t domain = 0; domain < domains_.size(); ++domain) {
      sent[domain].clear();
      const int destination = member(static_cast<int>(domain), slice.index);
      if (destination >= 0) {
        for (size_t local = 0; local < local_ranks; ++local)
          sent[domain].push_back((*domain_counts)[local * n + destination]);
        sent[domain].push_back(largest_here);
      }
      received[domain].resize(carries_me ? domains_[domain].size() + 1 : 0);
      ins[domain] = sent[domain].data();
      outs[domain] = received[domain].data();
      sent_counts[domain] = sent[domain].size();
      received_counts[domain] = received[domain].size();
    }
    DSCOMM_RETURN_IF_ERROR(slice.team->all_to_all(ins, sent_counts, outs, received_counts,
                                                  DType::kUInt64, later(piece, 1)));
    if (!carries_me) continue;
    *largest = 0;
    for (size_t domain = 0; domain < domains_.size(); ++domain) {
      for (size_t local = 0; local < domains_[domain].size(); ++local)
        (*counts_to_me)[domains_[domain][local]] = received[domain][local];
      *largest = std::max(*largest, received[domain].back());
    }
  }
  return {};
}

// After the counts, by chunks of every block: inside to the leaders of the destinations' slices,
// and across to the destinations; a block for a rank of the same domain goes inside to that rank
// itself. Between the two exchanges a leader puts what it got by source in the order of the
// destinations.
Status HierarchicalTeam::run_all_to_all(std::span<const void* const> ins,
                                        std::span<const size_t> in_counts,
                                        std::span<void* const> outs,
                                        std::span<const size_t> out_counts, DType dtype,
                                        const CallOptions& piece) {
  std::vector<uint64_t> domain_counts, counts_to_me;
  uint64_t largest = 0;
  DSCOMM_RETURN_IF_ERROR(
      exchange_counts(in_counts, &domain_counts, &counts_to_me, &largest, piece));
  for (size_t source = 0; source < out_counts.size(); ++source)
    if (counts_to_me[source] != out_counts[source])
      return misfit(static_cast<int>(source), counts_to_me[source], rank_, out_counts[source],
                    "the split sizes do not fit");

  const size_t n = in_counts.size(), local_ranks = members().size();
  const size_t element_bytes = dtype_bytes(dtype);
  // A leader holds at most this many blocks at once.
  const size_t blocks = n + slice_count_ * domains_.size();
  const size_t chunk = std::max<size_t>(options_.staging_bytes / (element_bytes * blocks), 1);
  const std::vector<Destination>& mine = destinations_[index_];
  std::vector<const void*> sends(local_ranks), across(domains_.size());
  std::vector<void*> receives(local_ranks), arrivals(domains_.size());
  std::vector<size_t> send_counts(local_ranks), receive_counts(local_ranks);
  std::vector<size_t> across_counts(domains_.size()), arrival_counts(domains_.size());
  std::vector<const std::byte*> unread(local_ranks);

  for (size_t begin = 0; begin < largest; begin += chunk) {
    // What local rank `local` sends to `rank` in this chunk, and what `rank` sends here.
    auto sent_by = [&](size_t local, int rank) {
      return in_chunk(domain_counts[local * n + rank], begin, chunk);
    };
    auto sent_to_me = [&](int rank) { return in_chunk(counts_to_me[rank], begin, chunk); };
    const size_t buffer_bytes = std::min<size_t>(largest, chunk) * blocks * element_bytes;
    DSCOMM_ASSIGN_OR_RETURN(auto* first, staging(0, buffer_bytes));
    DSCOMM_ASSIGN_OR_RETURN(auto* second, staging(1, buffer_bytes));

    std::byte* cursor = first;
    auto pack = [&](int rank) {
      const size_t count = sent_by(index_, rank);
      if (count == 0) return;
      copy(cursor, offset(ins[rank], begin * element_bytes), count * element_bytes);
      cursor += count * element_bytes;
    };
    for (size_t local = 0; local < local_ranks; ++local) {
      sends[local] = cursor;
      std::byte* region = cursor;
      pack(members()[local]);
      for (const Destination& destination : destinations_[local])
        if (destination.domain != domain_) pack(destination.rank);
      send_counts[local] = static_cast<size_t>(cursor - region) / element_bytes;
    }
    cursor = second;
    for (size_t local = 0; local < local_ranks; ++local) {
      receives[local] = cursor;
      receive_counts[local] = sent_by(local, rank_);
      for (const Destination& destination : mine)
        if (destination.domain != domain_)
          receive_counts[local] += sent_by(local, destination.rank);
      cursor += receive_counts[local] * element_bytes;
    }
    DSCOMM_RETURN_IF_ERROR(
        inner_->all_to_all(sends, send_counts, receives, receive_counts, dtype, later(piece, 2)));

    for (size_t local = 0; local < local_ranks; ++local) {
      unread[local] = static_cast<std::byte*>(receives[local]);
      const size_t bytes = sent_by(local, rank_) * element_bytes;
      if (bytes == 0) continue;
      copy(offset(outs[members()[local]], begin * element_bytes), unread[local], bytes);
      unread[local] += bytes;
    }
    cursor = first;
    auto next = mine.begin();
    std::vector<std::byte*> departures;  // of every foreign destination, and the end
    for (const Destination& destination : mine) {
      if (destination.domain == domain_) continue;
      departures.push_back(cursor);
      for (size_t local = 0; local < local_ranks; ++local) {
        const size_t bytes = sent_by(local, destination.rank) * element_bytes;
        copy(cursor, unread[local], bytes);
        unread[local] += bytes;
        cursor += bytes;
      }
    }
    departures.push_back(cursor);

    size_t departed = 0;
    for (Slice& slice : led_) {
      std::fill(across.begin(), across.end(), nullptr);
      std::fill(across_counts.begin(), across_counts.end(), size_t{0});
      for (; next != mine.end() && next->slice == slice.index; ++next) {
        if (next->domain == domain_) continue;
        const int domain = next->domain;
        across[domain] = departures[departed];
        across_counts[domain] =
            static_cast<size_t>(departures[departed + 1] - departures[departed]) / element_bytes;
        ++departed;
      }
      const bool carries_me = slice.index == index_;
      lay_out(
          second, foreign_, domain_of_, element_bytes,
          [&](int rank) { return carries_me ? sent_to_me(rank) : 0; }, &arrivals, &arrival_counts);
      DSCOMM_RETURN_IF_ERROR(slice.team->all_to_all(across, across_counts, arrivals, arrival_counts,
                                                    dtype, later(piece, 3)));
      if (!carries_me) continue;
      unpack(second, foreign_, outs, begin, element_bytes, sent_to_me);
    }
  }
  return {};
}

Status HierarchicalTeam::run_barrier(const CallOptions& piece) {
  DSCOMM_RETURN_IF_ERROR(inner_->barrier(piece));
  if (index_ == 0) DSCOMM_RETURN_IF_ERROR(outer(0).barrier(later(piece, 1)));
  return inner_->barrier(later(piece, 2));
}

}  // namespace dscomm
