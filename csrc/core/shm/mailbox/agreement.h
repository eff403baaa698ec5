// Agreement: whether the ranks of a group make the same calls. A difference is a mismatch; its text
// is that of describe_mismatch() (core/team/mismatch.h).
//
// A slot holds a rolling hash of every call so far. A rank that waits for another compares the
// hashes. The other calls (those of a broadcast's root, say) are compared at the next call, before
// the slot is reused, and when the rank leaves. So every rank that is in the group, or next enters
// it, learns of a difference; and of two ranks that leave, the later one.
#pragma once

#include <atomic>
#include <vector>

#include "core/shm/mailbox/aborts.h"

namespace dscomm {

class Agreement {
 public:
  Agreement(const Members& members, Aborts& aborts)
      : members_(members), aborts_(aborts), verified_(members.entries.size(), 0) {
    verified_[members.rank] = UINT64_MAX;
  }

  // Compares a member's rolling hash of a call with this rank's, unless that was done, if the
  // member has posted that call and not yet reused its slot. Does not block.
  Status verify(int member, uint64_t sequence) {
    return has_verified(member, sequence) ? Status() : compare(member, sequence);
  }
  bool has_verified(int member, uint64_t sequence) const { return verified_[member] >= sequence; }

  // Says that the calls so far only formed a Team that is composed of others, whose calls
  // note_call() counts. From the thread of the calls.
  void end_forming() { forming_calls_ = members_.sequence; }
  // Says that this rank begins a call in a Team that is composed of others: members compare the
  // newest when they leave. `reads_all`: it needs data from every member. Between calls of the
  // Mailboxes, from their thread.
  void note_call(const CallRecord& call, bool reads_all);
  // Which member is gone without having begun the newest of these calls, if that reads all. Any
  // thread.
  Status find_missing_member() const;
  // Call it when this rank leaves. kMismatch if a member's calls differ.
  Status compare_last_calls();

 private:
  Status compare(int member, uint64_t sequence);
  Status mismatch(int member, uint64_t sequence);

  const Members& members_;
  Aborts& aborts_;
  std::vector<uint64_t> verified_;  // of each member: the last sequence whose hash was compared
  uint64_t forming_calls_ = 0;      // see end_forming()
  // The newest call of note_call(), if it reads all; else 0. Its owner's thread writes it.
  std::atomic<uint64_t> noted_{0};
};

}  // namespace dscomm
