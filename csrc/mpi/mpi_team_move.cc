// Broadcast, all-gather and barrier of MpiTeam. They move bytes, whatever the dtype.

#include "mpi/mpi_team.h"

namespace dscomm {

Status MpiTeam::run_broadcast(std::byte* buffer, size_t count, DType dtype, int root,
                              const CallOptions& options) {
  const size_t element_bytes = dtype_bytes(dtype), bytes = count * element_bytes;
  const bool is_root = rank_ == root;
  const bool is_piggybacked = all_is_there(options.chunks, count) && bytes <= piggyback_room();
  const bool has_shares =
      !is_piggybacked && fits_shares(count, element_bytes, size() - 1, options.chunks);
  const HeaderRoute way{.from = root, .chain = is_piggybacked ? 0 : size()};
  DSCOMM_RETURN_IF_ERROR(is_few() && !has_shares ? begin_one_way(count, way, options)
                                                 : begin(count, options));
  note(Collective::kBroadcast,
       is_piggybacked ? "in the header"
       : has_shares   ? "in shares"
       : is_few()     ? "along a chain"
                      : "by MPI",
       bytes);
  if (is_piggybacked) {
    if (!is_few()) {
      // The other ranks add zeros.
      std::byte* piggybacked = piggyback_to_be_reduced(DType::kUInt8, ReduceOp::kBor, bytes);
      if (is_root && bytes > 0) std::memcpy(piggybacked, buffer, bytes);
      if (!is_root) std::memset(piggybacked, 0, bytes);
    } else if (is_root && bytes > 0) {
      std::memcpy(piggyback(bytes), buffer, bytes);
    }
    DSCOMM_RETURN_IF_ERROR(agree(way));
    if (!is_root && bytes > 0)
      std::memcpy(buffer, is_few() ? was_piggybacked(root) : received_reduced(), bytes);
    return finished();
  }
  if (has_shares) return broadcast_by_shares(buffer, count, element_bytes, root);
  if (is_few()) return broadcast_along_chain(buffer, count, dtype, way);

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

Status MpiTeam::run_all_gather(const std::byte* in, size_t count, DType dtype, Outputs outs,
                               Counts out_counts, const CallOptions& options) {
  const auto ranks = static_cast<size_t>(size()), me = static_cast<size_t>(rank_);
  splits_.sends.assign(ranks, count);
  splits_.expects.assign(out_counts.begin(), out_counts.end());
  const size_t total = total_count(out_counts);
  const size_t longest = std::ranges::max(out_counts);
  DSCOMM_RETURN_IF_ERROR(begin_splits(options));
  const size_t element_bytes = dtype_bytes(dtype);
  if (is_few() && longest * element_bytes <= std::max(piggyback_room(), message_bytes())) {
    note(Collective::kAllGather, "in the header", count * element_bytes);
    if (count > 0) std::memcpy(piggyback(count * element_bytes), in, count * element_bytes);
    DSCOMM_RETURN_IF_ERROR(agree());
    for (size_t k = 0; k < ranks; ++k) {
      const void* block = k == me ? in : was_piggybacked(static_cast<int>(k));
      if (out_counts[k] > 0 && outs[k] != block)
        std::memcpy(outs[k], block, out_counts[k] * element_bytes);
    }
    return finished();
  }
  if (!is_few() && total * element_bytes <= kPiggybackBytes) {
    note(Collective::kAllGather, "in the header", count * element_bytes);
    // Every rank adds its own block, and zeros for the others'.
    std::byte* at = piggyback_to_be_reduced(DType::kUInt8, ReduceOp::kBor, total * element_bytes);
    std::memset(at, 0, total * element_bytes);
    for (size_t k = 0; k < me; ++k) at += out_counts[k] * element_bytes;
    if (count > 0) std::memcpy(at, in, count * element_bytes);
    DSCOMM_RETURN_IF_ERROR(agree());
    at = received_reduced();
    for (size_t k = 0; k < ranks; ++k) {
      if (out_counts[k] > 0) std::memcpy(outs[k], at, out_counts[k] * element_bytes);
      at += out_counts[k] * element_bytes;
    }
    return finished();
  }

  if (const size_t piece = even_piece(longest, piece_of_message(element_bytes));
      fits_pairs(piece * element_bytes)) {
    note(Collective::kAllGather, "by pairs", count * element_bytes);
    return all_gather_by_pairs(in, count, element_bytes, outs, out_counts, piece);
  }
  note(Collective::kAllGather, "by MPI", count * element_bytes);
  const Pieces pieces{within_chunks(std::min(longest, piece_of_each(element_bytes))),
                      element_bytes};
  Rounds rounds(pieces.piece, ranks * pieces.bytes());
  rounds.stage = [&](size_t round, std::byte* staging) {
    pieces.stage(staging + me * pieces.bytes(), in, count, round);
  };
  rounds.start = [&](size_t round, MpiStaging& staging) {
    pieces.list(out_counts, Pieces::kNone, round, staging.counts(), staging.offsets());
    return MPI_Iallgatherv(MPI_IN_PLACE, 0, MPI_BYTE, staging.data(), staging.counts(),
                           staging.offsets(), MPI_BYTE, data_, staging.add_request());
  };
  rounds.deliver = [&](size_t round, std::byte* staging) {
    for (size_t k = 0; k < ranks; ++k)
      if (k != me) pieces.deliver(outs[k], staging + k * pieces.bytes(), out_counts[k], round);
    pieces.copy(outs[me], in, count, round);
  };
  return run(rounds);
}

// A barrier is the agreement alone: it completes only when all ranks have come.
Status MpiTeam::run_barrier(const CallOptions& options) {
  DSCOMM_RETURN_IF_ERROR(begin(0, options));
  note(Collective::kBarrier, "in the header", 0);
  DSCOMM_RETURN_IF_ERROR(agree());
  return finished();
}

}  // namespace dscomm
