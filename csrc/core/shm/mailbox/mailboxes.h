// Mailboxes: how the ranks of one group publish their progress to each other, and wait for it.
//
// A collective is: begin(call), then any mix of post / wait_posted / acknowledge /
// wait_acknowledged, then end(). post(p) says "everything up to phase p of this call is published";
// acknowledge(p) says "I have read everything up to phase p". Both only grow. A rank posts in every
// call, whatever its role, before it waits.
//
// Agreement: a slot holds a rolling hash of every call so far. Whoever waits for a rank compares;
// what nobody waited for (the calls of a broadcast's root, say) is compared at the next call,
// before the slot is reused, and when the rank leaves. So every rank that is in the group, or next
// enters it, learns; and of two ranks that leave, the later one.
//
// Failure: whatever ends a wait early is written into one's own abort record before it is returned,
// so that all name the first cause and not the messenger. A group that failed stays failed.
//
// Published data counts: an abort, a departure or a death takes nothing back that a rank had
// published. A wait looks at its word again after it has seen one of them, and fails only if the
// word has not come.
//
// One thread at a time calls into Mailboxes. Any thread may call abort() and failure().
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/base/deadline.h"
#include "core/base/status.h"
#include "core/shm/mailbox/cache_distance.h"
#include "core/shm/mailbox/layout.h"
#include "core/shm/mailbox/wait.h"
#include "core/shm/memory/arena.h"
#include "core/shm/memory/peer.h"
#include "core/team/call_record.h"
#include "core/team/departure.h"
#include "core/team/team.h"

namespace dscomm {

struct MailboxMember {
  std::shared_ptr<Peer> peer;
  uint64_t mailbox_offset = 0;
  int global_rank = -1;  // for messages; -1 when it is not known
  int group_rank =
      -1;  // for messages, if these are the mailboxes of some of a group's ranks; -1: position

  // "rank 2 (global rank 5, pid 7 on host a)"
  static std::string name(int rank, int global_rank, const std::string& process);
};

class Mailboxes {
 public:
  // `members` in group order, this rank's own included. Each mailbox_offset has been checked to lie
  // in its arena.
  Mailboxes(std::shared_ptr<Arena> arena, uint64_t group_id, std::string name, int rank,
            std::vector<MailboxMember> members, const WaitPolicy& policy);
  ~Mailboxes();  // leaves

  // Sets up zeroed lines at `offset` of the own arena before the offset is published.
  static void set_up(Arena& arena, uint64_t offset);
  // Names them, before any member can wait for them.
  static void open(Arena& arena, uint64_t offset, uint64_t group_id);
  // For a rank that gives up before it has Mailboxes: members that did not give up see that it
  // left.
  static void close(Arena& arena, uint64_t offset);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(members_.size()); }

  // Completes the record.
  Status begin(CallRecord& call, const CallOptions& options);
  void post(uint32_t phase);
  Status wait_posted(int member, uint32_t phase);
  Status wait_all_posted(uint32_t phase);
  void acknowledge(uint32_t phase);
  // Until `member` has acknowledged, or finished, at least `word` (see progress()). Fails at once
  // where any member is gone without `word_of_all`, which will be waited for next.
  Status wait_acknowledged(int member, uint64_t word, uint64_t word_of_all = 0);
  Status wait_all_acknowledged(uint64_t word);
  // Waits until `reader`, or with -1 every member, has acknowledged this many rounds of the call.
  Status wait_read(uint32_t rounds, int reader) {
    const uint64_t word = progress(sequence_, rounds);
    return reader < 0 ? wait_all_acknowledged(word) : wait_acknowledged(reader, word);
  }
  // For what no word of a member tells: asks until it says yes, which the members' progress in
  // whatever they do brings about. `what` is for the error, where the deadline passes first.
  Status ask_until(const std::function<bool()>& is_there, const std::string& what);
  // Whether all are known to have; looks at no line.
  bool have_acknowledged(uint64_t word) const;
  Status end();

  uint64_t group_id() const { return group_id_; }
  uint64_t sequence() const { return sequence_; }
  // The slot of the call in progress: mine to fill between begin() and post(), a member's to read
  // after wait_posted(). Into that of the next call post() writes as well, see
  // prefetch_next_slot().
  Slot& own_slot() { return own_->slots[sequence_ % kSlots]; }
  // Puts tiny data there.
  void put_tiny(const void* data, size_t bytes);
  const Slot& slot(int member) const { return views_[member]->slots[sequence_ % kSlots]; }
  const Peer& peer(int member) const { return *members_[member].peer; }

  const CacheDistance& distance() const { return distance_; }

  // Ends the group with a cause found by this rank in the call in progress: `cause` says who is at
  // fault and why. Returns the status to raise.
  Status fail(Code code, const std::string& cause);
  // The same from any thread; keeps an earlier cause.
  void abort(const Status& cause);
  // This rank's first cause; takes over a member's abort that can be seen now. Any thread.
  Status failure();

  // See Team.
  Status death() const;
  Status look(uint64_t call) const;
  void set_parent(const Team* parent) { counts_calls_ = parent; }
  uint64_t finished_calls() const;
  // Says that the calls so far only formed a Team that is composed of others, whose calls
  // note_call() counts. From the thread of the calls.
  void end_forming() { forming_calls_ = sequence_; }
  // Says that this rank begins a call in a Team that is composed of others: members compare the
  // newest in leave(). `reads_all`: it needs what every member puts in. Between calls of these
  // Mailboxes, from their thread.
  void note_call(const CallRecord& call, bool reads_all);
  // Who is gone without having begun the newest of these calls, where that reads all. Any thread.
  Status absence() const;
  // Idempotent.
  Status leave();
  // Says that this rank's process is about to end without having left, for an unhandled exception
  // of that type or, where it is empty, for none that is known. It may still call. Any thread.
  void note_end(const std::string& exception);
  // Whether a member has left, or its process has ended in order. Any thread.
  bool has_left(int member) const;
  // How, of one that has.
  Departure departure(int member) const;
  // Whether a member has left, or has died without leaving. `thoroughly` as Peer::alive().
  enum class Presence { kHere, kLeft, kDied };
  Presence presence(int member, bool thoroughly = false) const;
  // Says that this call reads a tensor of `member` in place: see end().
  void reads_in_place(int member) {
    reads_in_place_[member] = sequence_;
    last_in_place_ = sequence_;
  }
  // A question to ask later, even after this object is gone: whether every other member has
  // finished `done_word`, left or died, so that nobody reads this rank's memory of that time any
  // more.
  std::function<bool()> unread_later(uint64_t done_word = UINT64_MAX) const;

  // "rank 2 (pid 7 on host a)"
  std::string name_member(int member) const;
  // "all_reduce #5 of group 'world'", the call in progress.
  std::string name_call() const;

 private:
  class MemberWatch;

  void prefetch_next_slot();
  void choose_latency_probe(const CallRecord& call);
  void write_latency_probe();
  void read_latency_probe(int member);
  static bool unread(uint64_t group_id, int rank, const std::vector<MailboxMember>& members,
                     uint64_t done_word);
  void wake_sleepers(const std::atomic<uint64_t>& word);
  Status wait_word(const std::atomic<uint64_t>& word, uint64_t target, int member,
                   uint64_t done_of_all = 0);
  Status verify(int member, uint64_t sequence);
  Status mismatch(int member, uint64_t sequence);
  Status compare_last_calls();
  Status check_sources();
  const AbortRecord* find_abort(uint64_t call) const;
  Status adopt_abort(uint64_t call);
  CallRecord newest_record(int member) const;
  Status timed_out(int member);
  bool ends_in_overtime(Overtime& overtime) const;
  // Whether a member has published anything in the call in progress.
  bool has_posted(int member) const;
  Status failed() const;

  std::shared_ptr<Arena> arena_;
  const uint64_t group_id_;
  const std::string name_;
  const int rank_;
  const std::vector<MailboxMember> members_;
  const WaitPolicy policy_;
  Mailbox* own_;
  std::vector<const Mailbox*> views_;

  uint64_t sequence_ = 0;
  uint64_t number_ = 0;         // CallRecord::number() of the call in progress
  Team* parent_ = nullptr;      // of the call in progress, see CallOptions
  bool reads_all_ = false;      // in the call in progress
  uint64_t forming_calls_ = 0;  // see end_forming()
  // The newest call of note_call(), where it reads all; else 0. Its owner's thread writes it.
  std::atomic<uint64_t> noted_{0};
  const Team* counts_calls_ = nullptr;  // see set_parent(); null: this Team
  Deadline deadline_ = Deadline::after(std::chrono::milliseconds(0));
  std::vector<uint64_t> known_done_;  // of each member: a lower bound of its done word
  CacheDistance distance_;
  // Every so many calls ranks take the next latency probe:
  size_t probe_ = 0;
  bool writes_probe_ = false;  // in this call
  int observed_ = -1;          // the member whose probe it times; -1: none, or it has
  std::array<int64_t, kLatencyProbes> looked_ns_ = {};  // when it last timed each, of any member
  std::vector<uint64_t> verified_;  // of each member: the last sequence whose hash was compared
  // Of each member: the last call in which this rank read its tensor; and of all.
  std::vector<uint64_t> reads_in_place_;
  uint64_t last_in_place_ = 0;
  bool has_left_ = false;  // this rank

  mutable std::mutex failure_mutex_;
  Status failure_;  // guarded by failure_mutex_; set before own_->aborted
};

}  // namespace dscomm
