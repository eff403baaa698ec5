// FailureDetector: what the ranks of a transport hear of each other beside the data: who died or
// left, which Teams have ended and why, and, when one asks, who answers, how far it is, and whether
// it has made the same call.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/team/call_record.h"
#include "core/team/departure.h"
#include "core/team/team.h"

namespace dscomm {

// What a rank answers to a question.
enum class Progress : uint8_t {
  kSilent,   // nothing so far: it is stopped, cut off, or the answer is on its way
  kBehind,   // it runs, and has not come to the position
  kReached,  // it has
};

// This rank in a Team, for messages.
struct Caller {
  std::string name;  // "rank 3 (pid 7 on host b)"
  std::string group;
};

// Thread-safe. Ranks are those of the transport.
class FailureDetector {
 public:
  virtual ~FailureDetector() = default;

  // The number of ranks known to be gone and Teams known to have ended. One atomic load, so cheap
  // enough for every turn of a wait.
  virtual uint64_t count() const = 0;

  // kPeerDied ("rank 3 (pid 7 on host b) died or exited without leaving") when a rank has died,
  // kPeerLeft when it ended in order, OK while neither is known.
  virtual Status gone(int rank) const = 0;
  // How, of a rank of which gone() says kPeerLeft: in order, unless its process noted its end.
  virtual Departure departure(int rank) const = 0;
  // This process is about to end without having left its groups; see Team::note_end(). The others
  // hear of it when it says goodbye. The first note stays.
  virtual void note_end(const std::string& exception) = 0;

  // Where nothing is heard any more, though others live, and that has been so for `grace_ns`: the
  // death of one of `ranks`. What they end can no longer be heard of. OK otherwise.
  virtual Status cut_off(const std::vector<int>& ranks, int64_t grace_ns = 0) const = 0;

  // The first cause for which somebody ended the Team, or OK. For a call of that number in progress
  // (0: the making of the Team), an end by a rank that had finished it is left aside; see
  // Team::look().
  virtual Status ended(uint64_t team_id, uint64_t call = kAnyCall) const = 0;

  // Tells everybody that the Team has ended, why, and the first call that this rank had not
  // finished. Does not block. The first cause that a process hears of stays.
  virtual void end(uint64_t team_id, const Status& cause, uint64_t unfinished_call = 0) = 0;

  // How far this rank is in the calls of a Team; positions grow. What others are answered.
  virtual void note_position(uint64_t team_id, uint64_t position) = 0;
  // The Team has ended here.
  virtual void forget(uint64_t team_id) = 0;

  // Asks all whether they have come to `position` of the Team. Does not block. Returns the number
  // of the question, for answers(); close_question() ends it.
  virtual uint64_t ask(uint64_t team_id, uint64_t position) = 0;
  // What has come, by rank.
  virtual std::vector<Progress> answers(uint64_t question) const = 0;
  virtual void close_question(uint64_t question) = 0;

  // This rank begins a call of the Team, which others may complete without it. The last ones are
  // kept, also for a while after forget().
  virtual void note_call(uint64_t team_id, const CallRecord& call, const Caller& caller) = 0;
  // Asks all, without waiting, whether they have made another call where this rank made one of the
  // last that it noted. A rank that has, or does so later, ends the Team with kMismatch. Unless
  // `always`, asks nobody where another rank has asked the same since this one last did.
  virtual void compare_calls(uint64_t team_id, bool always) = 0;
};

}  // namespace dscomm
