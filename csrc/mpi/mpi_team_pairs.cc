// Long all-reduces, reduce-scatters and all-gathers among many ranks: by pairs.
//
// In step s every rank sends a message to the rank s places after it and receives one from the rank
// s places before it. After one step per other rank each rank has received one piece from all.
// Pieces are as long among 1,024 ranks as among 9; four steps are in flight, which hides latency;
// and every rank sends and receives no more bytes than necessary.
//
// One rank reduces a share alone: its own values first, then the others' in the order of the steps.
// float16 and bfloat16 are added as float32 and rounded once, even if they travel in 16 bits.

#include "core/reduce/reduce.h"
#include "core/team/widen.h"
#include "mpi/mpi_team.h"

namespace dscomm {
namespace {

constexpr int kPairTag = 6;

// The sum so far for one piece of this rank's share.
class PartialResult {
 public:
  PartialResult(const Reduction& whole, const WireReduction& wire, int ranks)
      : wire_(wire), sum_(whole, ranks, true) {}

  Status reserve(size_t count) {
    const size_t values = sum_.dtype() == wire_.dtype() ? count : 2 * count;
    return staging_.reserve(values * sum_.wire_bytes(), 0);
  }

  // Starts the sum with this rank's own values.
  void begin(const std::byte* values, size_t count) { sum_.enter(sum(), values, count); }
  void add(const std::byte* travelled, size_t count) {
    if (count == 0) return;
    const void* sources[2] = {sum(), travelled};
    if (sum_.dtype() != wire_.dtype()) {
      std::byte* wide = sum() + count * sum_.wire_bytes();
      widen(reinterpret_cast<float*>(wide), travelled, count, wire_.dtype());
      sources[1] = wide;
    }
    reduce(sum(), sources, 2, count, {sum_.dtype(), sum_.op()}, 1);
  }
  void end(std::byte* results, size_t count) { sum_.leave(results, sum(), count); }

 private:
  std::byte* sum() { return staging_.data(); }

  const WireReduction& wire_;
  const WireReduction sum_;
  MpiStaging staging_;
};

}  // namespace

// Not for two ranks: a pass (see Order) is then one round. The rounds in flight would include both
// passes of a piece, so an all-reduce would send the result of a piece before it is reduced.
bool MpiTeam::fits_pairs(size_t bytes_of_message) const {
  return !is_few() && size() > 2 && bytes_of_message >= options_.least_pair_bytes;
}

// In a call that comes in chunks, ignores `count`, which differs between the slices of the parent
// team: all slices have pieces of one length.
size_t MpiTeam::even_piece(size_t count, size_t most) const {
  if (chunks_ != nullptr) return within_chunks(most);
  const size_t pieces = std::max<size_t>((count + most - 1) / most, 1);
  return std::max<size_t>((count + pieces - 1) / pieces, 1);
}

// Exchanges one message each way, to and from staging; an empty message is not sent.
int MpiTeam::exchange_in_turn(const Turn& turn, size_t sent_bytes, size_t got_bytes, size_t room,
                              MpiStaging& staging) const {
  if (got_bytes > 0)
    if (int code = MPI_Irecv(staging.data() + room, static_cast<int>(got_bytes), MPI_BYTE,
                             static_cast<int>(rank_before(turn.step)), kPairTag, data_,
                             staging.add_request());
        code != MPI_SUCCESS)
      return code;
  if (sent_bytes == 0) return MPI_SUCCESS;
  return send_piece(staging.data(), sent_bytes, turn.piece, static_cast<int>(rank_after(turn.step)),
                    kPairTag, staging.add_request());
}

// Each piece of the data is divided into a share per rank. While the shares of one piece are
// reduced, those of the piece before are distributed.
Status MpiTeam::reduce_by_pairs(const void* in, void* out, size_t count, size_t piece,
                                const Reduction& reduction) {
  const WireReduction wire = on_wire(reduction);
  const auto ranks = static_cast<size_t>(size()), me = static_cast<size_t>(rank_);
  const size_t most_of_share = (piece + ranks - 1) / ranks;
  PartialResult partial(reduction, wire, size());
  DSCOMM_RETURN_IF_ERROR(fail(partial.reserve(most_of_share)));
  const Pieces pieces{piece, wire.value_bytes(), chunks_};
  struct Share {
    size_t read_at, write_at;  // bytes
    size_t count;              // elements
  };
  const auto share = [&](size_t rank, size_t round) -> Share {
    const size_t length = in_round(count, piece, round);
    if (length == 0) return {};
    const Pieces shares = shares_of(length, size(), wire.value_bytes());
    const size_t before = rank * shares.bytes();
    return {pieces.read_at(round) + before, pieces.write_at(round) + before,
            in_round(length, shares.piece, rank)};
  };

  const size_t room = most_of_share * wire.wire_bytes();
  Rounds rounds(piece, 2 * room);
  rounds.order = {ranks - 1, true};
  rounds.stage = [&](size_t round, std::byte* staging) {
    const Turn turn = rounds.order.turn(round);
    if (turn.is_second) {
      const Share mine = share(me, turn.piece);
      if (mine.count > 0)
        std::memcpy(staging, byte_at(out, mine.write_at), mine.count * wire.value_bytes());
    } else {
      const Share theirs = share(rank_after(turn.step), turn.piece);
      wire.enter(staging, byte_at(in, theirs.read_at), theirs.count);
    }
  };
  rounds.start = [&](size_t round, MpiStaging& staging) {
    const Turn turn = rounds.order.turn(round);
    const size_t mine = share(me, turn.piece).count;
    if (turn.is_second)
      return exchange_in_turn(turn, mine * wire.value_bytes(),
                              share(rank_before(turn.step), turn.piece).count * wire.value_bytes(),
                              room, staging);
    return exchange_in_turn(turn,
                            share(rank_after(turn.step), turn.piece).count * wire.wire_bytes(),
                            mine * wire.wire_bytes(), room, staging);
  };
  rounds.deliver = [&](size_t round, std::byte* staging) {
    const Turn turn = rounds.order.turn(round);
    if (turn.is_second) {
      const Share theirs = share(rank_before(turn.step), turn.piece);
      if (theirs.count > 0)
        std::memcpy(byte_at(out, theirs.write_at), staging + room,
                    theirs.count * wire.value_bytes());
      return;
    }
    const Share mine = share(me, turn.piece);
    if (turn.step == 1) partial.begin(byte_at(in, mine.read_at), mine.count);
    partial.add(staging + room, mine.count);
    if (turn.step == ranks - 1) partial.end(byte_at(out, mine.write_at), mine.count);
  };
  return run(rounds);
}

Status MpiTeam::reduce_scatter_by_pairs(std::span<const void* const> ins,
                                        std::span<const size_t> counts, void* out, size_t piece,
                                        const Reduction& reduction) {
  const WireReduction wire = on_wire(reduction);
  const size_t last = static_cast<size_t>(size()) - 1, own_count = counts[rank_];
  const Pieces pieces{piece, wire.value_bytes(), chunks_};
  PartialResult partial(reduction, wire, size());
  DSCOMM_RETURN_IF_ERROR(fail(partial.reserve(piece)));
  const size_t room = piece * wire.wire_bytes();
  Rounds rounds(piece, 2 * room);
  rounds.order = {last};
  rounds.stage = [&](size_t round, std::byte* staging) {
    const Turn turn = rounds.order.turn(round);
    const size_t to = rank_after(turn.step), count = in_round(counts[to], piece, turn.piece);
    if (count > 0) wire.enter(staging, byte_at(ins[to], pieces.read_at(turn.piece)), count);
  };
  rounds.start = [&](size_t round, MpiStaging& staging) {
    const Turn turn = rounds.order.turn(round);
    const auto bytes_of = [&](size_t count) {
      return in_round(count, piece, turn.piece) * wire.wire_bytes();
    };
    return exchange_in_turn(turn, bytes_of(counts[rank_after(turn.step)]), bytes_of(own_count),
                            room, staging);
  };
  rounds.deliver = [&](size_t round, std::byte* staging) {
    const Turn turn = rounds.order.turn(round);
    const size_t count = in_round(own_count, piece, turn.piece);
    if (count == 0) return;
    if (turn.step == 1) partial.begin(byte_at(ins[rank_], pieces.read_at(turn.piece)), count);
    partial.add(staging + room, count);
    if (turn.step == last) partial.end(byte_at(out, pieces.write_at(turn.piece)), count);
  };
  return run(rounds);
}

Status MpiTeam::all_gather_by_pairs(const void* in, size_t count, size_t element_bytes,
                                    std::span<void* const> outs, std::span<const size_t> out_counts,
                                    size_t piece) {
  const Pieces pieces{piece, element_bytes};
  Rounds rounds(piece, 2 * pieces.bytes());
  rounds.order = {static_cast<size_t>(size()) - 1};
  rounds.stage = [&](size_t round, std::byte* staging) {
    pieces.stage(staging, in, count, rounds.order.turn(round).piece);
  };
  rounds.start = [&](size_t round, MpiStaging& staging) {
    const Turn turn = rounds.order.turn(round);
    return exchange_in_turn(turn, pieces.bytes_of(count, turn.piece),
                            pieces.bytes_of(out_counts[rank_before(turn.step)], turn.piece),
                            pieces.bytes(), staging);
  };
  rounds.deliver = [&](size_t round, std::byte* staging) {
    const Turn turn = rounds.order.turn(round);
    const size_t from = rank_before(turn.step);
    pieces.deliver(outs[from], staging + pieces.bytes(), out_counts[from], turn.piece);
    if (turn.step == 1) pieces.copy(outs[rank_], in, count, turn.piece);
  };
  return run(rounds);
}

}  // namespace dscomm
