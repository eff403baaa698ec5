// CallTally: how a Team has carried out its calls, for the debug log: the algorithms by size, the
// number of tensors that peers read in place, and whether the peers' cores share a cache.
//
// Logs a line when a collective first uses an algorithm, so that a hanging job's log has it, and a
// line for each collective when the Team ends. Not thread-safe: a Team runs one call at a time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/team/call.h"

namespace dscomm {

class CallTally {
 public:
  // Returns null unless the log level is debug, so that a call costs only a test for null.
  static std::unique_ptr<CallTally> make(const std::string& group, const std::string& team);

  explicit CallTally(std::string team) : team_(std::move(team)) {}
  ~CallTally();
  CallTally(const CallTally&) = delete;
  CallTally& operator=(const CallTally&) = delete;

  // Counts a call with `bytes` bytes on this rank. The algorithm is a string literal.
  void add(Collective kind, const char* algorithm, size_t bytes);
  // Counts a tensor of the call that add() counted last. The tensor is large enough to be read in
  // place. Peers do so only if it lies in the pool.
  void add_tensor(bool is_in_pool);
  // Sets the distance of the peers, as measured so far: a string literal such as "cache-near".
  void set_distance(const char* distance) { distance_ = distance; }

  // The line that is logged for a collective at the Team's end; empty if there was no call.
  std::string summary(Collective kind) const;

 private:
  struct AlgorithmUse {
    const char* algorithm;
    uint64_t calls;
    size_t least_bytes, most_bytes;
  };
  struct Tally {
    std::vector<AlgorithmUse> uses;  // in the order of the first calls
    uint64_t tensors = 0, in_pool = 0;
  };
  Tally& of(Collective kind) { return tallies_[static_cast<size_t>(kind) - 1]; }

  const std::string team_;
  std::array<Tally, static_cast<size_t>(Collective::kBarrier)> tallies_;
  Collective current_ = Collective::kBarrier;
  const char* distance_ = "";
};

}  // namespace dscomm
