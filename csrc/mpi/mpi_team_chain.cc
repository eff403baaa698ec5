// Broadcast and reduce of long data among few ranks: along a chain with the root at one end.
//
// Every rank sends one piece to its neighbour while it receives the next, so each link carries the
// data once and all links are busy. The headers take the same way before the data: each rank
// compares its call with its predecessor's, and none waits for its successors.

#include <complex>

#include "core/reduce/reduce.h"
#include "mpi/mpi_team.h"

namespace dscomm {
namespace {

constexpr int kChainTag = 3;
// A long chain takes time to fill. So there are at least twice as many pieces as links, unless
// pieces would be shorter than this.
constexpr size_t kLeastPieceBytes = size_t{8} << 10;

}  // namespace

// The root has position 0. The other ranks follow in order; rank 0 comes after the last rank.
struct MpiTeam::Chain {
  // In a call that comes in chunks, ignores `count`, which differs between slices: all slices have
  // pieces of one length.
  Chain(const MpiTeam& team, int root, size_t count, size_t element_bytes)
      : position((team.rank_ - root + team.size()) % team.size()),
        is_last(position == team.size() - 1),
        before((team.rank_ - 1 + team.size()) % team.size()),
        after((team.rank_ + 1) % team.size()),
        room(std::max(team.message_bytes(), sizeof(std::complex<double>))) {
    if (team.chunks_ != nullptr) count = team.chunks_->count;
    const size_t share = count / (2 * static_cast<size_t>(team.size() - 1));
    const size_t least = std::max<size_t>(kLeastPieceBytes / element_bytes, 1);
    piece = std::min({count, team.piece_of_message(element_bytes), std::max(share, least)});
  }

  int position;
  bool is_last;
  int before, after;  // ranks
  // Bytes of the longest piece of any chain: receives are posted before the CallHeader has arrived,
  // and may match messages of another call.
  size_t room;
  size_t piece;  // elements
};

Status MpiTeam::broadcast_along_chain(void* buffer, size_t count, DType dtype,
                                      const HeaderRoute& way) {
  const size_t element_bytes = dtype_bytes(dtype);
  const Chain chain(*this, way.from, count, element_bytes);
  const Pieces pieces{within_chunks(chain.piece), element_bytes};
  const auto send_on = [&](size_t round, MpiStaging& staging) {
    return send_piece(staging.data(), pieces.bytes_of(count, round), round, chain.after, kChainTag,
                      staging.add_request());
  };
  Rounds rounds(pieces.piece, chain.room);
  rounds.way = way;
  rounds.goes_ahead = true;
  following_bytes_ = count * element_bytes;
  rounds.stage = [&](size_t round, std::byte* staging) {
    if (chain.position == 0) pieces.stage(staging, buffer, count, round);
  };
  rounds.start = [&](size_t round, MpiStaging& staging) {
    if (chain.position == 0) return send_on(round, staging);
    return MPI_Irecv(staging.data(), static_cast<int>(chain.room), MPI_BYTE, chain.before,
                     kChainTag, data_, staging.add_request());
  };
  if (chain.position > 0 && !chain.is_last) rounds.start_second = send_on;
  rounds.deliver = [&](size_t round, std::byte* staging) {
    if (chain.position > 0) pieces.deliver(buffer, staging, count, round);
  };
  return run(rounds);
}

// Data goes from the chain's last rank to the root. Each rank adds its values to those received.
Status MpiTeam::reduce_along_chain(const void* in, void* out, size_t count,
                                   const Reduction& reduction, const HeaderRoute& way) {
  const WireReduction wire = on_wire(reduction);
  const Chain chain(*this, way.to, count, wire.wire_bytes());
  const size_t piece = within_chunks(chain.piece);
  const Pieces pieces{piece, wire.value_bytes(), chunks_};
  const auto bytes_of = [&](size_t round) {
    return in_round(count, piece, round) * wire.wire_bytes();
  };
  const auto add = [&](size_t round, std::byte* staging) {
    const void* const sources[2] = {staging, staging + chain.room};
    dscomm::reduce(staging, sources, 2, in_round(count, piece, round), {wire.dtype(), wire.op()},
                   1);
  };
  const auto send_on = [&](size_t round, MpiStaging& staging) {
    return send_piece(staging.data(), bytes_of(round), round, chain.before, kChainTag,
                      staging.add_request());
  };
  Rounds rounds(piece, 2 * chain.room);
  rounds.way = way;
  rounds.goes_ahead = true;
  following_bytes_ = count * wire.wire_bytes();
  rounds.stage = [&](size_t round, std::byte* staging) {
    wire.enter(staging, byte_at(in, pieces.read_at(round)), in_round(count, piece, round));
  };
  rounds.start = [&](size_t round, MpiStaging& staging) {
    if (chain.is_last) return send_on(round, staging);
    return MPI_Irecv(staging.data() + chain.room, static_cast<int>(chain.room), MPI_BYTE,
                     chain.after, kChainTag, data_, staging.add_request());
  };
  if (chain.position > 0 && !chain.is_last) {
    rounds.start_second = [&](size_t round, MpiStaging& staging) {
      add(round, staging.data());
      return send_on(round, staging);
    };
  }
  rounds.deliver = [&](size_t round, std::byte* staging) {
    if (chain.position > 0) return;
    add(round, staging);
    wire.leave(byte_at(out, pieces.write_at(round)), staging, in_round(count, piece, round));
  };
  return run(rounds);
}

}  // namespace dscomm
