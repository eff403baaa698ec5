// The reductions of MpiTeam, by eight algorithms:
//
//   in the CallHeader: data small enough to be piggybacked
//   in shares: data that fits one message per rank, among 3 to few_ranks ranks (mpi_team_shares.cc)
//   by swap: two ranks send each other all their data, and each reduces both
//   by exchange: MPI_Ialltoallv gives every rank its share of all data, which it reduces in rank
//     order; for an all-reduce MPI_Iallgatherv then distributes the shares
//   along a chain: a reduce among few ranks (mpi_team_chain.cc)
//   by pairs: long data among many ranks, except a reduce (mpi_team_pairs.cc)
//   by MPI: MPI_Iallreduce and MPI_Ireduce, with conversions by WireReduction
//   by plan: like MPI_Iallreduce, but prepared once (PersistentAllReduce)
//
// A rank with the values of all ranks rounds once and, except by pairs, reduces in rank order.
//
// Few ranks swap or exchange because Open MPI 4 and 5 are slow among them: with fewer than four
// ranks Iallreduce reduces everything to rank 0 and sends it back, so that only one direction of
// the link is busy at a time; Ireduce_scatter does the same with any number of ranks; and long
// messages are slow (see mpi_team.h). Between two ranks a swap saves an exchange's second hop.

#include <complex>

#include "core/reduce/reduce.h"
#include "mpi/mpi_reduce_op.h"
#include "mpi/mpi_team.h"

namespace dscomm {
namespace {

constexpr int kSwapTag = 2;

// The most all-reduces that MPI prepares for one Team: each keeps its own staging.
constexpr size_t kMostPrepared = 64;

}  // namespace

Status MpiTeam::run_all_reduce(const std::byte* in, std::byte* out, size_t count,
                               const Reduction& reduction, const CallOptions& options) {
  DSCOMM_RETURN_IF_ERROR(begin(count, options));
  const auto note_algorithm = [&](const char* algorithm) {
    note(Collective::kAllReduce, algorithm, count * dtype_bytes(reduction.dtype));
  };
  if (all_is_there(chunks_, count) && fits_header(count, reduction)) {
    note_algorithm("in the header");
    return reduce_small(in, out, count, reduction, kEveryRank);
  }
  if (fits_shares(count, dtype_bytes(reduction.dtype), size(), options.chunks)) {
    note_algorithm("in shares");
    return reduce_by_shares(in, out, count, reduction, kEveryRank);
  }
  if (!is_few()) {
    if (PersistentAllReduce* prepared = find_prepared(count, reduction); prepared != nullptr) {
      note_algorithm("by plan");
      return reduce_by_plan(in, out, count, reduction, *prepared);
    }
    const auto ranks = static_cast<size_t>(size()), bytes = on_wire(reduction).wire_bytes();
    const size_t piece = even_piece(count, ranks * piece_of_message(bytes));
    const bool by_pairs = !options_.shares_hosts && fits_pairs(piece / ranks * bytes);
    note_algorithm(by_pairs ? "by pairs" : "by MPI");
    return by_pairs ? reduce_by_pairs(in, out, count, piece, reduction)
                    : reduce_by_mpi(in, out, count, reduction, kEveryRank);
  }
  note_algorithm(size() == 2 ? "by swap" : "by exchange");
  return size() == 2 ? reduce_by_swap(in, out, count, reduction)
                     : reduce_by_exchange(in, out, count, reduction);
}

Status MpiTeam::run_reduce(const std::byte* in, std::byte* out, size_t count,
                           const Reduction& reduction, int root, const CallOptions& options) {
  const bool is_piggybacked = all_is_there(options.chunks, count) && fits_header(count, reduction);
  const bool has_shares =
      !is_piggybacked && fits_shares(count, dtype_bytes(reduction.dtype), size(), options.chunks);
  const HeaderRoute way{.to = root, .chain = is_piggybacked ? 0 : size()};
  DSCOMM_RETURN_IF_ERROR(is_few() && !has_shares ? begin_one_way(count, way, options)
                                                 : begin(count, options));
  note(Collective::kReduce,
       is_piggybacked ? "in the header"
       : has_shares   ? "in shares"
       : is_few()     ? "along a chain"
                      : "by MPI",
       count * dtype_bytes(reduction.dtype));
  if (is_piggybacked) return reduce_small(in, out, count, reduction, root);
  if (has_shares) return reduce_by_shares(in, out, count, reduction, root);
  return is_few() ? reduce_along_chain(in, out, count, reduction, way)
                  : reduce_by_mpi(in, out, count, reduction, root);
}

WireReduction MpiTeam::on_wire(const Reduction& reduction) const {
  return WireReduction(reduction, size(), options_.halves_as_float32);
}

bool MpiTeam::fits_header(size_t count, const Reduction& reduction) const {
  const size_t element_bytes =
      is_few() ? dtype_bytes(reduction.dtype) : on_wire(reduction).wire_bytes();
  return count <= piggyback_room() / element_bytes;
}

Status MpiTeam::reduce_small(const void* in, void* out, size_t count, const Reduction& reduction,
                             int root) {
  const bool is_receiver = root == kEveryRank || root == rank_;
  if (!is_few()) {
    const WireReduction wire = on_wire(reduction);
    wire.enter(piggyback_to_be_reduced(wire.dtype(), wire.op(), count),
               static_cast<const std::byte*>(in), count);
    DSCOMM_RETURN_IF_ERROR(agree());
    if (is_receiver) wire.leave(static_cast<std::byte*>(out), received_reduced(), count);
    return finished();
  }
  const size_t bytes = count * dtype_bytes(reduction.dtype);
  if (bytes > 0) std::memcpy(piggyback(bytes), in, bytes);
  DSCOMM_RETURN_IF_ERROR(agree({.to = root}));
  if (is_receiver) reduce_in_order(out, in, was_piggybacked(0), slot_bytes(), count, reduction);
  return finished();
}

// Reduces in rank order. `own` is this rank's data and may be `results`; the data of rank k is at
// `others` + k * `stride` bytes.
void MpiTeam::reduce_in_order(void* results, const void* own, const std::byte* others,
                              size_t stride, size_t count, const Reduction& reduction) {
  if (count == 0) return;
  sources_.resize(static_cast<size_t>(size()));
  for (size_t k = 0; k < sources_.size(); ++k)
    sources_[k] = k == static_cast<size_t>(rank_) ? own : others + k * stride;
  dscomm::reduce(results, sources_.data(), size(), count, reduction, size());
}

// Receives have room for a piece of any call. So if the other rank makes another call, MPI does not
// fail before the difference is found.
Status MpiTeam::reduce_by_swap(const void* in, void* out, size_t count,
                               const Reduction& reduction) {
  const size_t element_bytes = dtype_bytes(reduction.dtype);
  const size_t room = std::max(message_bytes(), sizeof(std::complex<double>));
  const Pieces pieces{within_chunks(room / element_bytes), element_bytes, chunks_};
  Rounds rounds(pieces.piece, 2 * room);
  rounds.goes_ahead = true;
  rounds.stage = [&](size_t round, std::byte* staging) { pieces.stage(staging, in, count, round); };
  rounds.start = [&](size_t round, MpiStaging& staging) {
    const int other = 1 - rank_;
    if (int code = MPI_Irecv(staging.data() + room, static_cast<int>(room), MPI_BYTE, other,
                             kSwapTag, data_, staging.add_request());
        code != MPI_SUCCESS)
      return code;
    const auto sent = static_cast<int>(pieces.bytes_of(count, round));
    return MPI_Isend(staging.data(), sent, MPI_BYTE, other, kSwapTag, data_, staging.add_request());
  };
  rounds.deliver = [&](size_t round, std::byte* staging) {
    reduce_in_order(byte_at(out, pieces.write_at(round)), byte_at(in, pieces.read_at(round)),
                    staging + room, 0, in_round(count, pieces.piece, round), reduction);
  };
  return run(rounds);
}

// Only calls of one round are prepared: longer calls have several rounds in flight, but a prepared
// all-reduce has one request. All ranks decide the same.
PersistentAllReduce* MpiTeam::find_prepared(size_t count, const Reduction& reduction) {
  const bool is_one_round = count > 0 && chunks_ == nullptr &&
                            count * on_wire(reduction).wire_bytes() <= options_.chunk_bytes;
  if (plan_ == 0 || !is_one_round || !PersistentAllReduce::available()) return nullptr;
  const auto key = std::tuple(plan_, count, reduction.dtype, reduction.op);
  if (auto known = prepared_.find(key); known != prepared_.end()) return &known->second;
  return prepared_.size() < kMostPrepared ? &prepared_[key] : nullptr;
}

// The ranks agree on the call before MPI prepares or starts it.
Status MpiTeam::reduce_by_plan(const void* in, void* out, size_t count, const Reduction& reduction,
                               PersistentAllReduce& prepared) {
  const WireReduction wire = on_wire(reduction);
  Result<MPI_Op> op = mpi_reduce_op(wire.dtype(), wire.op());
  if (!op.ok()) return fail(op.status());
  DSCOMM_RETURN_IF_ERROR(fail(prepared.reserve(count * wire.wire_bytes())));
  wire.enter(prepared.sent(), static_cast<const std::byte*>(in), count);
  DSCOMM_RETURN_IF_ERROR(agree());
  if (!prepared.is_prepared())
    DSCOMM_RETURN_IF_ERROR(check("MPI's preparation of an all-reduce", [&] {
      return prepared.prepare(count, mpi_datatype(wire.dtype()), op.value(), data_);
    }));
  DSCOMM_RETURN_IF_ERROR(check("MPI_Start", [&] { return prepared.start(); }));
  DSCOMM_RETURN_IF_ERROR(wait(prepared.staging(), CallPhase::kMoving));
  wire.leave(static_cast<std::byte*>(out), prepared.got(), count);
  return finished();
}

// MPI sends from and receives into separate halves of staging: with one buffer for both, Open MPI
// does not use its algorithms for long messages.
Status MpiTeam::reduce_by_mpi(const void* in, void* out, size_t count, const Reduction& reduction,
                              int root) {
  const WireReduction wire = on_wire(reduction);
  Result<MPI_Op> op = mpi_reduce_op(wire.dtype(), wire.op());
  if (!op.ok()) return fail(op.status());
  const MPI_Datatype type = mpi_datatype(wire.dtype());
  const size_t piece =
      within_chunks(std::min(count, std::max<size_t>(options_.chunk_bytes / wire.wire_bytes(), 1)));
  const size_t piece_bytes = piece * wire.wire_bytes();
  const Pieces pieces{piece, wire.value_bytes(), chunks_};
  Rounds rounds(piece, 2 * piece_bytes);
  rounds.stage = [&](size_t round, std::byte* staging) {
    wire.enter(staging, byte_at(in, pieces.read_at(round)), in_round(count, piece, round));
  };
  rounds.start = [&](size_t round, MpiStaging& staging) {
    const auto length = static_cast<int>(in_round(count, piece, round));
    std::byte* sent = staging.data();
    std::byte* got = staging.data() + piece_bytes;
    return root == kEveryRank
               ? MPI_Iallreduce(sent, got, length, type, op.value(), data_, staging.add_request())
               : MPI_Ireduce(sent, got, length, type, op.value(), root, data_,
                             staging.add_request());
  };
  rounds.deliver = [&](size_t round, std::byte* staging) {
    if (root == kEveryRank || root == rank_)
      wire.leave(byte_at(out, pieces.write_at(round)), staging + piece_bytes,
                 in_round(count, piece, round));
  };
  return run(rounds);
}

// A round's data is divided into a share per rank. Staging holds the data, in which results replace
// values, followed by the others' values of this rank's share.
Status MpiTeam::reduce_by_exchange(const void* in, void* out, size_t count,
                                   const Reduction& reduction) {
  const auto ranks = static_cast<size_t>(size()), me = static_cast<size_t>(rank_);
  const size_t element_bytes = dtype_bytes(reduction.dtype);
  const Pieces pieces{within_chunks(std::min(count, ranks * piece_of_each(element_bytes))),
                      element_bytes, chunks_};
  const size_t most_of_share = (pieces.piece + ranks - 1) / ranks;
  Rounds rounds(pieces.piece, pieces.bytes() + ranks * most_of_share * element_bytes);

  // The start of share k of a round, and its length, in elements.
  auto share_begin = [&](size_t k, size_t round) {
    const size_t length = in_round(count, pieces.piece, round);
    return std::min(k * ((length + ranks - 1) / ranks), length);
  };
  auto share = [&](size_t k, size_t round) {
    return share_begin(k + 1, round) - share_begin(k, round);
  };
  rounds.stage = [&](size_t round, std::byte* staging) { pieces.stage(staging, in, count, round); };
  rounds.start = [&](size_t round, MpiStaging& staging) {
    int *sent = staging.counts(), *received = staging.counts() + ranks;
    int *from = staging.offsets(), *to = staging.offsets() + ranks;
    const size_t own_bytes = share(me, round) * element_bytes;
    for (size_t k = 0; k < ranks; ++k) {
      sent[k] = k == me ? 0 : static_cast<int>(share(k, round) * element_bytes);
      from[k] = static_cast<int>(share_begin(k, round) * element_bytes);
      received[k] = k == me ? 0 : static_cast<int>(own_bytes);
      to[k] = static_cast<int>(k * own_bytes);
    }
    return MPI_Ialltoallv(staging.data(), sent, from, MPI_BYTE, staging.data() + pieces.bytes(),
                          received, to, MPI_BYTE, data_, staging.add_request());
  };
  rounds.start_second = [&](size_t round, MpiStaging& staging) {
    int *counts = staging.counts(), *offsets = staging.offsets();
    for (size_t k = 0; k < ranks; ++k) {
      counts[k] = static_cast<int>(share(k, round) * element_bytes);
      offsets[k] = static_cast<int>(share_begin(k, round) * element_bytes);
    }
    std::byte* own = staging.data() + offsets[me];
    const size_t length = share(me, round);
    reduce_in_order(own, own, staging.data() + pieces.bytes(), length * element_bytes, length,
                    reduction);
    return MPI_Iallgatherv(MPI_IN_PLACE, 0, MPI_BYTE, staging.data(), counts, offsets, MPI_BYTE,
                           data_, staging.add_request());
  };
  rounds.deliver = [&](size_t round, std::byte* staging) {
    pieces.deliver(out, staging, count, round);
  };
  return run(rounds);
}

// By exchange, a round takes one piece of every rank's block.
Status MpiTeam::run_reduce_scatter(Inputs ins, Counts counts, std::byte* out,
                                   const Reduction& reduction, const CallOptions& options) {
  const auto ranks = static_cast<size_t>(size()), me = static_cast<size_t>(rank_);
  const size_t total = total_count(counts);
  const size_t longest = std::ranges::max(counts);
  DSCOMM_RETURN_IF_ERROR(begin(longest, options));

  const size_t element_bytes = dtype_bytes(reduction.dtype);
  const auto note_algorithm = [&](const char* algorithm) {
    note(Collective::kReduceScatter, algorithm, total * element_bytes);
  };
  if (is_few() && all_is_there(chunks_, longest) && longest <= message_bytes() / element_bytes) {
    note_algorithm("in the header");
    for (size_t k = 0; k < ranks; ++k)
      if (k != me && counts[k] > 0)
        std::memcpy(piggyback_to(static_cast<int>(k), counts[k] * element_bytes), ins[k],
                    counts[k] * element_bytes);
    DSCOMM_RETURN_IF_ERROR(agree());
    reduce_in_order(out, ins[me], was_piggybacked(0), slot_bytes(), counts[me], reduction);
    return finished();
  }
  if (!is_few() && all_is_there(chunks_, longest) && fits_header(total, reduction)) {
    note_algorithm("in the header");
    // Elements of the lower ranks' blocks, which precede this rank's result.
    const size_t before = total_count(counts.first(rank_));
    const WireReduction wire = on_wire(reduction);
    std::byte* next = piggyback_to_be_reduced(wire.dtype(), wire.op(), total);
    for (size_t k = 0; k < ranks; ++k) {
      wire.enter(next, static_cast<const std::byte*>(ins[k]), counts[k]);
      next += counts[k] * wire.wire_bytes();
    }
    DSCOMM_RETURN_IF_ERROR(agree());
    wire.leave(static_cast<std::byte*>(out), received_reduced() + before * wire.wire_bytes(),
               counts[me]);
    return finished();
  }

  if (const size_t bytes = on_wire(reduction).wire_bytes(),
      piece = even_piece(longest, piece_of_message(bytes));
      fits_pairs(piece * bytes)) {
    note_algorithm("by pairs");
    return reduce_scatter_by_pairs(ins, counts, out, piece, reduction);
  }
  note_algorithm("by exchange");

  const Pieces pieces{within_chunks(std::min(longest, piece_of_each(element_bytes))), element_bytes,
                      chunks_};
  const size_t piece = pieces.piece, piece_bytes = pieces.bytes();
  Rounds rounds(piece, 2 * ranks * piece_bytes);
  rounds.stage = [&](size_t round, std::byte* staging) {
    for (size_t k = 0; k < ranks; ++k) {
      if (k != me) pieces.stage(staging + k * piece_bytes, ins[k], counts[k], round);
    }
  };
  rounds.start = [&](size_t round, MpiStaging& staging) {
    int *sent = staging.counts(), *received = staging.counts() + ranks;
    int *from = staging.offsets(), *to = staging.offsets() + ranks;
    const size_t own_bytes = pieces.bytes_of(counts[me], round);
    pieces.list(counts, me, round, sent, from);
    for (size_t k = 0; k < ranks; ++k) {
      received[k] = k == me ? 0 : static_cast<int>(own_bytes);
      to[k] = static_cast<int>(k * own_bytes);
    }
    return MPI_Ialltoallv(staging.data(), sent, from, MPI_BYTE,
                          staging.data() + ranks * piece_bytes, received, to, MPI_BYTE, data_,
                          staging.add_request());
  };
  rounds.deliver = [&](size_t round, std::byte* staging) {
    const size_t length = in_round(counts[me], piece, round);
    if (length > 0)
      reduce_in_order(byte_at(out, pieces.write_at(round)), byte_at(ins[me], pieces.read_at(round)),
                      staging + ranks * piece_bytes, length * element_bytes, length, reduction);
  };
  return run(rounds);
}

}  // namespace dscomm
