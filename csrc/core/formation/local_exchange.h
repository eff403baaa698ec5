// Local exchange: how the ranks of a group on one host act as one. The lowest of them, the leader,
// gathers the entries and reports of the others over a Unix socket, speaks for all of them in the
// store (see Modex), and passes on the member table and the verdict.
//
// The ranks of a host are known from the default group or from the launcher, which may be wrong. A
// rank that finds no leader within a second, or is refused, speaks for itself, and the leader does
// not wait for it. A member waits for its leader, not for the store, as long as the leader lives.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/base/deadline.h"
#include "core/base/give_up_check.h"
#include "core/base/message_socket.h"
#include "core/base/status.h"
#include "core/formation/local_ranks.h"

namespace dscomm {

// Values travel between processes: only append.
enum class LocalMessageKind : uint32_t {
  // From a member:
  kEntry = 1,  // LocalEntry
  kConfirmed,  // it has read kTaken, and relies on the leader
  kReport,     // the number of a table, and the member's report on it
  kFailure,    // a table's number (0: none yet) and the cause; from the leader: the cause for all
  // From the leader:
  kTaken,    // the leader speaks for the member once it confirms; the text is the leader's name
  kRefused,  // the leader will not speak for the member
  kTable,    // the table's number, and the table
  kVerdict,
};
using LocalSocket = MessageSocket<LocalMessageKind>;
using LocalMessage = LocalSocket::Message;

// The message from a rank to its leader.
struct LocalEntry {
  int rank = 0;
  std::string name;     // for messages: "rank 3 (pid 7 on host b)"
  int size = 1;         // of the group, as this rank sees it
  std::string members;  // the group's global ranks, as text; compared between ranks
  MemberEntry body;
};

// The members of a group as one rank knows them.
struct MembersView {
  std::string rank;  // its name
  int size = 1;
  std::string members;  // as in LocalEntry; empty for the default group
};

// The error of two ranks that know different members.
Status members_differ(const MembersView& one, const MembersView& other);

// Used by one rank on one thread, like LocalMember.
class LocalLeader {
 public:
  // Null if this rank cannot listen: another process has the address, or no socket is left.
  static std::unique_ptr<LocalLeader> listen(const LocalRanks& local, const LocalEntry& own);

  // Handles all messages that have come. Returns the first failure: a member's cause, kPeerDied if
  // a member has ended, or kMismatch if a rank knows another size or other members of the group.
  Status handle_messages();
  // Waits for a message, for at most `ns`, and handles all that have come.
  Status await_messages(int64_t ns, const Deadline& deadline);

  // The entries of the members that have confirmed, by rank; and the ranks still waited for.
  const std::map<int, MemberEntry>& entries() const { return entries_; }
  const std::set<int>& awaited() const { return awaited_; }
  // Stops waiting for a rank that speaks for itself in the store, unless it was sent kTaken.
  void stop_awaiting(int rank);
  // Grows whenever entries() or awaited() change, so that a caller need not compare them.
  uint64_t changes() const { return changes_; }

  // From now on, reports on an earlier table do not count.
  void begin_table() { table_ = 0; }
  // Sends the table to all members. `number` identifies it and is not 0.
  void send_table(uint64_t number, const std::string& table);
  void send_verdict(const std::string& verdict) {
    send_to_all(LocalMessageKind::kVerdict, verdict);
  }
  void send_failure(const Status& cause);

  // The members' reports on the last table, by rank; and the names of the members without one.
  const std::map<int, std::string>& reports() const { return reports_; }
  std::string without_report() const;

 private:
  struct Member {
    LocalSocket socket;
    LocalEntry entry;
    bool is_asked = false;   // was asked to confirm
    bool is_member = false;  // has confirmed
  };

  LocalLeader(const LocalRanks& local, const LocalEntry& own, UniqueFd listener);
  void accept_all();
  bool has_asked(int rank) const;
  void handle(Member& member, const LocalMessage& message);
  void take_entry(Member& member, const std::string& text);
  void confirm(Member& member);
  Status compare(const LocalEntry& other) const;
  void send_to_all(LocalMessageKind kind, const std::string& text);

  const LocalEntry own_;
  UniqueFd listener_;
  std::vector<Member> members_;
  std::set<int> awaited_;
  std::map<int, MemberEntry> entries_;
  std::map<int, std::string> reports_;
  uint64_t changes_ = 0, table_ = 0;
  Status failure_;
};

class LocalMember {
 public:
  explicit LocalMember(const LocalRanks& local);

  // Looks for a leader, and returns whether one speaks for this rank now. Fails with the reason of
  // `check`, or with the leader's failure: kMismatch, on all, if the leader knows other members.
  Result<bool> join_leader(const LocalEntry& own, const GiveUpCheck& check,
                           const Deadline& deadline);
  // Waits for the leader's next message, kTable or kVerdict. Fails with the cause that the leader
  // sends. If `check` fails, tells its reason to the leader, and fails with that reason if the
  // leader sends nothing within a second. kPeerDied if the leader has ended, kTimeout soon after
  // the deadline.
  Result<LocalMessage> await(const GiveUpCheck& check, const Deadline& deadline);
  void report(const std::string& text);
  // Call instead of report(). Returns the failure that all raise, or the table of a meeting that
  // superseded this one.
  Result<LocalMessage> fail(const Status& cause, const Deadline& deadline);

  // Whether the leader has ended: what it did not pass on may be in the store.
  bool has_ended() const { return has_ended_; }
  // Whether join_leader() failed with a failure that the leader reported.
  bool leader_has_failed() const { return leader_has_failed_; }

 private:
  std::optional<LocalMessage> receive(int64_t ns, const Deadline& deadline);
  void call_leader();
  void report_failure(const Status& cause);

  const LocalRanks local_;
  LocalSocket socket_;
  std::string leader_;  // its name
  uint64_t table_ = 0;  // the number of the last table
  bool has_ended_ = false, leader_has_failed_ = false;
};

}  // namespace dscomm
