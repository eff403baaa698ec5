// Programs: the calls of a world's ranks, made from a seed, and the result that each must get.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace dscomm::schedule {

enum class Kind {
  kAllReduce,
  kBroadcast,
  kReduce,
  kAllGather,
  kReduceScatter,
  kGather,
  kScatter,
  kAllToAll,
  kBarrier,
  kMessage,  // from `root` to `peer`
  kMake,     // makes the group
  kDestroy,
  kSleep,  // rank `root` sleeps
};

struct Step {
  Kind kind = Kind::kBarrier;
  int group = 0;
  int root = 0;  // global rank, a member of the group
  int peer = 0;
  int count = 0;            // int64 values per block
  bool queued = false;      // asynchronous; waited for after the rank's last step
  bool pooled = false;      // memory from the tensor pool
  bool any_source = false;  // for a message's receive
  bool blocking = false;    // for a message: one call, which may use a shorter path
};

enum class Fault {
  kNone,
  kDiesAtTheEnd,  // after its last step, without leaving
  kDies,          // at any moment
  kAborts,        // aborts the first group, after its last step
  kLosesTime,     // all ranks lose more than the timeout
  kSkips,         // skips one call
  kOtherRoot,     // in one call
  kShortMemory,
};

struct Program {
  uint64_t seed = 0;
  int ranks = 2;
  bool composed = false;  // two NUMA nodes with two ranks each
  bool shared = false;    // ranks 0 and 1 are threads of one process
  std::vector<std::vector<int>> groups;
  std::vector<Step> steps;
  Fault fault = Fault::kNone;
  int culprit = 0;      // the faulty rank
  uint64_t moment = 0;  // the fault's step, of the runtime or of the program
  uint32_t switch_per_mille = 100, stale_per_mille = 0;
  int slow = -1;
  int slice_ms = 10;   // 0: sleeps last until a wake-up, so that a lost one is a deadlock
  bool exits = false;  // a rank's process ends once it has left its groups, not with the others

  int process_of(int rank) const { return shared && rank == 1 ? 0 : rank; }

  static Program make(uint64_t seed);
  std::string describe() const;
};

// Runs the program in a new world. `failure` is empty if every rank got what it must.
struct Verdict {
  std::string failure;
  uint64_t steps = 0, switches = 0;
};
Verdict run_program(const Program& program, uint64_t schedule_seed);

}  // namespace dscomm::schedule
