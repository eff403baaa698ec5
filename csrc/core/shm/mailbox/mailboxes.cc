#include "core/shm/mailbox/mailboxes.h"

#include <algorithm>
#include <cstring>

#include "core/base/futex.h"
#include "core/shm/staging/copy.h"
#include "core/team/call.h"

namespace dscomm {
namespace {

// The bytes of tiny data that lie in the slot's first cache line.
constexpr size_t kFirstTinyBytes = kLinePairBytes / 2 - offsetof(Slot, tiny);

}  // namespace

Mailboxes::Mailboxes(std::shared_ptr<Arena> arena, uint64_t group_id, std::string name, int rank,
                     std::vector<MailboxMember> members, const WaitPolicy& policy)
    : members_{std::move(arena), group_id, std::move(name), rank, std::move(members)},
      aborts_(members_),
      agreement_(members_, aborts_),
      probes_(members_),
      policy_(policy),
      known_done_(members_.entries.size(), phase_word(1, 0)) {
  known_done_[rank] = UINT64_MAX;
}

Status Mailboxes::begin(CallRecord& call, const CallOptions& options) {
  const uint64_t last = sequence();
  const uint64_t number = options.parent_call != nullptr ? options.parent_call->number() : last + 1;
  // Ignores the abort of a member that had finished this call: the member has published its part.
  DSCOMM_RETURN_IF_ERROR(aborts_.failure(number));
  call_ = {number, options.parent,
           reads_everyone(static_cast<Collective>(call.kind), call.root == rank()),
           options.deadline};
  const uint64_t hash_before =
      last == 0 ? members_.group_id : own_slot().hash.load(std::memory_order_relaxed);  // own store
  members_.sequence = last + 1;
  for (int member = 0; member < size(); ++member) {
    DSCOMM_RETURN_IF_ERROR(agreement_.verify(member, last));
    // The slot was last used kSlots calls ago: everyone must have finished that call.
    if (last >= kSlots) {
      const uint64_t reusable = phase_word(last + 2 - kSlots, 0);
      DSCOMM_RETURN_IF_ERROR(wait_acknowledged(member, reusable, reusable));
      DSCOMM_RETURN_IF_ERROR(agreement_.verify(member, last + 1 - kSlots));
    }
  }
  if (options.parent_call != nullptr) call = as_sub_call(call, options);
  call.sequence = sequence();
  Slot& slot = own_slot();
  slot.posted.store(phase_word(sequence(), 0),
                    std::memory_order_relaxed);  // ordered by the next line
  slot.hash.store(hash_call(hash_before, call),
                  std::memory_order_release);  // pairs with Agreement::compare()
  store_record(&members_.own->calls[sequence() % kSlots], call);
  probes_.choose(call.count);
  return {};
}

// Cuts the copy at the end of the slot's first cache line: a store into two lines waits for both.
void Mailboxes::put_tiny(const void* data, size_t bytes) {
  std::byte* tiny = own_slot().tiny;
  const size_t first = std::min(bytes, kFirstTinyBytes);
  if (first > 0) std::memcpy(tiny, data, first);
  if (bytes > first)
    std::memcpy(tiny + first, static_cast<const std::byte*>(data) + first, bytes - first);
}

void Mailboxes::post(uint32_t phase) {
  probes_.write();
  Slot& slot = own_slot();
  // seq_cst: releases the slot and staging to wait_posted(), and is the store half of the Dekker
  // pair with the members' sleepers.
  slot.posted.exchange(phase_word(sequence(), phase), std::memory_order_seq_cst);
  if (phase == 1) prefetch_next_slot();
  wake_sleepers(slot.posted);
  if (phase == 1) back_off();
}

// Prefetches the next call's slot for ownership, if all members are known to have read its old
// contents.
void Mailboxes::prefetch_next_slot() {
  const uint64_t next = sequence() + 1;
  if (next <= kSlots || !have_acknowledged(phase_word(next - kSlots + 1, 0))) return;
  std::byte* tiny = members_.own->slots[next % kSlots].tiny;
  prefetch_for_ownership(tiny);
  prefetch_for_ownership(tiny + kFirstTinyBytes);
}

void Mailboxes::acknowledge(uint32_t phase) {
  probes_.write();
  std::atomic<uint64_t>& done = members_.own->done;
  done.exchange(phase_word(sequence(), phase), std::memory_order_seq_cst);  // as in post()
  wake_sleepers(done);
}

Status Mailboxes::end() {
  DSCOMM_RETURN_IF_ERROR(aborts_.check_sources());
  std::atomic<uint64_t>& done = members_.own->done;
  done.exchange(phase_word(sequence() + 1, 0), std::memory_order_seq_cst);  // as in post()
  wake_sleepers(done);
  return {};
}

void Mailboxes::wake_sleepers(const std::atomic<uint64_t>& word) {
  for (int member = 0; member < size(); ++member) {
    if (member == rank()) continue;
    // The load half of the Dekker pair with wait_slowly().
    if (members_.views[member]->sleepers.load(std::memory_order_seq_cst) == 0) continue;
    futex_wake_all(word);
    return;
  }
}

Status Mailboxes::wait_word(const std::atomic<uint64_t>& word, uint64_t target, int member,
                            uint64_t done_of_all) {
  return wait_at_least(word, target, policy_,
                       [&] { return wait_slowly(word, target, member, done_of_all); });
}

Status Mailboxes::wait_posted(int member, uint32_t phase) {
  DSCOMM_RETURN_IF_ERROR(wait_word(slot(member).posted, phase_word(sequence(), phase), member));
  probes_.read(member);
  if (agreement_.has_verified(member, sequence())) return {};
  known_done_[member] = std::max(known_done_[member], phase_word(sequence(), 0));
  return agreement_.verify(member, sequence());
}

Status Mailboxes::wait_all_posted(uint32_t phase) {
  for (int member = 0; member < size(); ++member)
    if (member != rank()) DSCOMM_RETURN_IF_ERROR(wait_posted(member, phase));
  return {};
}

Status Mailboxes::wait_acknowledged(int member, uint64_t word, uint64_t word_of_all) {
  if (known_done_[member] >= word) return {};
  const std::atomic<uint64_t>& done = members_.views[member]->done;
  DSCOMM_RETURN_IF_ERROR(wait_word(done, word, member, word_of_all));
  probes_.read(member);
  known_done_[member] = done.load(std::memory_order_acquire);  // pairs with acknowledge(), end()
  return {};
}

Status Mailboxes::wait_all_acknowledged(uint64_t word) {
  for (int member = 0; member < size(); ++member)
    DSCOMM_RETURN_IF_ERROR(wait_acknowledged(member, word, word));
  return {};
}

bool Mailboxes::have_acknowledged(uint64_t word) const {
  return std::all_of(known_done_.begin(), known_done_.end(),
                     [word](uint64_t done) { return done >= word; });
}

Status Mailboxes::leave() {
  if (has_left_) return {};
  has_left_ = true;
  Mailbox& own = *members_.own;
  // Dekker, with the loads in compare_last_calls(): if two ranks leave at the same time, at least
  // one sees that the other makes no more calls.
  own.closed.exchange(kCallsEnded, std::memory_order_seq_cst);
  Status disagreement = agreement_.compare_last_calls();
  // Pairs with has_left(), unread_later().
  own.closed.store(kReadsEnded, std::memory_order_release);
  for (const Slot& slot : own.slots) futex_wake_all(slot.posted);
  futex_wake_all(own.done);
  return disagreement;
}

}  // namespace dscomm
