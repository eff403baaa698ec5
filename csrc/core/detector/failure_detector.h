// FailureDetector: tells which ranks of a transport have died or left, and which Teams have ended
// and why. For stall probes, it tells which ranks answer, how far they are, and whether they made
// the same calls.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/team/call_record.h"
#include "core/team/departure.h"
#include "core/team/team.h"

namespace dscomm {

// A rank's answer to a question.
enum class Answer : uint8_t {
  kSilent,   // no answer yet: the rank is stopped or cut off, or the answer is on its way
  kBehind,   // the rank runs, and has not reached the position
  kReached,  // the rank has reached it
};

// Names this rank and its group in messages.
struct CallerName {
  std::string name;  // "rank 3 (pid 7 on host b)"
  std::string group;
};

// Thread-safe. Ranks are those of the transport.
class FailureDetector {
 public:
  virtual ~FailureDetector() = default;

  // Grows whenever a rank is gone or a Team has ended, as soon as that is known here. One atomic
  // load, cheap enough for every iteration of a wait.
  virtual uint64_t count() const = 0;

  // kPeerDied ("rank 3 (pid 7 on host b) died or exited without leaving") if the rank has died,
  // kPeerLeft if it left in order, OK if neither is known.
  virtual Status gone(int rank) const = 0;
  // How a rank left, if gone() is kPeerLeft: in order, or by the end of its process after
  // note_end().
  virtual Departure departure(int rank) const = 0;
  // Notes that this process is about to end without leaving its groups; see Team::note_end(). The
  // goodbye of this process carries the note to the others. Only the first note counts.
  virtual void note_end(const std::string& exception) = 0;

  // If this rank has been cut off from all others for `grace_ns`, although some live: the death of
  // one of `ranks`, if one has died. Else OK. Waits need this, because a rank that is cut off no
  // longer hears that a Team has ended.
  virtual Status death_if_cut_off(const std::vector<int>& ranks, int64_t grace_ns = 0) const = 0;

  // Returns the first cause for which a rank ended the Team, or OK if none did. `call` is the
  // number of the call in progress (0: the Team is being made). Also returns OK if all ranks that
  // ended the Team had finished that call before; see Team::failure_in().
  virtual Status ended(uint64_t team_id, uint64_t call = kAnyCall) const = 0;

  // Tells all ranks that the Team has ended, why, and the first call that this rank had not
  // finished. Does not block. Each process keeps the first cause that it hears.
  virtual void end(uint64_t team_id, const Status& cause, uint64_t unfinished_call = 0) = 0;

  // Sets how far this rank is in the calls of a Team, for answers to others. Positions grow.
  virtual void note_position(uint64_t team_id, uint64_t position) = 0;
  // Call when the Team has ended on this rank.
  virtual void forget(uint64_t team_id) = 0;

  // Asks all ranks whether they have reached `position` of the Team. Does not block. Returns the
  // question's number for answers(); close_question() ends it.
  virtual uint64_t ask(uint64_t team_id, uint64_t position) = 0;
  // The answers so far, by rank.
  virtual std::vector<Answer> answers(uint64_t question) const = 0;
  virtual void close_question(uint64_t question) = 0;

  // Notes that this rank begins a call of the Team, which others may complete without this rank.
  // The last calls are kept, for a while even after forget().
  virtual void note_call(uint64_t team_id, const CallRecord& call, const CallerName& caller) = 0;
  // Asks all ranks, without waiting, to compare their calls with the last ones that this rank
  // noted. A rank that made a different call, or makes one later, ends the Team with kMismatch.
  // Unless `always`, does nothing if another rank has asked about this rank's last call since the
  // previous compare_calls() of this rank.
  virtual void compare_calls(uint64_t team_id, bool always) = 0;
};

}  // namespace dscomm
