// Flooding: how a member spreads failure notices. It passes a new notice to all linked members but
// the sender, and drops a known one, so a notice crosses each link once or twice. Questions spread
// the same way; each answer returns along the path on which the question came first.
//
// No sockets, threads or locks: TcpFailureDetector has them, and simulations do without.
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
  // `members` must outlive the Flooding. `links`: the ranks that this member, `rank`, is linked to.
  Flooding(int rank, const std::vector<TransportMember>& members, const std::vector<int>& links);

  // What is known; see FailureDetector.
  Status gone(int rank) const;
  Departure departure(int rank) const;
  Status ended(uint64_t team_id, uint64_t call = kAnyCall) const;
  uint64_t count() const { return count_; }
  const Status& first_death() const { return first_death_; }  // OK: none
  // Whether all connections of this member are lost, though other members live.
  bool is_cut_off() const { return links_.empty() && gone_.size() + 1 < members_.size(); }

  // Events of this process. end() returns whether the end is new, or its unfinished call lower.
  bool end(uint64_t team_id, const Status& cause, uint64_t unfinished_call = 0);
  void note_position(uint64_t team_id, uint64_t position) { positions_[team_id] = position; }
  void forget(uint64_t team_id);
  uint64_t ask(uint64_t team_id, uint64_t position);
  const std::vector<Answer>& answers(uint64_t question) const { return open_.at(question); }
  void close_question(uint64_t question) { open_.erase(question); }
  // Returns whether the call differs from that of a member that asked; the Team has then ended.
  bool note_call(uint64_t team_id, const CallRecord& call, const CallerName& caller);
  void compare_calls(uint64_t team_id, bool always);
  // Sends to all linked members, which do not pass the message on.
  void send_to_links(const Message& message);

  // Handles a message from a linked member. False if it is invalid.
  bool handle(int from, const Message& message);
  // Call when the connection to `link` has ended, for the reason `status`.
  void lose(int link, const Status& status, const Departure& departure = {});

  // Encoded messages to send, with their destinations.
  std::vector<std::pair<int, std::string>> take_outbox() { return std::exchange(outbox_, {}); }

 private:
  void send(int to, const Message& message) { outbox_.emplace_back(to, encode(message)); }
  void pass_on(int from, const Message& message);
  bool note_gone(int rank, const Status& status, const Departure& departure);
  bool handle_end(int from, const Message& message);
  bool handle_gone(int from, const Message& message);
  bool handle_question(int from, const Message& message);
  bool handle_answer(const Message& message);
  bool handle_comparison(int from, const Message& message);

  const int rank_;
  const std::vector<TransportMember>& members_;
  std::vector<int> links_;  // members that are still connected
  struct Gone {
    Status status;
    Departure departure;
  };
  std::map<int, Gone> gone_;  // by rank
  Status first_death_;
  uint64_t count_ = 0;  // changes of gone_ and ended_
  struct End {
    Status cause;
    uint64_t unfinished_call = 0;  // the lowest of all ranks that ended the Team
  };
  std::map<uint64_t, End> ended_;           // by Team
  std::map<uint64_t, uint64_t> positions_;  // of this process, by Team
  // The last calls of another member, the newest last.
  struct Question {
    int rank = -1;
    std::string name;
    std::vector<CallRecord> calls;
  };
  struct Calls {
    CallerName caller;
    std::deque<CallRecord> last;  // the newest last
    Question ahead;               // from the member furthest ahead; none if ahead.calls is empty
    bool is_asked = false;        // another member has asked about the newest call
  };
  bool compare(uint64_t team_id, const Calls& calls, const Question& question);
  std::map<uint64_t, Calls> calls_;                   // by Team, of this process
  std::deque<std::pair<uint64_t, Calls>> forgotten_;  // the oldest first
  std::set<uint64_t> compared_;                       // ids of comparisons that have come
  std::deque<uint64_t> comparisons_;                  // the ids in compared_, the oldest first
  std::map<uint64_t, std::vector<Answer>> open_;      // open questions of this process
  uint64_t asked_ = 0;                                // number of questions of this process so far
  std::map<uint64_t, int> answer_route_;     // the link on which a question of another member came
  std::deque<uint64_t> answer_route_order_;  // the keys of answer_route_, the oldest first
  std::vector<std::pair<int, std::string>> outbox_;
};

// The status of a process whose connection ended without a goodbye. `error`: Connection::error().
Status describe_loss(const std::string& name, int error);

}  // namespace dscomm
