// Aborts: why a group ended. Each rank writes the first cause that it finds, or sees in a member's
// abort record, into its own record before it returns the error, so that all ranks name the same
// cause. A group that failed stays failed. Thread-safe, except as noted.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/shm/mailbox/members.h"
#include "core/team/team.h"

namespace dscomm {

class Aborts {
 public:
  explicit Aborts(const Members& members)
      : members_(members), reads_in_place_(members.entries.size(), 0) {}

  // Ends the group with a cause that this rank found in the call in progress: `cause` names the
  // rank at fault and the reason. Returns the status to raise. Call it on the thread of the calls.
  Status fail(Code code, const std::string& cause);
  // Ends the group; keeps an earlier cause.
  void abort(const Status& cause);
  // Ends the group with `cause`, unless it has ended; returns the cause with which it ended.
  Status adopt(const Status& cause) {
    abort(cause);
    return own();
  }
  // This rank's first cause; else a cause that find(call) finds, which this rank adopts; else OK.
  Status failure(uint64_t call = kAnyCall) { return has_any() ? first_cause(call) : Status(); }
  // The first cause among the members' abort records; OK if there is none. Ignores the abort of a
  // member that had finished `call`.
  Status find(uint64_t call) const;
  // See Team.
  Status failure_in(uint64_t call) const;
  void set_parent(const Team* parent) { counts_calls_ = parent; }
  uint64_t finished_calls() const;

  // Notes that this call reads a tensor of `member` in place. Call it on the thread of the calls.
  void reads_in_place(int member) { reads_in_place_[member] = last_in_place_ = members_.sequence; }
  // Fails if data that was read in place may have changed. Call it after the last read of the call.
  Status check_sources() {
    return last_in_place_ == members_.sequence ? check_each_source() : Status();
  }

 private:
  // Whether any member has aborted. Inexpensive, because each call checks it.
  bool has_any() const {
    for (const Mailbox* view : members_.views)
      if (view->aborted.load(std::memory_order_acquire) != 0) return true;  // pairs with abort()
    return false;
  }
  Status first_cause(uint64_t call);
  Status own() const;
  Status check_each_source();

  const Members& members_;
  const Team* counts_calls_ = nullptr;  // see set_parent(); null: this Team
  // The last call in which this rank read a tensor in place: of each member, and of any member.
  std::vector<uint64_t> reads_in_place_;
  uint64_t last_in_place_ = 0;

  mutable std::mutex mutex_;
  Status cause_;  // guarded by mutex_; set before `aborted` in the own mailbox
};

}  // namespace dscomm
