// Local exchange: how the ranks of a group that are on one host come to speak with one voice. The
// lowest of them, the leader, gathers what the others say over a Unix socket, speaks for all of
// them in the store (see Meeting), and passes on what was decided.
//
// The ranks of a host are known from the default group, or from the launcher, which may be wrong. A
// rank that finds no leader within a second, or is refused, speaks for itself; a leader waits for
// none that does. Members of a leader never wait for the store, nor for longer than the leader
// lives.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/base/deadline.h"
#include "core/base/look.h"
#include "core/base/message_socket.h"
#include "core/base/status.h"
#include "core/formation/local_ranks.h"

namespace dscomm {

// Values travel between processes: append.
enum class LocalMessageKind : uint32_t {
  // From a member.
  kEntry = 1,  // LocalEntry
  kConfirmed,  // it has read kTaken, and counts on the leader
  kReport,     // the number of a table, and what it says of that
  kFailure,  // the same, or no table yet, and why it cannot go on; from the leader: why nobody can
  // From the leader.
  kTaken,    // it will speak for this member once that has confirmed it; the text is its name
  kRefused,  // it will not
  kTable,    // its number, and the table
  kVerdict,
};
using LocalSocket = MessageSocket<LocalMessageKind>;
using LocalMessage = LocalSocket::Message;

// What a rank brings to the exchange.
struct LocalEntry {
  int rank = 0;
  std::string name;     // for messages: "rank 3 (pid 7 on host b)"
  int size = 1;         // of the group, as this rank was told
  std::string members;  // its global ranks; for messages
  MemberText body;
};

// Of one rank, on one thread; so is LocalMember.
class LocalLeader {
 public:
  // Null where it cannot listen: some other process has the name, or there is no socket.
  static std::unique_ptr<LocalLeader> listen(const LocalRanks& local, const LocalEntry& own);

  // Takes what has come. The reason for which a member cannot go on, kPeerDied where one has ended,
  // kMismatch where one sees another group; the first stays.
  Status turn();
  // The same, once something comes or the time has passed.
  Status hear(int64_t ns, const Deadline& deadline);

  // What the members say for which it speaks, by rank.
  const std::map<int, MemberText>& entries() const { return entries_; }
  const std::set<int>& awaited() const { return awaited_; }
  // It speaks for itself, as the store has it. Nothing where it has just been asked to confirm.
  void excuse(int rank);
  // The number of members that came or went so far.
  uint64_t changes() const { return changes_; }

  // Reports on an earlier table no longer count.
  void begin_table() { table_ = 0; }
  // To all members; `number` is not 0.
  void tell_table(uint64_t number, const std::string& table);
  void tell_verdict(const std::string& verdict) { tell(LocalMessageKind::kVerdict, verdict); }
  void tell_failure(const Status& cause);

  // The reports of the members on the last table, by rank; the names of those without one.
  const std::map<int, std::string>& reports() const { return reports_; }
  std::string without_report() const;

 private:
  struct Member {
    LocalSocket socket;
    LocalEntry entry;
    bool is_asked = false;   // to confirm
    bool is_member = false;  // it has
  };

  LocalLeader(const LocalRanks& local, const LocalEntry& own, UniqueFd listener);
  void accept_all();
  bool has_asked(int rank) const;
  void take(Member& member, const LocalMessage& message);
  void take_entry(Member& member, const std::string& text);
  void confirm(Member& member);
  Status compare(const LocalEntry& other) const;
  void tell(LocalMessageKind kind, const std::string& text);

  const LocalEntry own_;
  UniqueFd listener_;
  std::vector<Member> members_;
  std::set<int> awaited_;
  std::map<int, MemberText> entries_;
  std::map<int, std::string> reports_;
  uint64_t changes_ = 0, table_ = 0;
  Status failure_;
};

class LocalMember {
 public:
  explicit LocalMember(const LocalRanks& local);

  // Whether a leader speaks for this rank now. `look`: a reason to give up. kMismatch where the
  // leader sees another group, which it tells the others.
  Result<bool> enlist(const LocalEntry& own, const Look& look, const Deadline& deadline);
  // The leader's next word: kTable or kVerdict. The cause for which all give up; where `look` has a
  // reason, the leader hears of it and has a second to say what came first. kPeerDied where the
  // leader has ended, kTimeout soon after the deadline.
  Result<LocalMessage> await(const Look& look, const Deadline& deadline);
  void report(const std::string& text);
  // Instead of report(): the failure that all raise, or the table of a meeting that superseded this
  // one.
  Result<LocalMessage> fail(const Status& cause, const Deadline& deadline);

  // Whether the leader has ended: what it did not pass on may be in the store.
  bool has_ended() const { return has_ended_; }
  // Whether enlist() failed because the leader did.
  bool is_told() const { return is_told_; }

 private:
  std::optional<LocalMessage> hear(int64_t ns, const Deadline& deadline);
  void call_leader();
  void say_why(const Status& cause);

  const LocalRanks local_;
  LocalSocket socket_;
  std::string leader_;  // its name
  uint64_t table_ = 0;  // the number of the last
  bool has_ended_ = false, is_told_ = false;
};

}  // namespace dscomm
