// Programs: what the ranks of a world call, made from a seed, and what each of them must get.
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
  kMake,     // the group
  kDestroy,
  kSleep,  // of rank `root`
};

struct Step {
  Kind kind = Kind::kBarrier;
  int group = 0;
  int root = 0;  // in the world, a member of the group
  int peer = 0;
  int count = 0;            // int64 values of a block
  bool queued = false;      // asynchronous, waited for when the rank's steps are done
  bool pooled = false;      // of the tensor pool
  bool any_source = false;  // of a message's receive
  bool blocking = false;    // of a message: in one call, which may use a shorter way
};

enum class Fault {
  kNone,
  kDiesAtTheEnd,  // after its last step, without leaving
  kDies,          // anywhere
  kAborts,        // the first group, after its last step
  kLosesTime,     // all ranks do: more than the timeout
  kSkips,         // one call
  kOtherRoot,     // in one call
  kShortMemory,
};

struct Program {
  uint64_t seed = 0;
  int ranks = 2;
  bool composed = false;  // two NUMA nodes of two ranks
  bool shared = false;    // ranks 0 and 1 are threads of one process
  std::vector<std::vector<int>> groups;
  std::vector<Step> steps;
  Fault fault = Fault::kNone;
  int culprit = 0;      // the rank with the fault
  uint64_t moment = 0;  // step of the runtime, or of the program
  uint32_t switch_per_mille = 100, stale_per_mille = 0;
  int slow = -1;
  int slice_ms = 10;   // 0: who sleeps does so until woken, so that a lost wake-up is a deadlock
  bool exits = false;  // a rank's process ends once it has left its groups, and not with the others

  int process_of(int rank) const { return shared && rank == 1 ? 0 : rank; }

  static Program make(uint64_t seed);
  std::string describe() const;
};

// Runs it in a new world. Empty: every rank got what it must; else what was wrong.
struct Verdict {
  std::string failure;
  uint64_t steps = 0, switches = 0;
};
Verdict run_program(const Program& program, uint64_t schedule_seed);

}  // namespace dscomm::schedule
