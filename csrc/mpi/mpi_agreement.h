// Verifies that the ranks of an MpiTeam make the same call before they use received data, and
// reports a mismatch.
//
// In a gather, a scatter or an all_to_all each receiver verifies the headings of its senders
// (mpi_team_exchange.cc). Every other call begins with its CallHeader, which is combined over all
// ranks unless headers go in one direction (below). It holds a hash of the call and the hash's
// complement. Both are minimised: all hashes are equal if and only if one minimum is the complement
// of the other. The hash also covers earlier calls, because a rank that only sends may have
// finished a call in which the ranks differ. Counts that must match in pairs (sent and expected
// elements) are balanced: the sender adds a hash of the pair and the count, the receiver subtracts
// it, and the sum over all ranks is zero if all pairs match. So all find a mismatch in this call.
//
// Among few ranks (up to MpiTeamOptions::few_ranks), each sends its header, with the call itself,
// directly to each other rank. Receives have room for the longest CallHeader that any rank may
// send, so nothing is truncated whatever the others call. Among many ranks MPI reduces headers of 1
// KiB. Small data is piggybacked on the CallHeader, so that a small call needs no other messages.
// In a small broadcast or reduce among few ranks only headers with data are sent, and along a chain
// only those from each rank to the next, so no rank waits for ranks that send it nothing.
//
// Ranks whose calls differ may wait for each other without any message. So after a long wait a rank
// makes all ranks compare their last calls (FailureDetector::compare_calls()).
//
// In calls that use MPI's collectives the CallHeader precedes the data: a collective whose
// arguments do not match may write out of bounds or end the job. While the headers travel, the rank
// copies the data of its first round into staging, which hides most of the delay.
#pragma once

#include <mpi.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/team/call_record.h"

namespace dscomm {

// Most piggybacked bytes among many ranks. A CallHeader then has 1 KiB, which MPI sends eagerly.
inline constexpr size_t kPiggybackBytes = 984;
// Among few ranks: the most that a rank piggybacks for all others together in a reduction or a
// broadcast. An all-reduce of 16 KiB between 2 hosts took 42 us without this and takes 27 us with
// it. In an all-gather, in a reduce-scatter and in shares, the limit is one message for each rank
// (MpiTeamOptions::message_bytes).
inline constexpr size_t kPiggybackBytesOfFew = 60 << 10;

struct HeaderFields {
  uint64_t hash = 0;        // minimum over the ranks
  uint64_t complement = 0;  // minimum
  uint64_t balance = 0;     // sum modulo 2^64
  uint64_t longest = 0;     // maximum: elements of the longest block that a rank knows of
  // Among many ranks: the piggybacked data, `count` elements to reduce, or none.
  uint32_t count = 0;
  uint8_t dtype = 0;
  uint8_t op = 0;
  uint16_t reserved = 0;

  bool ranks_agree() const { return hash == ~complement && balance == 0; }
  // Merges another rank's header into this one.
  void combine(const HeaderFields& other);
};

// A CallHeader among many ranks, as MPI reduces it.
struct CallHeader {
  HeaderFields head;
  std::array<std::byte, kPiggybackBytes> data{};
};
static_assert(sizeof(CallHeader) == 1024);

// The headers that are sent among few ranks. If `chain` is 0: those from rank `from` to rank `to`.
// Otherwise `chain` is the number of ranks in a chain, which begins at `from` or ends at `to`; each
// sends its header to the next.
inline constexpr int kEveryRank = -1;
struct HeaderRoute {
  int from = kEveryRank, to = kEveryRank;
  int chain = 0;

  bool has(int sender, int receiver) const {
    if (chain > 0) return position(receiver) == position(sender) + 1;
    return sender != receiver && (from == kEveryRank || from == sender) &&
           (to == kEveryRank || to == receiver);
  }
  bool is_one_way() const { return from != kEveryRank || to != kEveryRank; }

 private:
  int position(int rank) const {
    return from != kEveryRank ? (rank - from + chain) % chain
                              : chain - 1 - (rank - to + chain) % chain;
  }
};

// The MPI datatype of a CallHeader, one indivisible element, and the operator that combines two.
// Created on first use and never freed. Thread-safe.
struct HeaderType {
  MPI_Datatype type;
  MPI_Op op;
};
Result<HeaderType> header_type();

// The numbers of elements that a rank sends to and expects from each rank, for calls in which ranks
// need not know all counts. Zero for a pair without data.
struct Splits {
  std::vector<uint64_t> sends, expects;  // by rank; empty: the call has no counts

  void clear(size_t ranks) {
    sends.assign(ranks, 0);
    expects.assign(ranks, 0);
  }
  uint64_t balance(int rank) const;
  uint64_t longest() const;
};

// A rank's call and counts, for the error message; of the same length on all ranks.
std::vector<std::byte> encode_side(const CallRecord& call, const Splits& splits, size_t ranks);
inline size_t side_bytes(size_t ranks) { return sizeof(CallRecord) + 2 * ranks * sizeof(uint64_t); }

// The message for a sender and a receiver whose counts differ.
std::string explain_split(Collective kind, const std::string& sender, uint64_t sent,
                          const std::string& receiver, uint64_t expected);

// The message for ranks whose records of this call read the same: they differed in a call that is
// no longer recorded, or in what a record does not show.
std::string explain_lost_difference(const CallRecord& call);

// The message that says which ranks differ, and in what. `sides`: encode_side() of all ranks,
// concatenated by rank. `names`: the members' names by rank.
std::string explain_mismatch(std::span<const std::byte> sides,
                             const std::vector<std::string>& names);

}  // namespace dscomm
