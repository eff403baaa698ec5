// Flooding: how one member passes on what it notices and hears. What is new goes to all that it is
// linked to but the one it came from, and what is known goes no further, so everything crosses each
// link once or twice. A question goes the same way; each answer goes back by the way the question
// came first.
//
// No sockets, threads or locks: TreeDetector has them, and simulations go without.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/base/status.h"
#include "core/detector/connection.h"
#include "core/detector/failure_detector.h"
#include "core/team/departure.h"
#include "core/transport/transport.h"

namespace dscomm {

class Flooding {
 public:
  // `members` outlives it. `links` are those that this one, `rank`, is connected to.
  Flooding(int rank, const std::vector<TransportMember>& members, const std::vector<int>& links);

  // What is known; see FailureDetector.
  Status gone(int rank) const;
  Departure departure(int rank) const;
  Status ended(uint64_t team_id, uint64_t call = kAnyCall) const;
  uint64_t count() const { return count_; }
  const Status& first_death() const { return first_death_; }  // OK: none
  // Nobody tells this member anything any more, though others live.
  bool is_cut_off() const { return links_.empty() && gone_.size() + 1 < members_.size(); }

  // What this process does. end() returns whether that was new.
  bool end(uint64_t team_id, const Status& cause, uint64_t unfinished_call = 0);
  void note_position(uint64_t team_id, uint64_t position) { positions_[team_id] = position; }
  void forget(uint64_t team_id);
  uint64_t ask(uint64_t team_id, uint64_t position);
  const std::vector<Progress>& answers(uint64_t question) const { return open_.at(question); }
  void close_question(uint64_t question) { open_.erase(question); }
  // Returns whether the call differs from one that another member asked about: the Team has ended.
  bool note_call(uint64_t team_id, const CallRecord& call, const Caller& caller);
  void compare_calls(uint64_t team_id, bool always);
  // To all that it is linked to, and no further.
  void tell_links(const Message& message);

  // What came from a member that it is linked to. False when it cannot be meant.
  bool take(int from, const Message& message);
  // The connection to it has ended: what became of it.
  void lose(int link, const Status& status, const Departure& departure = {});

  // Encoded messages that are to be sent, and to whom.
  std::vector<std::pair<int, std::string>> take_outbox() { return std::exchange(outbox_, {}); }

 private:
  void send(int to, const Message& message) { outbox_.emplace_back(to, encode(message)); }
  void pass_on(int from, const Message& message);
  bool note_gone(int rank, const Status& status, const Departure& departure);
  bool take_end(int from, const Message& message);
  bool take_gone(int from, const Message& message);
  bool take_question(int from, const Message& message);
  bool take_answer(const Message& message);
  bool take_comparison(int from, const Message& message);

  const int rank_;
  const std::vector<TransportMember>& members_;
  std::vector<int> links_;  // that are open
  struct Gone {
    Status status;
    Departure departure;
  };
  std::map<int, Gone> gone_;  // by rank
  Status first_death_;
  uint64_t count_ = 0;  // of the entries of gone_ and ended_
  struct End {
    Status cause;
    uint64_t unfinished_call = 0;  // the first, on any rank that ended it
  };
  std::map<uint64_t, End> ended_;           // by Team
  std::map<uint64_t, uint64_t> positions_;  // by Team, of this process
  // The last calls of another member, the newest at the end.
  struct Question {
    int rank = -1;
    std::string name;
    std::vector<CallRecord> calls;
  };
  struct Calls {
    Caller caller;
    std::deque<CallRecord> last;  // the newest at the end
    Question ahead;               // of a member that is further; none: it has no calls
    bool is_asked = false;        // another member has asked about the newest call
  };
  bool compare(uint64_t team_id, const Calls& calls, const Question& question);
  std::map<uint64_t, Calls> calls_;                   // by Team, of this process
  std::deque<std::pair<uint64_t, Calls>> forgotten_;  // the oldest first
  std::set<uint64_t> compared_;                       // comparisons that have come
  std::deque<uint64_t> comparisons_;                  // the same, the oldest first
  std::map<uint64_t, std::vector<Progress>> open_;    // questions of this process
  uint64_t asked_ = 0;                                // questions of this process so far
  std::map<uint64_t, int> way_back_;                  // from questions of others
  std::deque<uint64_t> heard_;                        // in way_back_, the oldest first
  std::vector<std::pair<int, std::string>> outbox_;
};

// What the loss of a connection, without a goodbye, says of the process at its other end.
Status describe_loss(const std::string& name, int error);

}  // namespace dscomm
