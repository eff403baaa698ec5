// Diagnosis: whether a wait that takes long still makes sense, and which rank is at fault if not.
//
// After an abort, a departure or a death, published data still counts: the wait loads its word
// again, and fails only if the word has not reached its target.
#include <algorithm>

#include "core/base/format.h"
#include "core/base/timeout_advice.h"
#include "core/shm/mailbox/mailboxes.h"
#include "core/team/first_cause.h"

namespace dscomm {
namespace {

// Why this group has ended or, if it has not, why the call's parent Team has; OK if neither has.
Status find_cause(Mailboxes& mailboxes, uint64_t call) {
  DSCOMM_RETURN_IF_ERROR(mailboxes.aborts().failure_in(call));
  Team* parent = mailboxes.call().parent;
  return parent == nullptr ? Status() : parent->failure_in(call);
}

// Watches the wait for one member.
class MemberMonitor final : public WaitMonitor {
 public:
  MemberMonitor(Mailboxes& mailboxes, const std::atomic<uint64_t>& word, uint64_t target,
                int member, uint64_t done_of_all)
      : mailboxes_(mailboxes),
        members_(mailboxes.members()),
        word_(word),
        target_(target),
        done_of_all_(done_of_all),
        member_(member) {}

  Status check() override {
    const Status cause = aborts_.check(
        mailboxes_.call().number, [this](uint64_t call) { return find_cause(mailboxes_, call); });
    if (!cause.ok()) return has_come() ? Status() : mailboxes_.aborts().adopt(cause);
    // Compares calls with all members, not only the awaited one: if two ranks both act as the root,
    // each waits for the other's acknowledgement, and neither reads the other's call. Does not
    // compare in begin(), where the own slot still holds an older call.
    const bool begun =
        sequence_of(members_.slot(members_.rank).posted.load(std::memory_order_relaxed)) ==
        members_.sequence;  // this thread's own store
    for (int member = 0; begun && member < members_.size(); ++member)
      DSCOMM_RETURN_IF_ERROR(mailboxes_.agreement().verify(member, members_.sequence));
    // Polling the pidfd costs a system call, so only every eighth check does it: every 80 ms or so.
    const bool thoroughly = ++looks_ % 8 == 0;
    const MemberState member_state = members_.member_state(member_, thoroughly);
    if (member_state != MemberState::kPresent)
      return has_come() ? Status() : fail_without(member_, member_state);
    // The call also fails if another member that it needs is gone. Else this wait could last long,
    // because the awaited member may itself wait in another group or for a message.
    for (int member = 0; member < members_.size(); ++member) {
      if (member == members_.rank || !lacks(member, begun)) continue;
      const MemberState other = members_.member_state(member, thoroughly);
      if (other != MemberState::kPresent && lacks(member, begun))
        return fail_without(member, other);
    }
    return ends_in_overtime() ? timed_out() : Status();
  }

  // The awaited rank may itself wait for the rank at fault. So the error also names the ranks that
  // have not posted this call or, if all have, the ranks that have read least.
  Status timed_out() override {
    std::vector<uint64_t> reached(members_.views.size(), UINT64_MAX);
    for (int other = 0; other < members_.size(); ++other)
      if (other != members_.rank)
        reached[other] = members_.has_posted(other)
                             ? members_.views[other]->done.load(
                                   std::memory_order_acquire)  // pairs with end(), acknowledge()
                             : 0;
    const uint64_t least = std::ranges::min(reached);
    std::string missing, hint;
    for (int other = 0; other < members_.size(); ++other) {
      if (other == members_.rank || (other != member_ && reached[other] != least)) continue;
      const CallRecord last = members_.newest_record(other);
      missing += format_text("{}{}, which is {} and ", missing.empty() ? "" : "; ",
                             members_.name(other), mailboxes_.peer(other).state_text());
      missing += last.sequence == 0                   ? "has made no call"
                 : last.sequence == members_.sequence ? "is in call #"
                                                      : "last made call #";
      if (last.sequence == 0)
        hint =
            "; if a rank waits in new_group() instead, call new_group() with the same members and "
            "in the same order on all ranks";
      else
        missing += format_text("{}, {}", last.number(), describe_call(last));
    }
    return mailboxes_.fail(Code::kTimeout, format_text("timed out after {} waiting for {}{}{}",
                                                       mailboxes_.call().deadline.timeout_text(),
                                                       missing, timeout_advice(missing), hint));
  }

 private:
  // Data published before an abort, a departure or a death counts. The load that saw this event has
  // acquired all stores before the event, so this later load of the word sees them.
  bool has_come() const {
    return word_.load(std::memory_order_acquire) >= target_;  // pairs with the owner's exchange
  }

  // Whether this member has yet to post or acknowledge something that the call needs.
  bool lacks(int member, bool begun) const {
    if (begun && mailboxes_.call().reads_all && !members_.has_posted(member)) return true;
    // Orders nothing: a rank that needs the data behind the word waits for it.
    return members_.views[member]->done.load(std::memory_order_relaxed) < done_of_all_;
  }

  // A sub-call past its deadline goes on for a while, because the awaited rank may have better
  // evidence of the fault. It ends at once if a member is stopped, which is direct evidence.
  bool ends_in_overtime() {
    const Mailboxes::Call& call = mailboxes_.call();
    if (call.parent == nullptr || !overtime_.counts(call.deadline)) return false;
    for (int other = 0; other < members_.size(); ++other)
      if (other != members_.rank && mailboxes_.peer(other).is_stopped()) return true;
    return false;
  }

  Status fail_without(int member, MemberState member_state) {
    // The member may have recorded the cause.
    DSCOMM_RETURN_IF_ERROR(mailboxes_.aborts().failure());
    const uint64_t reached = sequence_of(
        members_.views[member]->done.load(std::memory_order_acquire));  // pairs with end()
    const bool has_made_calls = reached > 1;
    const std::string calls =
        has_made_calls ? format_text(" after {} calls", reached - 1) : " before its first call";
    const Status gone = members_.gone(member, member_state, calls + ", without leaving the group",
                                      calls + (has_made_calls ? ", before it made this call" : ""));
    return mailboxes_.fail(gone.code(), gone.message());
  }

  Mailboxes& mailboxes_;
  const Members& members_;
  const std::atomic<uint64_t>& word_;
  const uint64_t target_;
  const uint64_t done_of_all_;
  const int member_;
  AbortMonitor aborts_;
  unsigned looks_ = 0;
  Overtime overtime_;
};

}  // namespace

Status Mailboxes::wait_slowly(const std::atomic<uint64_t>& word, uint64_t target, int member,
                              uint64_t done_of_all) {
  MemberMonitor monitor(*this, word, target, member, done_of_all);
  return dscomm::wait_slowly(word, target, members_.own->sleepers, policy_, call_.deadline,
                             monitor);
}

Status Mailboxes::ask_until(const std::function<bool()>& is_there, const std::string& what) {
  constexpr std::chrono::microseconds kFirstPause{50}, kLongestPause{2000};
  const Deadline& deadline = call_.deadline;
  std::chrono::microseconds pause = kFirstPause;
  TimeLeft time_left(deadline);
  while (!is_there()) {
    if (Status cause = find_cause(*this, call_.number); !cause.ok()) return aborts_.adopt(cause);
    const bool is_expired = time_left.is_over();
    std::string late;
    for (int member = 0; member < size(); ++member) {
      if (member == rank()) continue;
      const MemberState member_state = members_.member_state(member);
      // Checks for the departure first: data that the member published before it left counts.
      if (member_state != MemberState::kPresent && !members_.has_posted(member)) {
        const std::string before = " before it made this call";
        const Status gone = members_.gone(member, member_state, before, before);
        return fail(gone.code(), gone.message());
      }
      const uint64_t done =
          members_.views[member]->done.load(std::memory_order_acquire);  // pairs with end()
      if (is_expired && done < phase_word(sequence(), 0))
        late += (late.empty() ? "" : "; ") + name_member(member);
    }
    if (is_expired)
      return fail(
          Code::kTimeout,
          format_text(
              "timed out after {} waiting for {}; {}{}", deadline.timeout_text(), what,
              late.empty() ? "members of this rank's other groups have not read what it shared"
                           : "the calls before this one are unfinished on " + late,
              late.empty() ? raise_the_timeout("those members are") : timeout_advice(late)));
    deadline.nap(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
  return {};
}

}  // namespace dscomm
