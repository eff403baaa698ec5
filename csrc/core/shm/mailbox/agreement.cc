#include "core/shm/mailbox/agreement.h"

#include "core/base/format.h"
#include "core/team/mismatch.h"

namespace dscomm {

Status Agreement::compare(int member, uint64_t sequence) {
  const Slot& theirs = members_.views[member]->slots[sequence % kSlots];
  uint64_t posted = theirs.posted.load(std::memory_order_acquire);  // pairs with post()
  if (sequence_of(posted) != sequence || posted == phase_word(sequence, 0)) return {};
  // Acquire pairs with the release in begin(): after a load of a later call's hash, that call's
  // posted word is visible, too.
  uint64_t hash = theirs.hash.load(std::memory_order_acquire);
  if (sequence_of(theirs.posted.load(std::memory_order_relaxed)) != sequence) return {};
  if (hash != members_.own->slots[sequence % kSlots].hash.load(std::memory_order_relaxed))
    return mismatch(member, sequence);
  verified_[member] = sequence;
  return {};
}

// The hashes of `sequence` differ: finds the first call, as far back as the slots go, in which the
// two ranks differ, and shows both.
Status Agreement::mismatch(int member, uint64_t sequence) {
  const std::string my_name = members_.name(members_.rank), their_name = members_.name(member);
  uint64_t first = sequence > kSlots ? sequence - kSlots + 1 : 1;
  for (uint64_t s = first; s <= sequence; ++s) {
    CallRecord mine = load_record(members_.own->calls[s % kSlots]);
    CallRecord theirs = load_record(members_.views[member]->calls[s % kSlots]);
    if (mine.sequence != s || theirs.sequence != s) continue;
    if (hash_call(0, mine) == hash_call(0, theirs)) continue;
    return aborts_.fail(Code::kMismatch, describe_mismatch(mine, my_name, theirs, their_name));
  }
  return aborts_.fail(Code::kMismatch,
                      format_text("the calls of {} and {} differed more than {} calls ago{}",
                                  my_name, their_name, kSlots, kMakeSameCalls));
}

void Agreement::note_call(const CallRecord& call, bool reads_all) {
  CallRecord record = call;
  record.parent_number = call.number();
  record.sequence += members_.sequence;  // newer than the calls made through Mailboxes
  store_record(&members_.own->calls[record.sequence % kSlots], record);
  noted_.store(reads_all ? record.sequence : 0, std::memory_order_relaxed);  // orders nothing
}

Status Agreement::find_missing_member() const {
  const uint64_t noted = noted_.load(std::memory_order_relaxed);
  for (int member = 0; noted > 0 && member < members_.size(); ++member) {
    if (member == members_.rank) continue;
    // Checks for the departure first: a call that the member noted before it left counts.
    const MemberState member_state = members_.member_state(member);
    if (member_state == MemberState::kPresent || members_.newest_record(member).sequence >= noted)
      continue;
    DSCOMM_RETURN_IF_ERROR(aborts_.find(kAnyCall));  // a member may have recorded the cause
    const std::string before = " before it made this call";
    return members_.gone(member, member_state, ", without leaving the group," + before, before);
  }
  return {};
}

// Compares this rank's calls with each member's: the hashes of the calls that the slots still hold
// and that verify() has not compared, and the number of calls, if the member makes no more, because
// it left or its process ended in order. A member that is still in the group may be some calls
// behind or ahead, and compares when it leaves. A death is no evidence of a mistake in the program.
Status Agreement::compare_last_calls() {
  const CallRecord mine = members_.newest_record(members_.rank);
  for (int member = 0; member < members_.size(); ++member) {
    if (member == members_.rank) continue;
    // Loaded before the calls are counted: if true, their number is final.
    const bool is_done =
        members_.views[member]->closed.load(std::memory_order_seq_cst) != 0 ||  // see leave()
        members_.member_state(member, true) == MemberState::kLeft;
    if (!aborts_.failure_in(kAnyCall).ok()) return {};  // already reported
    for (uint64_t s = members_.sequence; s > verified_[member] && s + kSlots > members_.sequence;
         --s)
      DSCOMM_RETURN_IF_ERROR(verify(member, s));
    const CallRecord theirs = members_.newest_record(member);
    if (!is_done || theirs.sequence == mine.sequence) continue;
    const auto count = [this](int rank, const CallRecord& last) {
      const uint64_t calls = last.number();
      if (last.sequence <= forming_calls_) return members_.name(rank) + " made no call";
      return format_text("{} made {} {}, the last {}", members_.name(rank), calls,
                         calls == 1 ? "call" : "calls", describe_call(last));
    };
    const Departure departure = members_.departure(member);
    return aborts_.adopt(
        make_status(Code::kMismatch,
                    "the ranks left after different calls: {}, {}{}; {} (first seen by {} as it "
                    "left group '{}')",
                    count(members_.rank, mine), count(member, theirs),
                    departure.exception ? " and " + departure.how() : "", departure.advice(),
                    members_.name(members_.rank), members_.group_name));
  }
  return {};
}

}  // namespace dscomm
