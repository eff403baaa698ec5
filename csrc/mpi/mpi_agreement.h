// How the ranks of an MpiTeam verify that they make the same call before they hand out received
// data, and the error texts when they do not.
//
// In a gather, a scatter or an all_to_all each receiver does that (see mpi_team_exchange.cc). Every
// other call begins with its Lead, which is combined over all ranks. It holds the hash of the
// call and the hash's complement, both to be minimised: all hashes are equal if and only if one
// minimum is the complement of the other. The hash covers earlier calls, too: a rank that only
// sends may have finished one in which the ranks differ. What ranks must not agree on but fit
// together (the elements that one sends and another expects) is balanced: each sender adds a hash
// of the pair and the count, each receiver subtracts it, and the sum over the ranks is zero if all
// fit. So every rank learns of any mismatch, and at the same time.
//
// Few ranks send their Leads to each other, in one hop, each with the call itself; what comes is
// given as much room as any rank may send, so nothing is truncated whatever the ranks believe.
// Among many, MPI reduces Leads of 1 KiB. Small data rides in the Lead, so that a small call is one
// round. In a small broadcast or reduce among few ranks only the Leads with data travel, and along
// a chain those from each rank to the next; nobody waits for others.
//
// Ranks that call different things may then wait for each other without a message between them. So
// after a long wait a rank has all ranks compare their last calls
// (FailureDetector::compare_calls()).
//
// The Lead of calls that use MPI's collectives goes ahead of the data instead of beside it: one
// whose arguments do not fit may write past what was meant for it, or end the job. Meanwhile the
// first chunk is copied into staging, so most of its time is hidden.
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
#include "core/types/reduce_op.h"

namespace dscomm {

// Among many ranks: as much as makes a Lead of 1 KiB, which MPI sends like a word: whole, at once,
// without asking.
inline constexpr size_t kRideBytes = 984;
// Among few: what a rank sends to all others together at most in a reduction or a broadcast. An
// all-reduce of 16 KiB between 2 hosts took 42 us before it rode, and 27 us since. Where each of
// the others needs what it gets, that is up to a message for each (MpiTeamOptions::message_bytes).
inline constexpr size_t kRideBytesOfFew = 60 << 10;

struct LeadHead {
  uint64_t hash = 0;        // the least
  uint64_t complement = 0;  // the least
  uint64_t balance = 0;     // the sum, modulo 2^64
  uint64_t longest = 0;     // the greatest: elements of the longest block that a rank knows of
  // What rides along: `count` elements to reduce, or none.
  uint32_t count = 0;
  uint8_t dtype = 0;
  uint8_t op = 0;
  uint16_t reserved = 0;

  bool ranks_agree() const { return hash == ~complement && balance == 0; }
  // Becomes what both say together.
  void combine(const LeadHead& other);
};

// What is reduced among many.
struct Lead {
  LeadHead head;
  std::array<std::byte, kRideBytes> data{};
};
static_assert(sizeof(Lead) == 1024);

// Which Leads travel among few ranks: those from `from` to `to`; or those along the chain of so
// many ranks that begins at `from`, or ends at `to`.
inline constexpr int kEveryRank = -1;
struct LeadWay {
  int from = kEveryRank, to = kEveryRank;
  int chain = 0;

  bool has(int sender, int receiver) const {
    if (chain > 0) return place(receiver) == place(sender) + 1;
    return sender != receiver && (from == kEveryRank || from == sender) &&
           (to == kEveryRank || to == receiver);
  }
  bool is_one_way() const { return from != kEveryRank || to != kEveryRank; }

 private:
  int place(int rank) const {
    return from != kEveryRank ? (rank - from + chain) % chain
                              : chain - 1 - (rank - to + chain) % chain;
  }
};

// The Lead as MPI sees it: one indivisible element, and how two become one. Made when first asked
// for, and kept as long as MPI lives. Any thread.
struct LeadType {
  MPI_Datatype type;
  MPI_Op op;
};
Result<LeadType> lead_type();

// What one rank sends to each and expects of each, in elements, for the calls in which ranks need
// not know all counts. Zero where the call has no such pair.
struct Splits {
  std::vector<uint64_t> sends, expects;  // by rank; empty: the call has none

  void clear(size_t ranks) {
    sends.assign(ranks, 0);
    expects.assign(ranks, 0);
  }
  uint64_t balance(int rank) const;
  uint64_t longest() const;
};

// One rank's side of a disagreement, of the same length on all ranks.
std::vector<std::byte> encode_side(const CallRecord& call, const Splits& splits, size_t ranks);
inline size_t side_bytes(size_t ranks) { return sizeof(CallRecord) + 2 * ranks * sizeof(uint64_t); }

// The message for a sender and a receiver whose numbers of elements differ.
std::string explain_split(Collective kind, const std::string& sender, uint64_t sent,
                          const std::string& receiver, uint64_t expected);

// For ranks that make the same call, and have made different ones of which nothing is known.
std::string explain_lost_difference(const CallRecord& call);

// From the sides of all ranks, one after the other: who differs from whom, and in what. `names` are
// the members', by rank.
std::string explain_mismatch(std::span<const std::byte> sides,
                             const std::vector<std::string>& names);

}  // namespace dscomm
