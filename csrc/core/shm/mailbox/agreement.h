// Agreement: checks whether the ranks of a group make the same calls. A difference is the error
// kMismatch, which shows both ranks' calls if the slots of their mailboxes still hold them.
//
// A slot holds a call and a rolling hash of every call so far. A rank that waits for another
// compares both hashes. A rank that did not wait for another (a broadcast's root, say) compares
// them at its next call, before the slot is reused, and when it leaves. So every rank that makes
// further calls learns of a difference; of two ranks that leave, the later one does.
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

  // Compares a member's rolling hash of a call with this rank's, if the member has posted that call
  // and not yet reused its slot. Does nothing if that was done before. Does not block.
  Status verify(int member, uint64_t sequence) {
    return has_verified(member, sequence) ? Status() : compare(member, sequence);
  }
  bool has_verified(int member, uint64_t sequence) const { return verified_[member] >= sequence; }

  // Notes that the calls so far only formed a parent team, whose calls note_call() counts. Call it
  // on the thread of the calls.
  void end_forming() { forming_calls_ = members_.sequence; }
  // Notes that this rank begins a call of a parent team: members compare the newest of these calls
  // when they leave. `reads_all`: the call needs data from every member. Call it between two calls
  // of this group, on the thread of the calls.
  void note_call(const CallRecord& call, bool reads_all);
  // If the call noted last has `reads_all`: the error if a member is gone and had not begun it.
  // Else OK. Thread-safe.
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
  // The sequence of the newest call of note_call() if its `reads_all` was true; else 0. Written by
  // the thread of the calls.
  std::atomic<uint64_t> noted_{0};
};

}  // namespace dscomm
