// CallRecord: describes one call, for comparison between ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "core/team/call.h"
#include "core/team/team.h"

namespace dscomm {

// All fields but own_count must agree on all ranks. Eight words, the sequence first, because
// ShmTeam keeps records in shared memory (see members.cc).
struct CallRecord {
  uint64_t sequence = 0;   // number of the call in the Team that compares it
  uint64_t count = 0;      // elements, if all ranks must agree on them; else 0
  uint64_t own_count = 0;  // elements of this rank's input; not compared
  double factor = 1.0;
  int32_t root = -1;
  uint8_t kind = 0;  // Collective
  uint8_t dtype = 0;
  uint8_t op = 255;        // ReduceOp; 255: none
  uint8_t is_planned = 0;  // has a CallOptions::plan, which is part of `digest`
  uint32_t part = 0, part_count = 1;
  uint64_t digest = 0;  // hash of values that must agree but do not fit here
  // If not 0, this is a sub-call of the call with this number in a parent team. The fields above,
  // except `sequence`, then describe the parent's call, which the user knows. `digest` also covers
  // the sub-call and CallOptions::history.
  uint64_t parent_number = 0;

  // The call's number in error messages.
  uint64_t number() const { return parent_number != 0 ? parent_number : sequence; }
};
static_assert(sizeof(CallRecord) == 64);

// A call whose arguments are valid; see Team::begin_call().
struct Call {
  CallRecord record;
  const CallOptions* options;
  // Output counts of an all_gather. Only a parent team compares them: its sub-calls depend on them.
  std::span<const size_t> out_counts = {};
};

CallRecord make_record(Collective kind, DType dtype, size_t count, const CallOptions& options,
                       int root = -1);
CallRecord make_record(Collective kind, const Reduction& reduction, size_t count,
                       const CallOptions& options, int root = -1);

// Returns the record to compare. For a sub-call: the record of its parent call, with a hash of
// `call` in `digest`. Else: `call`.
CallRecord as_sub_call(const CallRecord& call, const CallOptions& options);

// Hashes all fields that must agree. `before` is the hash of earlier calls, or the id of the Team.
uint64_t hash_call(uint64_t before, const CallRecord& call);

// For digests: each input bit affects each output bit.
uint64_t mix_hash(uint64_t hash, uint64_t word);
uint64_t hash_counts(std::span<const size_t> counts);
uint64_t hash_text(std::string_view text);  // never 0

// "all_reduce(float32[1024], SUM)"
std::string describe_call(const CallRecord& call);

}  // namespace dscomm
