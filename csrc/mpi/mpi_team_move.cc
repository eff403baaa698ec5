// The collectives of MpiTeam that move data, and the barrier. Bytes travel; a rank's own block
// stays in the caller's memory, or goes through staging only where MPI asks for it.

#include "core/team/arguments.h"
#include "mpi/mpi_team.h"

namespace dscomm {

Status MpiTeam::broadcast(void* buffer, size_t count, DType dtype, int root,
                          const CallOptions& options) {
  DSCOMM_RETURN_IF_ERROR(check_root("broadcast", root, size()));
  DSCOMM_RETURN_IF_ERROR(
      begin(make_record(Collective::kBroadcast, dtype, count, options, root), count, options));
  const size_t element_bytes = dtype_bytes(dtype), bytes = count * element_bytes;
  const bool is_root = rank_ == root;
  if (all_is_there(count) && bytes <= ride_room()) {
    if (!is_few()) {
      // The others bring zeros.
      std::byte* riding = ride_to_be_reduced(DType::kUInt8, ReduceOp::kBor, bytes);
      if (is_root && bytes > 0) std::memcpy(riding, buffer, bytes);
      if (!is_root) std::memset(riding, 0, bytes);
    } else if (is_root && bytes > 0) {
      std::memcpy(ride(bytes), buffer, bytes);
    }
    DSCOMM_RETURN_IF_ERROR(agree());
    if (!is_root && bytes > 0) std::memcpy(buffer, is_few() ? rode(root) : rode_reduced(), bytes);
    return finished();
  }
  if (is_few()) return broadcast_along_chain(buffer, count, dtype, root);

  const Pieces pieces{
      within_chunks(std::min(count, std::max<size_t>(options_.chunk_bytes / element_bytes, 1))),
      element_bytes};
  Rounds rounds(pieces.piece, pieces.bytes());
  rounds.stage = [&](size_t round, std::byte* staging) {
    if (is_root) pieces.stage(staging, buffer, count, round);
  };
  rounds.start = [&](size_t round, MpiStaging& staging) {
    return MPI_Ibcast(staging.data(), static_cast<int>(pieces.bytes_of(count, round)), MPI_BYTE,
                      root, data_, staging.add_request());
  };
  rounds.deliver = [&](size_t round, std::byte* staging) {
    if (!is_root) pieces.deliver(buffer, staging, count, round);
  };
  return run(rounds);
}

Status MpiTeam::all_gather(const void* in, size_t count, DType dtype, std::span<void* const> outs,
                           std::span<const size_t> out_counts, const CallOptions& options) {
  const auto ranks = static_cast<size_t>(size()), me = static_cast<size_t>(rank_);
  DSCOMM_RETURN_IF_ERROR(check_lists("all_gather", outs.size(), out_counts, count, rank_, size()));
  CallRecord call = make_record(Collective::kAllGather, dtype, 0, options);
  call.own_count = count;
  splits_.clear(ranks);
  size_t total = 0, longest = 0;
  for (size_t k = 0; k < ranks; ++k) {
    splits_.sends[k] = count;
    splits_.expects[k] = out_counts[k];
    total += out_counts[k];
    longest = std::max(longest, out_counts[k]);
  }
  DSCOMM_RETURN_IF_ERROR(begin_splits(call, options));
  const size_t element_bytes = dtype_bytes(dtype);
  if (is_few() && longest * element_bytes <= ride_room()) {
    if (count > 0) std::memcpy(ride(count * element_bytes), in, count * element_bytes);
    DSCOMM_RETURN_IF_ERROR(agree());
    for (size_t k = 0; k < ranks; ++k) {
      const void* block = k == me ? in : rode(static_cast<int>(k));
      if (out_counts[k] > 0 && outs[k] != block)
        std::memcpy(outs[k], block, out_counts[k] * element_bytes);
    }
    return finished();
  }
  if (!is_few() && total * element_bytes <= kRideBytes) {
    // Every rank brings its own block, and zeros in place of the others'.
    std::byte* at = ride_to_be_reduced(DType::kUInt8, ReduceOp::kBor, total * element_bytes);
    std::memset(at, 0, total * element_bytes);
    for (size_t k = 0; k < me; ++k) at += out_counts[k] * element_bytes;
    if (count > 0) std::memcpy(at, in, count * element_bytes);
    DSCOMM_RETURN_IF_ERROR(agree());
    at = rode_reduced();
    for (size_t k = 0; k < ranks; ++k) {
      if (out_counts[k] > 0) std::memcpy(outs[k], at, out_counts[k] * element_bytes);
      at += out_counts[k] * element_bytes;
    }
    return finished();
  }

  const Pieces pieces{within_chunks(std::min(longest, piece_of_each(element_bytes))),
                      element_bytes};
  Rounds rounds(pieces.piece, ranks * pieces.bytes());
  rounds.stage = [&](size_t round, std::byte* staging) {
    pieces.stage(staging + me * pieces.bytes(), in, count, round);
  };
  rounds.start = [&](size_t round, MpiStaging& staging) {
    pieces.list(out_counts, Pieces::kNone, round, pieces.bytes(), staging.counts(),
                staging.places());
    return MPI_Iallgatherv(MPI_IN_PLACE, 0, MPI_BYTE, staging.data(), staging.counts(),
                           staging.places(), MPI_BYTE, data_, staging.add_request());
  };
  rounds.deliver = [&](size_t round, std::byte* staging) {
    pieces.deliver_all(outs, out_counts, me, in, round, pieces.bytes(), staging);
  };
  return run(rounds);
}

Status MpiTeam::gather(const void* in, size_t count, DType dtype, std::span<void* const> outs,
                       std::span<const size_t> out_counts, int root, const CallOptions& options) {
  DSCOMM_RETURN_IF_ERROR(check_root("gather", root, size()));
  const auto ranks = static_cast<size_t>(size()), me = static_cast<size_t>(rank_);
  const bool is_root = rank_ == root;
  DSCOMM_RETURN_IF_ERROR(is_root
                             ? check_lists("gather", outs.size(), out_counts, count, rank_, size())
                             : check_lists("gather", outs.size(), out_counts.size(), 0));
  CallRecord call = make_record(Collective::kGather, dtype, 0, options, root);
  call.own_count = count;
  splits_.clear(ranks);
  splits_.sends[root] = count;
  std::copy(out_counts.begin(), out_counts.end(), splits_.expects.begin());
  DSCOMM_RETURN_IF_ERROR(begin_splits(call, options));

  const size_t element_bytes = dtype_bytes(dtype);
  const Pieces pieces{piece_of_each(element_bytes), element_bytes};
  const size_t place_bytes = pieces.bytes_of(splits_.longest(), 0);
  Rounds rounds(pieces.piece, is_root ? ranks * place_bytes : place_bytes);
  rounds.stage = [&](size_t round, std::byte* staging) {
    if (!is_root) pieces.stage(staging, in, count, round);
  };
  rounds.start = [&](size_t round, MpiStaging& staging) {
    pieces.list(out_counts, me, round, place_bytes, staging.counts(), staging.places());
    const auto sent = is_root ? 0 : static_cast<int>(pieces.bytes_of(count, round));
    // Open MPI takes equal buffers for MPI_IN_PLACE, even where one of them has no meaning.
    return MPI_Igatherv(is_root ? nullptr : staging.data(), sent, MPI_BYTE,
                        is_root ? staging.data() : nullptr, staging.counts(), staging.places(),
                        MPI_BYTE, root, data_, staging.add_request());
  };
  rounds.deliver = [&](size_t round, std::byte* staging) {
    pieces.deliver_all(outs, out_counts, me, in, round, place_bytes, staging);
  };
  return run(rounds);
}

Status MpiTeam::scatter(std::span<const void* const> ins, std::span<const size_t> in_counts,
                        void* out, size_t count, DType dtype, int root,
                        const CallOptions& options) {
  DSCOMM_RETURN_IF_ERROR(check_root("scatter", root, size()));
  const auto ranks = static_cast<size_t>(size()), me = static_cast<size_t>(rank_);
  const bool is_root = rank_ == root;
  DSCOMM_RETURN_IF_ERROR(is_root
                             ? check_lists("scatter", ins.size(), in_counts, count, rank_, size())
                             : check_lists("scatter", ins.size(), in_counts.size(), 0));
  CallRecord call = make_record(Collective::kScatter, dtype, 0, options, root);
  call.own_count = count;
  splits_.clear(ranks);
  std::copy(in_counts.begin(), in_counts.end(), splits_.sends.begin());
  splits_.expects[root] = count;
  DSCOMM_RETURN_IF_ERROR(begin_splits(call, options));

  const size_t element_bytes = dtype_bytes(dtype);
  const Pieces pieces{piece_of_each(element_bytes), element_bytes};
  const size_t place_bytes = pieces.bytes_of(splits_.longest(), 0);
  Rounds rounds(pieces.piece, is_root ? ranks * place_bytes : place_bytes);
  rounds.stage = [&](size_t round, std::byte* staging) {
    pieces.stage_all(ins, in_counts, me, round, place_bytes, staging);
  };
  rounds.start = [&](size_t round, MpiStaging& staging) {
    pieces.list(in_counts, me, round, place_bytes, staging.counts(), staging.places());
    const auto received = is_root ? 0 : static_cast<int>(pieces.bytes_of(count, round));
    // As in gather.
    return MPI_Iscatterv(is_root ? staging.data() : nullptr, staging.counts(), staging.places(),
                         MPI_BYTE, is_root ? nullptr : staging.data(), received, MPI_BYTE, root,
                         data_, staging.add_request());
  };
  rounds.deliver = [&](size_t round, std::byte* staging) {
    if (is_root) {
      pieces.copy(out, ins[me], count, round);
    } else {
      pieces.deliver(out, staging, count, round);
    }
  };
  return run(rounds);
}

Status MpiTeam::all_to_all(std::span<const void* const> ins, std::span<const size_t> in_counts,
                           std::span<void* const> outs, std::span<const size_t> out_counts,
                           DType dtype, const CallOptions& options) {
  const auto ranks = static_cast<size_t>(size()), me = static_cast<size_t>(rank_);
  DSCOMM_RETURN_IF_ERROR(check_lists("all_to_all", ins.size(), in_counts.size(), ranks));
  DSCOMM_RETURN_IF_ERROR(
      check_lists("all_to_all", outs.size(), out_counts, in_counts[me], rank_, size()));
  CallRecord call = make_record(Collective::kAllToAll, dtype, 0, options);
  splits_.clear(ranks);
  std::copy(in_counts.begin(), in_counts.end(), splits_.sends.begin());
  std::copy(out_counts.begin(), out_counts.end(), splits_.expects.begin());
  for (size_t count : in_counts) call.own_count += count;
  DSCOMM_RETURN_IF_ERROR(begin_splits(call, options));

  const size_t element_bytes = dtype_bytes(dtype);
  const Pieces pieces{piece_of_each(element_bytes), element_bytes};
  // Places of as many bytes as the longest piece here needs; first what is sent, then what comes.
  // Not none: Open MPI takes equal buffers for MPI_IN_PLACE, and a rank that has nothing to do then
  // loses count of the collectives.
  const size_t place_bytes = std::max<size_t>(pieces.bytes_of(splits_.longest(), 0), 1);
  Rounds rounds(pieces.piece, 2 * ranks * place_bytes);
  rounds.stage = [&](size_t round, std::byte* staging) {
    pieces.stage_all(ins, in_counts, me, round, place_bytes, staging);
  };
  rounds.start = [&](size_t round, MpiStaging& staging) {
    int* sent = staging.counts();
    int* received = staging.counts() + ranks;
    pieces.list(in_counts, me, round, place_bytes, sent, staging.places());
    pieces.list(out_counts, me, round, place_bytes, received, staging.places());
    return MPI_Ialltoallv(staging.data(), sent, staging.places(), MPI_BYTE,
                          staging.data() + ranks * place_bytes, received, staging.places(),
                          MPI_BYTE, data_, staging.add_request());
  };
  rounds.deliver = [&](size_t round, std::byte* staging) {
    pieces.deliver_all(outs, out_counts, me, ins[me], round, place_bytes,
                       staging + ranks * place_bytes);
  };
  return run(rounds);
}

// The ranks' agreement is what a barrier is: nobody has it before all have come.
Status MpiTeam::barrier(const CallOptions& options) {
  DSCOMM_RETURN_IF_ERROR(
      begin(make_record(Collective::kBarrier, DType::kUInt8, 0, options), 0, options));
  DSCOMM_RETURN_IF_ERROR(agree());
  return finished();
}

}  // namespace dscomm
