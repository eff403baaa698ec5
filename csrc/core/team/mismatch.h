// The error for ranks that made different calls. shm/mailbox/agreement.cc has the one for ranks
// that left after different calls.
#pragma once

#include <chrono>
#include <string>

#include "core/team/call_record.h"

namespace dscomm {

// A rank that has found a difference waits this long for a report of an earlier difference, before
// it ends its Team. Reports take milliseconds, unless the machine is overloaded.
inline constexpr std::chrono::milliseconds kDifferenceWait{500};

// The beginning of the text of describe_mismatch().
inline constexpr char kDifferentCalls[] = "the ranks called different things";
// The advice of each message about calls that differ.
inline constexpr char kMakeSameCalls[] = "; every rank must make the same calls in the same order";
// The message for two calls that differ: "the ranks called different things as call #3: A called X,
// B called Y; ...". The names are those of the ranks that made the calls.
std::string describe_mismatch(const CallRecord& mine, const std::string& my_name,
                              const CallRecord& theirs, const std::string& their_name);
// A rank's call, an argument of the next function.
struct CallOfRank {
  int rank;
  const CallRecord& call;
  const std::string& name;
};
// Names the lower rank first, so that both ranks produce the same text.
std::string describe_mismatch(const CallOfRank& one, const CallOfRank& other);

}  // namespace dscomm
