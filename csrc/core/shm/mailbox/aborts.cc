#include "core/shm/mailbox/aborts.h"

#include <algorithm>
#include <cstring>

#include "core/base/fence.h"
#include "core/base/futex.h"

namespace dscomm {

Status Aborts::fail(Code code, const std::string& cause) {
  const int group_rank = members_.entries[members_.rank].group_rank;
  return adopt(make_status(code, "{} (first seen by rank {} in {})", cause,
                           group_rank >= 0 ? group_rank : members_.rank, members_.name_call()));
}

void Aborts::abort(const Status& cause) {
  std::lock_guard lock(mutex_);
  if (!cause_.ok()) return;
  cause_ = cause;
  Mailbox& own = *members_.own;
  AbortRecord& record = own.abort;
  // Taken from the posted words, because the thread of the calls may be changing Members::sequence.
  record.sequence = 0;
  for (const Slot& slot : own.slots)
    record.sequence =
        std::max(record.sequence, sequence_of(slot.posted.load(std::memory_order_relaxed)));
  // A call that ends at this moment counts as unfinished: the others then see the abort in it.
  record.finished = counts_calls_ != nullptr ? counts_calls_->finished_calls() : finished_calls();
  record.rank = members_.rank;
  record.code = static_cast<uint32_t>(cause.code());
  const size_t length = cause.message().copy(record.message, sizeof record.message - 1);
  record.message[length] = '\0';
  // Pairs with has_any(), find(), failure_in() and check_each_source(). Sequentially consistent,
  // and an exchange: after this, the caller may write a tensor that members read in place. A member
  // that has read such a write must see this word in check_sources(), after its last read. The
  // fence is for Armv8.0, where an exchange is a load and a store, and only the load is ordered
  // before the caller's stores.
  own.aborted.exchange(1, std::memory_order_seq_cst);
  fence(std::memory_order_seq_cst);
  // Members may sleep on any of this rank's words; the slot in use is not known to this thread.
  for (const Slot& slot : own.slots) futex_wake_all(slot.posted);
  futex_wake_all(own.done);
}

Status Aborts::own() const {
  std::lock_guard lock(mutex_);
  return cause_;
}

Status Aborts::first_cause(uint64_t call) {
  const Status cause = failure_in(call);
  return cause.ok() ? cause : adopt(cause);
}

Status Aborts::find(uint64_t call) const {
  const AbortRecord* first = nullptr;
  for (const Mailbox* view : members_.views) {
    if (view == members_.own) continue;
    if (view->aborted.load(std::memory_order_acquire) == 0)
      continue;  // pairs with abort(): the record is whole
    if (view->group_id.load(std::memory_order_relaxed) != members_.group_id) continue;
    if (view->abort.finished >= call) continue;
    if (first == nullptr || view->abort.sequence < first->sequence ||
        (view->abort.sequence == first->sequence && view->abort.rank < first->rank))
      first = &view->abort;
  }
  if (first == nullptr) return {};
  return Status(static_cast<Code>(first->code),
                std::string(first->message, strnlen(first->message, sizeof first->message)));
}

Status Aborts::failure_in(uint64_t call) const {
  if (members_.own->aborted.load(std::memory_order_acquire) != 0)
    return own();  // pairs with abort()
  return find(call);
}

uint64_t Aborts::finished_calls() const {
  return sequence_of(members_.own->done.load(std::memory_order_relaxed)) - 1;  // orders nothing
}

// If a member's call failed while this rank read the member's tensor in place, the member's caller
// may have written the tensor. An abort spoils neither staging, which stays unchanged until this
// rank is done or has left, nor the slot, which stays unchanged until a later call.
Status Aborts::check_each_source() {
  fence(std::memory_order_acquire);  // orders plain reads before the next load
  for (size_t k = 0; k < members_.views.size(); ++k) {
    const Mailbox& view = *members_.views[k];
    if (reads_in_place_[k] != members_.sequence) continue;
    if (view.aborted.load(std::memory_order_acquire) == 0) continue;  // pairs with abort()
    // The member's call has succeeded, and it could do so only after this rank's last read.
    if (view.done.load(std::memory_order_acquire) >= phase_word(members_.sequence + 1, 0))
      continue;  // pairs with end()
    return failure();
  }
  return {};
}

}  // namespace dscomm
