// CallRecord: one call, as ranks compare it and as people read it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "core/team/call.h"
#include "core/team/team.h"

namespace dscomm {

// What must agree on all ranks, and own_count, which need not. Of eight words, the sequence first:
// ShmTeam keeps it in shared memory, see lines.cc.
struct CallRecord {
  uint64_t sequence = 0;   // of the Team that compares it
  uint64_t count = 0;      // elements, where all must agree; else 0
  uint64_t own_count = 0;  // elements this rank puts in; not compared
  double factor = 1.0;
  int32_t root = -1;
  uint8_t kind = 0;  // Collective
  uint8_t dtype = 0;
  uint8_t op = 255;        // ReduceOp; 255 where there is none
  uint8_t is_planned = 0;  // has a CallOptions::plan, which is in `digest`
  uint32_t part = 0, part_count = 1;
  uint64_t digest = 0;  // of what must agree but does not fit here
  // Not 0: a piece of the call of that number in a Team that is composed of this one. The fields
  // above tell of that call, because it is what its caller knows; `digest` holds the piece's too,
  // and CallOptions::history.
  uint64_t whole = 0;

  // By which people know the call.
  uint64_t number() const { return whole != 0 ? whole : sequence; }
};
static_assert(sizeof(CallRecord) == 64);

CallRecord make_record(Collective kind, DType dtype, size_t count, const CallOptions& options,
                       int root = -1);
CallRecord make_record(Collective kind, const Reduction& reduction, size_t count,
                       const CallOptions& options, int root = -1);

// As `call` is compared when `options` say that it is a piece of another one; else as it is.
CallRecord as_piece(const CallRecord& call, const CallOptions& options);

// Of everything that must agree. `before` is what ranks agreed on earlier, or names their Team.
uint64_t hash_call(uint64_t before, const CallRecord& call);

// For digests: every bit that goes in moves every bit that comes out.
uint64_t mix_hash(uint64_t hash, uint64_t word);
uint64_t hash_counts(std::span<const size_t> counts);
uint64_t hash_text(std::string_view text);  // never 0

// "all_reduce(float32[1024], SUM)"
std::string describe_call(const CallRecord& call);

// Before a rank that has found a difference ends its Team, others have so long to tell it of the
// first one. They need milliseconds, unless the machine is overloaded.
inline constexpr std::chrono::milliseconds kDifferenceWait{500};

// How describe_mismatch() begins.
inline constexpr char kDifferentCalls[] = "the ranks called different things";
// Of two calls that differ: "the ranks called different things as call #3: A called X, B called Y;
// ...". `mine` and `theirs` are made by ranks of these names.
std::string describe_mismatch(const CallRecord& mine, const std::string& my_name,
                              const CallRecord& theirs, const std::string& their_name);
// A rank's call, for the next function.
struct CallOfRank {
  int rank;
  const CallRecord& call;
  const std::string& name;
};
// The same with the lower rank first, so that both ranks make the same text.
std::string describe_mismatch(const CallOfRank& one, const CallOfRank& other);

}  // namespace dscomm
