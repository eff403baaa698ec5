#include "core/shm/mailbox/mailboxes.h"

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstring>
#include <functional>

#include "core/base/fence.h"
#include "core/base/futex.h"
#include "core/shm/staging/copy.h"
#include "core/team/call.h"
#include "core/team/first_cause.h"

namespace dscomm {
namespace {

// In one of so many calls each rank writes a latency probe, and in it, or soon after, times a
// load of one member's; in a group's first calls and in large ones more often, so that it soon
// knows.
constexpr uint64_t kProbePeriod = 32;
constexpr uint64_t kShortProbePeriod = 2;
constexpr uint64_t kFirstCalls = 64;
constexpr uint64_t kLargeCount = 64 << 10;  // elements

// An older probe may have left its owner's cache, for what the owner has written since. But a rank
// that is late, as it takes far for near, has to learn from those that wait for it.
constexpr int64_t kFreshNs = 100'000;

// Of tiny data, what lies in the slot's first cache line.
constexpr size_t kFirstTinyBytes = kLineBytes / 2 - offsetof(Slot, tiny);

// Advice in errors that name a dead member.
constexpr char kSeeItsError[] =
    "; look for its own error, a signal or the out-of-memory killer in its output and the system "
    "log";

constexpr size_t kRecordWords = sizeof(CallRecord) / sizeof(uint64_t);

// A copy word by word, because a reader may race with the owner's next call. The sequence is 0
// meanwhile, and is stored last. Release pairs with the acquires in load_record(): a reader that
// sees a word of this record also sees that the one before it is gone.
void store_record(CallRecord* to, const CallRecord& from) {
  auto words = std::bit_cast<std::array<uint64_t, kRecordWords>>(from);
  auto* out = reinterpret_cast<uint64_t*>(to);
  std::atomic_ref<uint64_t>(out[0]).store(0, std::memory_order_relaxed);  // ordered by the next
  for (size_t i = 1; i < kRecordWords; ++i)
    std::atomic_ref<uint64_t>(out[i]).store(words[i], std::memory_order_release);
  std::atomic_ref<uint64_t>(out[0]).store(words[0], std::memory_order_release);
}

// An empty record (sequence 0) when it was being rewritten meanwhile.
CallRecord load_record(const CallRecord& from) {
  std::array<uint64_t, kRecordWords> words;
  auto* in = reinterpret_cast<uint64_t*>(const_cast<CallRecord*>(&from));  // loads only
  for (size_t i = 0; i < kRecordWords; ++i)
    words[i] = std::atomic_ref<uint64_t>(in[i]).load(
        std::memory_order_acquire);  // pairs with store_record()
  if (std::atomic_ref<uint64_t>(in[0]).load(std::memory_order_relaxed) != words[0]) return {};
  return std::bit_cast<CallRecord>(words);
}

Status cause_of(const AbortRecord& record) {
  return Status(static_cast<Code>(record.code),
                std::string(record.message, strnlen(record.message, sizeof record.message)));
}

}  // namespace

// Watches the wait for one member.
class Mailboxes::MemberWatch final : public Watch {
 public:
  // `done_of_all`: the done word that the wait is for in every member, one after another; 0: in
  // none.
  MemberWatch(Mailboxes& mailboxes, const std::atomic<uint64_t>& word, uint64_t target, int member,
              uint64_t done_of_all)
      : mailboxes_(mailboxes),
        word_(word),
        target_(target),
        done_of_all_(done_of_all),
        member_(member) {}

  Status look() override {
    if (Status cause = find_abort(); !cause.ok()) {
      if (has_come()) return {};
      mailboxes_.abort(cause);
      return mailboxes_.failed();
    }
    // Not only the one that is waited for: two ranks that both believe to be the root wait for each
    // other's acknowledgements, and neither reads the other's call. Not in begin(), where the own
    // slot still holds an older call.
    const bool begun = sequence_of(mailboxes_.own_slot().posted.load(std::memory_order_relaxed)) ==
                       mailboxes_.sequence_;  // this thread's own store
    for (int member = 0; begun && member < mailboxes_.size(); ++member)
      if (mailboxes_.verified_[member] < mailboxes_.sequence_)
        DSCOMM_RETURN_IF_ERROR(mailboxes_.verify(member, mailboxes_.sequence_));
    // The pidfd costs a system call: every eighth look is some 100 ms.
    const bool thoroughly = ++looks_ % 8 == 0;
    const Presence presence = mailboxes_.presence(member_, thoroughly);
    if (presence != Presence::kHere) return has_come() ? Status() : fail_without(member_, presence);
    // Nor will there be what is waited for next, while this member may not come for long: it waits
    // in another group, or for a message.
    for (int member = 0; member < mailboxes_.size(); ++member) {
      if (member == mailboxes_.rank_ || !lacks(member, begun)) continue;
      const Presence other = mailboxes_.presence(member, thoroughly);
      if (other != Presence::kHere && lacks(member, begun)) return fail_without(member, other);
    }
    return mailboxes_.ends_in_overtime(overtime_) ? mailboxes_.timed_out(member_) : Status();
  }

  Status timed_out() override { return mailboxes_.timed_out(member_); }

 private:
  // Whether something of this member is still to come that the call cannot do without.
  bool lacks(int member, bool begun) const {
    if (begun && mailboxes_.reads_all_ && !mailboxes_.has_posted(member)) return true;
    const Mailbox& view = *mailboxes_.views_[member];
    // Orders nothing: whoever needs what the word stands for waits for it.
    return view.done.load(std::memory_order_relaxed) < done_of_all_;
  }

  Status fail_without(int member, Presence presence) {
    // It may have recorded why it went.
    DSCOMM_RETURN_IF_ERROR(mailboxes_.adopt_abort(kAnyCall));
    const Mailbox& view = *mailboxes_.views_[member];
    uint64_t reached = sequence_of(view.done.load(std::memory_order_acquire));  // pairs with end()
    const bool has_made_calls = reached > 1;
    const std::string calls = has_made_calls ? "after " + std::to_string(reached - 1) + " calls"
                                             : "before its first call";
    if (presence == Presence::kLeft) {
      const Departure departure = mailboxes_.departure(member);
      return mailboxes_.fail(Code::kPeerLeft,
                             mailboxes_.name_member(member) + " " + departure.how() + " " + calls +
                                 (has_made_calls ? ", before it made this call; " : "; ") +
                                 departure.advice());
    }
    return mailboxes_.fail(Code::kPeerDied, mailboxes_.name_member(member) + " died or exited " +
                                                calls + ", without leaving the group" +
                                                kSeeItsError);
  }

  // What a rank published before it aborted, left or died counts: the load that told of it acquired
  // all that came before, so the word is loaded after it.
  bool has_come() const {
    return word_.load(std::memory_order_acquire) >= target_;  // pairs with the owner's exchange
  }

  Status find_abort() {
    Team* parent = mailboxes_.parent_;
    return aborts_.ask(mailboxes_.number_, [&](uint64_t call) {
      DSCOMM_RETURN_IF_ERROR(mailboxes_.look(call));
      return parent == nullptr ? Status() : parent->look(call);
    });
  }

  Mailboxes& mailboxes_;
  const std::atomic<uint64_t>& word_;
  const uint64_t target_;
  const uint64_t done_of_all_;
  const int member_;
  AbortWatch aborts_;
  unsigned looks_ = 0;
  Overtime overtime_;
};

void Mailboxes::set_up(Arena& arena, uint64_t offset) {
  // Store by store, because members of the group that had these lines before may still look whether
  // it was left. The rendezvous through the store orders all of it before any member's first load.
  auto* mailbox = reinterpret_cast<Mailbox*>(arena.data() + offset);
  mailbox->group_id.store(0, std::memory_order_release);  // pairs with has_left()
  // Pairs with the acquires in has_left(), departure() and unread(): a member that sees any later
  // store also sees that the lines are no longer that group's.
  fence(std::memory_order_release);
  mailbox->closed.store(0, std::memory_order_relaxed);
  mailbox->ending.store(0, std::memory_order_relaxed);
  mailbox->aborted.store(0, std::memory_order_relaxed);
  mailbox->done.store(progress(1, 0), std::memory_order_relaxed);
  mailbox->sleepers.store(0, std::memory_order_relaxed);
  for (LatencyProbe& probe : mailbox->latency_probes)
    probe.written_ns.store(0, std::memory_order_relaxed);
  for (Slot& slot : mailbox->slots) {
    slot.posted.store(0, std::memory_order_relaxed);
    slot.hash.store(0, std::memory_order_relaxed);
  }
  for (CallRecord& call : mailbox->calls) store_record(&call, CallRecord{});
}

void Mailboxes::open(Arena& arena, uint64_t offset, uint64_t group_id) {
  auto* mailbox = reinterpret_cast<Mailbox*>(arena.data() + offset);
  mailbox->group_id.store(group_id, std::memory_order_release);  // pairs with has_left()
}

void Mailboxes::close(Arena& arena, uint64_t offset) {
  auto* mailbox = reinterpret_cast<Mailbox*>(arena.data() + offset);
  mailbox->closed.store(kReadsNoMore, std::memory_order_release);  // pairs with has_left()
}

Mailboxes::Mailboxes(std::shared_ptr<Arena> arena, uint64_t group_id, std::string name, int rank,
                     std::vector<MailboxMember> members, const WaitPolicy& policy)
    : arena_(std::move(arena)),
      group_id_(group_id),
      name_(std::move(name)),
      rank_(rank),
      members_(std::move(members)),
      policy_(policy),
      own_(reinterpret_cast<Mailbox*>(arena_->data() + members_[rank].mailbox_offset)),
      known_done_(members_.size(), progress(1, 0)),
      distance_(static_cast<int>(members_.size())),
      verified_(members_.size(), 0),
      reads_in_place_(members_.size(), 0) {
  for (const MailboxMember& member : members_)
    views_.push_back(reinterpret_cast<const Mailbox*>(
        member.peer->at(member.mailbox_offset, sizeof(Mailbox), kPageBytes)));
  verified_[rank_] = UINT64_MAX;
  known_done_[rank_] = UINT64_MAX;
}

Mailboxes::~Mailboxes() { static_cast<void>(leave()); }

Status Mailboxes::begin(CallRecord& call, const CallOptions& options) {
  if (own_->aborted.load(std::memory_order_acquire) != 0) return failed();  // pairs with abort()
  deadline_ = options.deadline;
  parent_ = options.parent;
  reads_all_ = reads_everyone(static_cast<Collective>(call.kind), call.root == rank_);
  uint64_t last = sequence_;
  uint64_t hash_before =
      last == 0 ? group_id_ : own_slot().hash.load(std::memory_order_relaxed);  // own store
  ++sequence_;
  number_ = options.whole != nullptr ? options.whole->number() : sequence_;
  // Not that of a member that had finished this call: it has published its part.
  DSCOMM_RETURN_IF_ERROR(adopt_abort(number_));
  for (int member = 0; member < size(); ++member) {
    if (last > 0 && verified_[member] < last) DSCOMM_RETURN_IF_ERROR(verify(member, last));
    // The slot was last used K calls ago: everyone must have finished that call.
    if (sequence_ > kSlots) {
      const uint64_t reusable = progress(sequence_ - kSlots + 1, 0);
      DSCOMM_RETURN_IF_ERROR(wait_acknowledged(member, reusable, reusable));
      if (verified_[member] < sequence_ - kSlots)
        DSCOMM_RETURN_IF_ERROR(verify(member, sequence_ - kSlots));
    }
  }
  if (options.whole != nullptr) call = as_sub_call(call, options);
  call.sequence = sequence_;
  Slot& slot = own_slot();
  slot.posted.store(progress(sequence_, 0), std::memory_order_relaxed);  // ordered by the next line
  slot.hash.store(hash_call(hash_before, call),
                  std::memory_order_release);  // pairs with verify()
  store_record(&own_->calls[sequence_ % kSlots], call);
  choose_latency_probe(call);
  return {};
}

// Cut where the slot's first cache line ends: a store to two lines waits for both at once.
void Mailboxes::put_tiny(const void* data, size_t bytes) {
  std::byte* tiny = own_slot().tiny;
  const size_t first = std::min(bytes, kFirstTinyBytes);
  if (first > 0) std::memcpy(tiny, data, first);
  if (bytes > first)
    std::memcpy(tiny + first, static_cast<const std::byte*>(data) + first, bytes - first);
}

void Mailboxes::choose_latency_probe(const CallRecord& call) {
  const bool is_short = sequence_ < kFirstCalls || call.count >= kLargeCount;
  const uint64_t period = is_short ? kShortProbePeriod : kProbePeriod;
  const uint64_t turn = sequence_ / period, place = sequence_ % period;
  writes_probe_ = place == 0 && size() > 1;
  if (writes_probe_) {
    probe_ = mix_hash(0, turn) % kLatencyProbes;
    observed_ = static_cast<int>((static_cast<uint64_t>(rank_) + 1 + turn % (members_.size() - 1)) %
                                 members_.size());
  } else if (place == 1) {
    read_latency_probe(observed_);  // a root had nothing to wait for
  }
}

// Right before what is published, so that whoever sees that can look at a line as fresh.
void Mailboxes::write_latency_probe() {
  if (!writes_probe_) return;
  LatencyProbe& probe = own_->latency_probes[probe_];
  probe.written_ns.store(monotonic_ns(), std::memory_order_relaxed);
}

void Mailboxes::read_latency_probe(int member) {
  if (member < 0 || member != observed_) return;
  const LatencyProbe& probe = views_[member]->latency_probes[probe_];
  const TimedLoad load =
      time_load([&] { return probe.written_ns.load(std::memory_order_relaxed); });
  const int64_t written_ns = load.value, before = load.began_ns;
  // One that was not written since may have lain in this core's cache.
  const bool is_new = written_ns > looked_ns_[probe_];
  looked_ns_[probe_] = before;
  if (!is_new || before - written_ns > kFreshNs) return;
  observed_ = -1;
  distance_.add(member, load.took_ns);
}

void Mailboxes::post(uint32_t phase) {
  write_latency_probe();
  Slot& slot = own_slot();
  // seq_cst: releases the slot and staging to wait_posted(), and is the store half of the Dekker
  // pair with the members' sleepers.
  slot.posted.exchange(progress(sequence_, phase), std::memory_order_seq_cst);
  if (phase == 1) prefetch_next_slot();
  wake_sleepers(slot.posted);
  if (phase == 1) back_off();
}

// Owns the next call's slot ahead, where every member is known to have read what it holds.
void Mailboxes::prefetch_next_slot() {
  const uint64_t next = sequence_ + 1;
  if (next <= kSlots || !have_acknowledged(progress(next - kSlots + 1, 0))) return;
  std::byte* tiny = own_->slots[next % kSlots].tiny;
  prefetch_for_ownership(tiny);
  prefetch_for_ownership(tiny + kFirstTinyBytes);
}

void Mailboxes::acknowledge(uint32_t phase) {
  write_latency_probe();
  own_->done.exchange(progress(sequence_, phase), std::memory_order_seq_cst);  // as in post()
  wake_sleepers(own_->done);
}

Status Mailboxes::end() {
  if (last_in_place_ == sequence_) DSCOMM_RETURN_IF_ERROR(check_sources());
  own_->done.exchange(progress(sequence_ + 1, 0), std::memory_order_seq_cst);  // as in post()
  wake_sleepers(own_->done);
  return {};
}

// After the last read: a member whose tensor was read in place, and whose call failed meanwhile,
// may have let its caller write it. What it had staged stays as it is until this rank is done or
// has left, and so does a slot, which only a later call rewrites; so an abort spoils neither.
Status Mailboxes::check_sources() {
  fence(std::memory_order_acquire);  // orders plain reads before the next load
  for (size_t k = 0; k < views_.size(); ++k) {
    if (reads_in_place_[k] != sequence_) continue;
    if (views_[k]->aborted.load(std::memory_order_acquire) == 0) continue;  // pairs with abort()
    // Its call succeeded, and so after this rank had acknowledged its last read of the tensor.
    if (views_[k]->done.load(std::memory_order_acquire) >= progress(sequence_ + 1, 0))
      continue;  // pairs with end()
    return adopt_abort(kAnyCall);
  }
  return {};
}

void Mailboxes::wake_sleepers(const std::atomic<uint64_t>& word) {
  for (int member = 0; member < size(); ++member) {
    if (member == rank_) continue;
    // The load half of the Dekker pair with wait_slowly().
    if (views_[member]->sleepers.load(std::memory_order_seq_cst) == 0) continue;
    futex_wake_all(word);
    return;
  }
}

Status Mailboxes::wait_word(const std::atomic<uint64_t>& word, uint64_t target, int member,
                            uint64_t done_of_all) {
  MemberWatch watch(*this, word, target, member, done_of_all);
  return wait_at_least(word, target, own_->sleepers, policy_, deadline_, watch);
}

Status Mailboxes::wait_posted(int member, uint32_t phase) {
  DSCOMM_RETURN_IF_ERROR(wait_word(slot(member).posted, progress(sequence_, phase), member));
  read_latency_probe(member);
  if (verified_[member] < sequence_) {
    known_done_[member] = std::max(known_done_[member], progress(sequence_, 0));
    return verify(member, sequence_);
  }
  return {};
}

Status Mailboxes::wait_all_posted(uint32_t phase) {
  for (int member = 0; member < size(); ++member)
    if (member != rank_) DSCOMM_RETURN_IF_ERROR(wait_posted(member, phase));
  return {};
}

Status Mailboxes::wait_acknowledged(int member, uint64_t word, uint64_t word_of_all) {
  if (known_done_[member] >= word) return {};
  DSCOMM_RETURN_IF_ERROR(wait_word(views_[member]->done, word, member, word_of_all));
  read_latency_probe(member);
  known_done_[member] =
      views_[member]->done.load(std::memory_order_acquire);  // pairs with acknowledge(), end()
  return {};
}

Status Mailboxes::ask_until(const std::function<bool()>& is_there, const std::string& what) {
  constexpr std::chrono::microseconds kFirstPause{50}, kLongestPause{2000};
  std::chrono::microseconds pause = kFirstPause;
  TimeLeft time_left(deadline_);
  while (!is_there()) {
    Status cause = look(number_);
    if (cause.ok() && parent_ != nullptr) cause = parent_->look(number_);
    if (!cause.ok()) {
      abort(cause);
      return failed();
    }
    const bool is_expired = time_left.is_over();
    std::string late;
    for (int member = 0; member < size(); ++member) {
      if (member == rank_) continue;
      const Presence presence = this->presence(member);
      // What it published before it went counts: looked at after that.
      if (presence != Presence::kHere && !has_posted(member))
        return fail(presence == Presence::kLeft ? Code::kPeerLeft : Code::kPeerDied,
                    name_member(member) +
                        (presence == Presence::kLeft ? " " + departure(member).how()
                                                     : std::string(" died or exited")) +
                        " before it made this call; look for its own error in its output");
      const uint64_t done =
          views_[member]->done.load(std::memory_order_acquire);  // pairs with end()
      if (is_expired && done < progress(sequence_, 0))
        late += (late.empty() ? "" : ", ") + name_member(member);
    }
    if (is_expired)
      return fail(Code::kTimeout,
                  "timed out after " + deadline_.timeout_text() + " waiting for " + what + "; " +
                      (late.empty() ? "ranks of other groups have not read what was sent to them"
                                    : late + " has not finished the calls before this one") +
                      kRaiseTheTimeout);
    deadline_.nap(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
  return {};
}

bool Mailboxes::has_posted(int member) const {
  return slot(member).posted.load(std::memory_order_acquire) >=
         progress(sequence_, 1);  // pairs with post()
}

bool Mailboxes::have_acknowledged(uint64_t word) const {
  return std::all_of(known_done_.begin(), known_done_.end(),
                     [word](uint64_t done) { return done >= word; });
}

Status Mailboxes::wait_all_acknowledged(uint64_t word) {
  for (int member = 0; member < size(); ++member)
    DSCOMM_RETURN_IF_ERROR(wait_acknowledged(member, word, word));
  return {};
}

// Compares a member's rolling hash of a call with this rank's, if the member has posted that call
// and not yet reused its slot. Does not block.
Status Mailboxes::verify(int member, uint64_t sequence) {
  const Slot& theirs = views_[member]->slots[sequence % kSlots];
  uint64_t posted = theirs.posted.load(std::memory_order_acquire);  // pairs with post()
  if (sequence_of(posted) != sequence || posted == progress(sequence, 0)) return {};
  // Acquire pairs with the release in begin(): a hash of a later call brings that call's posted
  // word.
  uint64_t hash = theirs.hash.load(std::memory_order_acquire);
  if (sequence_of(theirs.posted.load(std::memory_order_relaxed)) != sequence) return {};
  if (hash != own_->slots[sequence % kSlots].hash.load(std::memory_order_relaxed))
    return mismatch(member, sequence);
  verified_[member] = sequence;
  return {};
}

// The hashes of `sequence` differ: finds the first call, as far back as the slots go, in which the
// two ranks differ, and shows both.
Status Mailboxes::mismatch(int member, uint64_t sequence) {
  uint64_t first = sequence > kSlots ? sequence - kSlots + 1 : 1;
  for (uint64_t s = first; s <= sequence; ++s) {
    CallRecord mine = load_record(own_->calls[s % kSlots]);
    CallRecord theirs = load_record(views_[member]->calls[s % kSlots]);
    if (mine.sequence != s || theirs.sequence != s) continue;
    if (hash_call(0, mine) == hash_call(0, theirs)) continue;
    return fail(Code::kMismatch,
                describe_mismatch(mine, name_member(rank_), theirs, name_member(member)));
  }
  return fail(Code::kMismatch,
              "the calls of " + name_member(rank_) + " and " + name_member(member) +
                  " differed more than " + std::to_string(kSlots) +
                  " calls ago; every rank must make the same calls in the same order");
}

// The first cause among the members' abort records, but for those of members that had finished this
// call before; null when there is none.
const AbortRecord* Mailboxes::find_abort(uint64_t call) const {
  const AbortRecord* first = nullptr;
  for (const Mailbox* view : views_) {
    if (view == own_) continue;
    if (view->aborted.load(std::memory_order_acquire) == 0)
      continue;  // pairs with abort(): the record is whole
    if (view->group_id.load(std::memory_order_relaxed) != group_id_) continue;
    if (view->abort.finished >= call) continue;
    if (first == nullptr || view->abort.sequence < first->sequence ||
        (view->abort.sequence == first->sequence && view->abort.rank < first->rank))
      first = &view->abort;
  }
  return first;
}

// Takes it over, if there is one.
Status Mailboxes::adopt_abort(uint64_t call) {
  const AbortRecord* first = find_abort(call);
  if (first == nullptr) return {};
  abort(cause_of(*first));
  return failed();
}

Status Mailboxes::look(uint64_t call) const {
  if (own_->aborted.load(std::memory_order_acquire) != 0) return failed();  // pairs with abort()
  const AbortRecord* first = find_abort(call);
  return first == nullptr ? Status() : cause_of(*first);
}

// A piece of a composed call that has time left, since the one it waits for may wait as well and
// know better who is at fault. But nobody knows better than who sees that a member is stopped.
bool Mailboxes::ends_in_overtime(Overtime& overtime) const {
  if (parent_ == nullptr || !overtime.counts(deadline_)) return false;
  for (int other = 0; other < size(); ++other)
    if (other != rank_ && peer(other).is_stopped()) return true;
  return false;
}

Status Mailboxes::timed_out(int member) {
  // Who is waited for may itself wait for the one at fault. Besides it, name who has not posted
  // this call; or, where all have, who is the last to have read, all of them when they are level.
  std::string missing;
  std::vector<uint64_t> done(views_.size(), UINT64_MAX);
  std::vector<bool> absent(views_.size(), false);
  for (int other = 0; other < size(); ++other) {
    if (other == rank_) continue;
    absent[other] = !has_posted(other);
    done[other] =
        views_[other]->done.load(std::memory_order_acquire);  // pairs with end(), acknowledge()
  }
  const bool any_absent = std::find(absent.begin(), absent.end(), true) != absent.end();
  const uint64_t slowest = *std::min_element(done.begin(), done.end());
  for (int other = 0; other < size(); ++other) {
    if (other == rank_) continue;
    if (other != member && !(any_absent ? absent[other] : done[other] == slowest)) continue;
    const CallRecord last = newest_record(other);
    if (!missing.empty()) missing += "; ";
    missing += name_member(other) + ", " + peer(other).state_text() + ", ";
    missing += last.sequence == 0
                   ? std::string("has made no call")
                   : (last.sequence == sequence_ ? "is in call #" : "last made call #") +
                         std::to_string(last.number()) + ", " + describe_call(last);
  }
  return fail(Code::kTimeout, "timed out after " + deadline_.timeout_text() + " waiting for " +
                                  missing + kRaiseTheTimeout);
}

// Of its last call; an empty one before the first.
CallRecord Mailboxes::newest_record(int member) const {
  CallRecord newest;
  for (const CallRecord& candidate : views_[member]->calls) {
    const CallRecord record = load_record(candidate);
    if (record.sequence > newest.sequence) newest = record;
  }
  return newest;
}

Status Mailboxes::fail(Code code, const std::string& cause) {
  const int group_rank = members_[rank_].group_rank;
  abort(Status(code, cause + " (first seen by rank " +
                         std::to_string(group_rank >= 0 ? group_rank : rank_) + " in " +
                         name_call() + ")"));
  return failed();
}

void Mailboxes::abort(const Status& cause) {
  std::lock_guard lock(failure_mutex_);
  if (!failure_.ok()) return;
  failure_ = cause;
  AbortRecord& record = own_->abort;
  // sequence_ belongs to the thread that runs the group; the posted words say as much.
  record.sequence = 0;
  for (const Slot& slot : own_->slots)
    record.sequence =
        std::max(record.sequence, sequence_of(slot.posted.load(std::memory_order_relaxed)));
  // A call that ends at this moment counts as unfinished, and then its members hear a little
  // sooner.
  record.finished = counts_calls_ != nullptr ? counts_calls_->finished_calls() : finished_calls();
  record.rank = rank_;
  record.code = static_cast<uint32_t>(cause.code());
  size_t length = std::min(cause.message().size(), sizeof record.message - 1);
  std::memcpy(record.message, cause.message().data(), length);
  record.message[length] = '\0';
  // Pairs with find_abort(), begin(), look(). Sequentially consistent, and an exchange, so that
  // nobody sees what this rank's caller writes next into a tensor that members read in place, and
  // not this: check_sources() looks here after the last read. The fence: before Armv8.1 an exchange
  // is a load and a store, and only the load is ordered before the caller's stores.
  own_->aborted.exchange(1, std::memory_order_seq_cst);
  fence(std::memory_order_seq_cst);
  // Members may sleep on any of this rank's words; the slot in use is not known to this thread.
  for (const Slot& slot : own_->slots) futex_wake_all(slot.posted);
  futex_wake_all(own_->done);
}

uint64_t Mailboxes::finished_calls() const {
  return sequence_of(own_->done.load(std::memory_order_relaxed)) - 1;  // orders nothing
}

Status Mailboxes::failed() const {
  std::lock_guard lock(failure_mutex_);
  return failure_;
}

Status Mailboxes::failure() {
  if (own_->aborted.load(std::memory_order_acquire) != 0) return failed();  // pairs with abort()
  return adopt_abort(kAnyCall);
}

// In this order: a rank leaves before its process ends, and may do both between the two looks. The
// first acquires what came before the end.
Mailboxes::Presence Mailboxes::presence(int member, bool thoroughly) const {
  const bool is_alive = peer(member).alive(thoroughly);
  if (has_left(member)) return Presence::kLeft;
  return is_alive ? Presence::kHere : Presence::kDied;
}

Status Mailboxes::death() const {
  for (int member = 0; member < size(); ++member)
    if (member != rank_ && presence(member) == Presence::kDied)
      return Status(
          Code::kPeerDied,
          name_member(member) + " died or exited without leaving the group" + kSeeItsError);
  return {};
}

void Mailboxes::note_call(const CallRecord& call, bool reads_all) {
  CallRecord record = call;
  record.whole = call.number();
  record.sequence += sequence_;  // newer than the calls made through this object
  store_record(&own_->calls[record.sequence % kSlots], record);
  noted_.store(reads_all ? record.sequence : 0, std::memory_order_relaxed);  // orders nothing
}

Status Mailboxes::absence() const {
  const uint64_t noted = noted_.load(std::memory_order_relaxed);
  for (int member = 0; noted > 0 && member < size(); ++member) {
    if (member == rank_) continue;
    // In this order: what it noted before it went counts.
    const Presence presence = this->presence(member);
    if (presence == Presence::kHere || newest_record(member).sequence >= noted) continue;
    // Somebody may have recorded why.
    if (const AbortRecord* record = find_abort(kAnyCall)) return cause_of(*record);
    if (presence == Presence::kDied)
      return Status(Code::kPeerDied, name_member(member) +
                                         " died or exited, without leaving the group, before it "
                                         "made this call" +
                                         kSeeItsError);
    const Departure departure = this->departure(member);
    return Status(Code::kPeerLeft, name_member(member) + " " + departure.how() +
                                       " before it made this call; " + departure.advice());
  }
  return {};
}

Status Mailboxes::leave() {
  if (has_left_) return {};
  has_left_ = true;
  // Dekker, with the loads in compare_last_calls(): of two ranks that leave at once, one sees that
  // the other makes no more calls.
  own_->closed.exchange(kCallsNoMore, std::memory_order_seq_cst);
  Status disagreement = compare_last_calls();
  own_->closed.store(kReadsNoMore, std::memory_order_release);  // pairs with has_left(), unread()
  for (const Slot& slot : own_->slots) futex_wake_all(slot.posted);
  futex_wake_all(own_->done);
  return disagreement;
}

// Compares what nobody has waited for: the hashes of members that have posted the same calls, and
// how many calls those have made that make no more, as they left or their process ended in order. A
// member that is still in the group may be some calls behind, or ahead, and compares when it
// leaves. One that died says nothing about the program.
Status Mailboxes::compare_last_calls() {
  const auto has_ended = [this] {                                 // told already
    return own_->aborted.load(std::memory_order_acquire) != 0 ||  // pairs with abort()
           find_abort(kAnyCall) != nullptr;
  };
  const CallRecord mine = newest_record(rank_);
  for (int member = 0; member < size(); ++member) {
    if (member == rank_) continue;
    // Before the calls are counted: they grow no more then.
    const bool is_done =
        views_[member]->closed.load(std::memory_order_seq_cst) != 0 ||  // see leave()
        presence(member, true) == Presence::kLeft;
    if (has_ended()) return {};
    for (uint64_t s = sequence_; s > verified_[member] && s + kSlots > sequence_; --s)
      DSCOMM_RETURN_IF_ERROR(verify(member, s));
    const CallRecord theirs = newest_record(member);
    if (!is_done || theirs.sequence == mine.sequence) continue;
    const auto count = [this](int rank, const CallRecord& last) {
      const uint64_t calls = last.number();
      if (last.sequence <= forming_calls_) return name_member(rank) + " made no call";
      return name_member(rank) + " made " + std::to_string(calls) +
             (calls == 1 ? " call" : " calls") + ", the last " + describe_call(last);
    };
    const Departure departure = this->departure(member);
    abort(Status(Code::kMismatch,
                 "the ranks left after different calls: " + count(rank_, mine) + ", " +
                     count(member, theirs) +
                     (departure.exception ? " and " + departure.how() : std::string()) + "; " +
                     departure.advice() + " (first seen by " + name_member(rank_) +
                     " as it left group '" + name_ + "')"));
    return failed();
  }
  return {};
}

void Mailboxes::note_end(const std::string& exception) {
  std::lock_guard lock(failure_mutex_);
  if (own_->ending.load(std::memory_order_relaxed) != 0) return;  // stored under the mutex alone
  const size_t length = std::min(exception.size(), sizeof own_->exception - 1);
  std::memcpy(own_->exception, exception.data(), length);
  own_->exception[length] = '\0';
  own_->ending.store(1, std::memory_order_release);  // pairs with has_left(), departure()
}

bool Mailboxes::has_left(int member) const {
  const Mailbox& view = *views_[member];
  // Acquire pairs with leave(), and with open() when the lines have been reused since.
  return view.closed.load(std::memory_order_acquire) != 0 ||
         view.group_id.load(std::memory_order_acquire) != group_id_ ||
         (view.ending.load(std::memory_order_acquire) != 0 && !peer(member).alive());
}

Departure Mailboxes::departure(int member) const {
  const Mailbox& view = *views_[member];
  if (view.ending.load(std::memory_order_acquire) == 0) return {};  // pairs with note_end()
  std::string exception(view.exception, strnlen(view.exception, sizeof view.exception));
  // A mailbox that was reused meanwhile is of another group.
  fence(std::memory_order_acquire);  // orders the copy before the next load
  if (view.group_id.load(std::memory_order_relaxed) != group_id_) return {};
  return {.exception = std::move(exception)};
}

bool Mailboxes::unread(uint64_t group_id, int rank, const std::vector<MailboxMember>& members,
                       uint64_t done_word) {
  for (size_t k = 0; k < members.size(); ++k) {
    if (static_cast<int>(k) == rank || !members[k].peer->alive()) continue;
    auto* view = reinterpret_cast<const Mailbox*>(
        members[k].peer->at(members[k].mailbox_offset, sizeof(Mailbox), kPageBytes));
    // Acquire pairs with leave() and open(), as in has_left(), and with end(). The group's id is
    // looked at last: lines that were reused meanwhile have another one, whatever the rest said.
    if (view->closed.load(std::memory_order_acquire) != kReadsNoMore &&
        view->done.load(std::memory_order_acquire) < done_word &&
        view->group_id.load(std::memory_order_acquire) == group_id)
      return false;
  }
  return true;
}

std::function<bool()> Mailboxes::unread_later(uint64_t done_word) const {
  return [group_id = group_id_, rank = rank_, members = members_, done_word] {
    return unread(group_id, rank, members, done_word);
  };
}

std::string Mailboxes::name_member(int member) const {
  const MailboxMember& m = members_[member];
  return MailboxMember::name(m.group_rank >= 0 ? m.group_rank : member, m.global_rank,
                             m.peer->describe());
}

std::string MailboxMember::name(int rank, int global_rank, const std::string& process) {
  std::string text = "rank " + std::to_string(rank) + " (";
  if (global_rank >= 0 && global_rank != rank)
    text += "global rank " + std::to_string(global_rank) + ", ";
  return text + process + ")";
}

std::string Mailboxes::name_call() const {
  CallRecord record = load_record(own_->calls[sequence_ % kSlots]);
  if (record.sequence != sequence_)
    return "call #" + std::to_string(sequence_) + " of group '" + name_ + "'";
  return std::string(collective_name(static_cast<Collective>(record.kind))) + " #" +
         std::to_string(record.number()) + " of group '" + name_ + "'";
}

}  // namespace dscomm
