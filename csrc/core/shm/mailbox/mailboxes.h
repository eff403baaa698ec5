// Mailboxes: how the ranks of one group publish their progress to each other, and wait for it.
//
// A collective is: begin(call), then any mix of post / wait_posted / acknowledge /
// wait_acknowledged, then end(). post(p) says "everything up to phase p of this call is published";
// acknowledge(p) says "I have read everything up to phase p". Both only grow. A rank posts in every
// call, whatever its role, before it waits for another rank's post.
//
// One thread at a time calls into Mailboxes. Any thread may use aborts() and members(), except as
// noted there.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/base/deadline.h"
#include "core/base/status.h"
#include "core/shm/mailbox/aborts.h"
#include "core/shm/mailbox/agreement.h"
#include "core/shm/mailbox/latency_probes.h"
#include "core/shm/mailbox/members.h"
#include "core/shm/mailbox/wait.h"

namespace dscomm {

class Mailboxes {
 public:
  // The call in progress, as far as its waits depend on it.
  struct Call {
    uint64_t number = 0;     // CallRecord::number()
    Team* parent = nullptr;  // see CallOptions
    bool reads_all = false;
    Deadline deadline = Deadline::after(std::chrono::milliseconds(0));
  };

  // `members` in group order, this rank's own included. Each mailbox_offset has been checked to lie
  // in its arena.
  Mailboxes(std::shared_ptr<Arena> arena, uint64_t group_id, std::string name, int rank,
            std::vector<MailboxMember> members, const WaitPolicy& policy);
  ~Mailboxes() { static_cast<void>(leave()); }

  int rank() const { return members_.rank; }
  int size() const { return members_.size(); }

  // Begins a call, and completes its record.
  Status begin(CallRecord& call, const CallOptions& options);
  void post(uint32_t phase);
  Status wait_posted(int member, uint32_t phase);
  Status wait_all_posted(uint32_t phase);
  void acknowledge(uint32_t phase);
  // Waits until the done word of `member` is at least `word`. Fails at once if any member is gone
  // and its done word is below `word_of_all`, which the call needs of every member; 0: of none.
  Status wait_acknowledged(int member, uint64_t word, uint64_t word_of_all = 0);
  Status wait_all_acknowledged(uint64_t word);
  // Waits until `reader`, or with -1 every member, has acknowledged this many rounds of the call.
  Status wait_read(uint32_t rounds, int reader) {
    const uint64_t word = phase_word(sequence(), rounds);
    return reader < 0 ? wait_all_acknowledged(word) : wait_acknowledged(reader, word);
  }
  // Calls `is_there` until it is true: for a condition that other members bring about and that no
  // shared word shows. At the deadline, the error names `what`.
  Status ask_until(const std::function<bool()>& is_there, const std::string& what);
  // Whether all members are known to have acknowledged `word`. Reads no mailbox.
  bool have_acknowledged(uint64_t word) const;
  uint64_t sequence() const { return members_.sequence; }
  // The slot of the call in progress. This rank fills its own between begin() and post(), and reads
  // a member's after wait_posted(). post() also prefetches the slot of the next call.
  Slot& own_slot() { return members_.own->slots[sequence() % kSlots]; }
  // Puts tiny data into own_slot().
  void put_tiny(const void* data, size_t bytes);
  const Slot& slot(int member) const { return members_.slot(member); }
  const Peer& peer(int member) const { return *members_.entries[member].peer; }
  const CacheDistance& distance() const { return probes_.distance(); }

  const Members& members() const { return members_; }
  Members& members() { return members_; }
  Aborts& aborts() { return aborts_; }
  Agreement& agreement() { return agreement_; }
  const Call& call() const { return call_; }
  // See Aborts and Members.
  Status fail(Code code, const std::string& cause) { return aborts_.fail(code, cause); }
  std::string name_member(int member) const { return members_.name(member); }

  // See Team::leave(). Idempotent.
  Status leave();

 private:
  friend class Staging;  // only Staging::end() ends a call: it waits for the readers of a tensor
  Status end();
  void prefetch_next_slot();
  void wake_sleepers(const std::atomic<uint64_t>& word);
  // Waits until a member's `word` is at least `target`. `done_of_all`: what the done words of all
  // members must reach, for which the call waits member by member; 0: nothing.
  Status wait_word(const std::atomic<uint64_t>& word, uint64_t target, int member,
                   uint64_t done_of_all = 0);
  Status wait_slowly(const std::atomic<uint64_t>& word, uint64_t target, int member,
                     uint64_t done_of_all);

  Members members_;
  Aborts aborts_;
  Agreement agreement_;
  LatencyProbes probes_;
  const WaitPolicy policy_;
  Call call_;
  std::vector<uint64_t> known_done_;  // of each member: a lower bound of its done word
  bool has_left_ = false;             // this rank
};

}  // namespace dscomm
