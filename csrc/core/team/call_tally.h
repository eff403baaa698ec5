// CallTally: how a Team has carried out its calls, for the log of level debug: the algorithm by
// size, the tensors that peers read in place, the distance of the peers.
//
// One line when a collective first takes an algorithm, so that a log of a job that hangs has it,
// and one for each collective when the Team ends. Not thread-safe: a Team runs a call at a time.
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
  // Null unless the level is debug, so that a call costs no more than a test.
  static std::unique_ptr<CallTally> make(const std::string& group, const std::string& team);

  explicit CallTally(std::string team) : team_(std::move(team)) {}
  ~CallTally();
  CallTally(const CallTally&) = delete;
  CallTally& operator=(const CallTally&) = delete;

  // A call begins; `bytes` are this rank's. The algorithm is a literal.
  void add(Collective kind, const char* algorithm, size_t bytes);
  // A tensor of this call is large enough to be read in place, and is if it lies in the pool.
  void add_tensor(bool is_in_pool);
  // Where the peers are as known now, a literal.
  void set_distance(const char* distance) { distance_ = distance; }

  // The line that the Team's end logs for a collective; empty if it was not called.
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
