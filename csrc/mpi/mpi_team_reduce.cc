// The reductions of MpiTeam. MPI reduces what travels; what is done before and after is
// WireReduction's.

#include <algorithm>
#include <cstring>

#include "core/reduce/reduce.h"
#include "core/team/arguments.h"
#include "mpi/mpi_reduce_op.h"
#include "mpi/mpi_team.h"

namespace dscomm {

Status MpiTeam::all_reduce(const void* in, void* out, size_t count, const Reduction& reduction,
                           const CallOptions& options) {
  DSCOMM_RETURN_IF_ERROR(check_reduction(reduction));
  DSCOMM_RETURN_IF_ERROR(
      begin(record(Collective::kAllReduce, reduction, count, options), count, options));
  return reduce_to(in, out, count, reduction, kEveryRank);
}

Status MpiTeam::reduce(const void* in, void* out, size_t count, const Reduction& reduction,
                       int root, const CallOptions& options) {
  DSCOMM_RETURN_IF_ERROR(check_reduction(reduction));
  DSCOMM_RETURN_IF_ERROR(check_root("reduce", root, size()));
  CallRecord call = record(Collective::kReduce, reduction, count, options);
  call.root = root;
  DSCOMM_RETURN_IF_ERROR(begin(call, count, options));
  return reduce_to(in, out, count, reduction, root);
}

// The data of a call that has begun, to one rank or to all. What MPI sends and what it gets lie
// side by side: given one buffer for both, Open MPI forgoes its algorithms for long messages.
Status MpiTeam::reduce_to(const void* in, void* out, size_t count, const Reduction& reduction,
                          int root) {
  const WireReduction wire(reduction, size(), options_.halves_as_float32);
  const bool has_result = root == kEveryRank || root == rank_;
  if (count * wire.wire_bytes() <= kRideBytes) {
    ride(wire.dtype(), wire.op(), count);
    wire.enter(lead_.data.data(), static_cast<const std::byte*>(in), count);
    DSCOMM_RETURN_IF_ERROR(agree());
    if (has_result) wire.leave(static_cast<std::byte*>(out), lead_.data.data(), count);
    return {};
  }

  Result<MPI_Op> op = mpi_reduce_op(wire.dtype(), wire.op());
  if (!op.ok()) return fail(op.status().code(), op.status().message());
  const MPI_Datatype type = mpi_datatype(wire.dtype());
  Rounds rounds;
  rounds.piece = std::min(count, std::max<size_t>(options_.chunk_bytes / wire.wire_bytes(), 1));
  const size_t piece = rounds.piece, piece_bytes = piece * wire.wire_bytes();
  rounds.bytes = 2 * piece_bytes;
  rounds.stage = [&, piece](size_t round, std::byte* staging) {
    wire.enter(staging, byte_at(in, round * piece * wire.value_bytes()),
               in_round(count, piece, round));
  };
  rounds.start = [&, piece](size_t round, MpiStaging& staging) {
    const auto length = static_cast<int>(in_round(count, piece, round));
    std::byte* sent = staging.data();
    std::byte* got = staging.data() + piece_bytes;
    return root == kEveryRank
               ? MPI_Iallreduce(sent, got, length, type, op.value(), data_, &staging.request)
               : MPI_Ireduce(sent, got, length, type, op.value(), root, data_, &staging.request);
  };
  rounds.deliver = [&, piece](size_t round, std::byte* staging) {
    if (has_result)
      wire.leave(byte_at(out, round * piece * wire.value_bytes()), staging + piece_bytes,
                 in_round(count, piece, round));
  };
  return run(rounds);
}

// A round takes one piece of every rank's block, packed one after the other.
Status MpiTeam::reduce_scatter(std::span<const void* const> ins, std::span<const size_t> counts,
                               void* out, const Reduction& reduction, const CallOptions& options) {
  DSCOMM_RETURN_IF_ERROR(check_reduction(reduction));
  const auto ranks = static_cast<size_t>(size()), me = static_cast<size_t>(rank_);
  DSCOMM_RETURN_IF_ERROR(check_lists("reduce_scatter", ins.size(), counts.size(), ranks));
  size_t total = 0, longest = 0;
  uint64_t digest = 0;
  for (size_t count : counts) {
    total += count;
    longest = std::max(longest, count);
    digest = digest * 0x9e3779b97f4a7c15ull + count;  // Knuth's multiplicative hash; order matters
  }
  CallRecord call = record(Collective::kReduceScatter, reduction, total, options);
  call.digest = digest;
  DSCOMM_RETURN_IF_ERROR(begin(call, longest, options));

  const WireReduction wire(reduction, size(), options_.halves_as_float32);
  const size_t wire_bytes = wire.wire_bytes(), value_bytes = wire.value_bytes();
  // Packs the pieces of all ranks; returns where this rank's own is.
  auto pack = [&](std::byte* packed, size_t piece, size_t round) {
    std::byte* own = packed;
    for (size_t k = 0; k < ranks; ++k) {
      const size_t length = in_round(counts[k], piece, round);
      if (k == me) own = packed;
      if (length == 0) continue;
      wire.enter(packed, byte_at(ins[k], round * piece * value_bytes), length);
      packed += length * wire_bytes;
    }
    return own;
  };
  if (total * wire_bytes <= kRideBytes) {
    ride(wire.dtype(), wire.op(), total);
    const auto own = static_cast<size_t>(pack(lead_.data.data(), longest, 0) - lead_.data.data());
    DSCOMM_RETURN_IF_ERROR(agree());
    wire.leave(static_cast<std::byte*>(out), lead_.data.data() + own, counts[me]);
    return {};
  }

  Result<MPI_Op> op = mpi_reduce_op(wire.dtype(), wire.op());
  if (!op.ok()) return fail(op.status().code(), op.status().message());
  const MPI_Datatype type = mpi_datatype(wire.dtype());
  Rounds rounds;
  rounds.piece =
      std::min(longest, std::max<size_t>(options_.chunk_bytes / (wire_bytes * ranks), 1));
  const size_t piece = rounds.piece, packed_bytes = ranks * piece * wire_bytes;
  rounds.bytes = packed_bytes + piece * wire_bytes;
  rounds.stage = [&, piece](size_t round, std::byte* staging) { pack(staging, piece, round); };
  rounds.start = [&, piece](size_t round, MpiStaging& staging) {
    for (size_t k = 0; k < ranks; ++k)
      staging.counts()[k] = static_cast<int>(in_round(counts[k], piece, round));
    return MPI_Ireduce_scatter(staging.data(), staging.data() + packed_bytes, staging.counts(),
                               type, op.value(), data_, &staging.request);
  };
  rounds.deliver = [&, piece](size_t round, std::byte* staging) {
    const size_t length = in_round(counts[me], piece, round);
    if (length > 0)
      wire.leave(byte_at(out, round * piece * value_bytes), staging + packed_bytes, length);
  };
  return run(rounds);
}

}  // namespace dscomm
