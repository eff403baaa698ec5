#include "core/shm/mailbox/members.h"

#include <array>
#include <bit>
#include <cstring>

#include "core/base/fence.h"
#include "core/base/format.h"

namespace dscomm {
namespace {

constexpr size_t kRecordWords = sizeof(CallRecord) / sizeof(uint64_t);

}  // namespace

// The sequence is 0 during the copy, and is stored last. Release pairs with the acquires in
// load_record(): a reader that sees a word of the new record also sees that the old one is gone.
void store_record(CallRecord* to, const CallRecord& from) {
  auto words = std::bit_cast<std::array<uint64_t, kRecordWords>>(from);
  auto* out = reinterpret_cast<uint64_t*>(to);
  std::atomic_ref<uint64_t>(out[0]).store(0, std::memory_order_relaxed);  // ordered by the next
  for (size_t i = 1; i < kRecordWords; ++i)
    std::atomic_ref<uint64_t>(out[i]).store(words[i], std::memory_order_release);
  std::atomic_ref<uint64_t>(out[0]).store(words[0], std::memory_order_release);
}

CallRecord load_record(const CallRecord& from) {
  std::array<uint64_t, kRecordWords> words;
  auto* in = reinterpret_cast<uint64_t*>(const_cast<CallRecord*>(&from));  // loads only
  for (size_t i = 0; i < kRecordWords; ++i)
    words[i] = std::atomic_ref<uint64_t>(in[i]).load(
        std::memory_order_acquire);  // pairs with store_record()
  if (std::atomic_ref<uint64_t>(in[0]).load(std::memory_order_relaxed) != words[0]) return {};
  return std::bit_cast<CallRecord>(words);
}

void set_up_mailbox(Arena& arena, uint64_t offset) {
  // Stores word by word, because members of the group that used this mailbox before may still load
  // its words in has_left(). The rendezvous through the store orders all these stores before the
  // first load of any member of the new group.
  auto* mailbox = reinterpret_cast<Mailbox*>(arena.data() + offset);
  mailbox->group_id.store(0, std::memory_order_release);  // pairs with has_left()
  // Pairs with the acquires in has_left(), departure() and unread_later(): a member that sees any
  // later store also sees that the mailbox no longer belongs to the previous group.
  fence(std::memory_order_release);
  mailbox->closed.store(0, std::memory_order_relaxed);
  mailbox->ending.store(0, std::memory_order_relaxed);
  mailbox->aborted.store(0, std::memory_order_relaxed);
  mailbox->done.store(phase_word(1, 0), std::memory_order_relaxed);
  mailbox->sleepers.store(0, std::memory_order_relaxed);
  for (LatencyProbe& probe : mailbox->latency_probes)
    probe.written_ns.store(0, std::memory_order_relaxed);
  for (Slot& slot : mailbox->slots) {
    slot.posted.store(0, std::memory_order_relaxed);
    slot.hash.store(0, std::memory_order_relaxed);
  }
  for (CallRecord& call : mailbox->calls) store_record(&call, CallRecord{});
}

void open_mailbox(Arena& arena, uint64_t offset, uint64_t group_id) {
  auto* mailbox = reinterpret_cast<Mailbox*>(arena.data() + offset);
  mailbox->group_id.store(group_id, std::memory_order_release);  // pairs with has_left()
}

void close_mailbox(Arena& arena, uint64_t offset) {
  auto* mailbox = reinterpret_cast<Mailbox*>(arena.data() + offset);
  mailbox->closed.store(kReadsEnded, std::memory_order_release);  // pairs with has_left()
}

std::vector<const Mailbox*> Members::find_mailboxes() const {
  std::vector<const Mailbox*> found;
  for (const MailboxMember& member : entries)
    found.push_back(reinterpret_cast<const Mailbox*>(
        member.peer->at(member.mailbox_offset, sizeof(Mailbox), kPageBytes)));
  return found;
}

CallRecord Members::newest_record(int member) const {
  CallRecord newest;
  for (const CallRecord& candidate : views[member]->calls) {
    const CallRecord record = load_record(candidate);
    if (record.sequence > newest.sequence) newest = record;
  }
  return newest;
}

bool Members::has_left(int member) const {
  const Mailbox& view = *views[member];
  // Acquire pairs with leave(), and with open_mailbox() when the mailbox has been reused since.
  return view.closed.load(std::memory_order_acquire) != 0 ||
         view.group_id.load(std::memory_order_acquire) != group_id ||
         (view.ending.load(std::memory_order_acquire) != 0 && !entries[member].peer->alive());
}

Departure Members::departure(int member) const {
  const Mailbox& view = *views[member];
  if (view.ending.load(std::memory_order_acquire) == 0) return {};  // pairs with note_end()
  std::string exception(view.exception, strnlen(view.exception, sizeof view.exception));
  // If the mailbox was reused during the copy, the text may be of another group.
  fence(std::memory_order_acquire);  // orders the copy before the next load
  if (view.group_id.load(std::memory_order_relaxed) != group_id) return {};
  return {.exception = std::move(exception)};
}

// Checks the process first, because a rank leaves before its process ends, and may do both between
// the two checks. alive() acquires all stores before the end.
MemberState Members::member_state(int member, bool thoroughly) const {
  const bool is_alive = entries[member].peer->alive(thoroughly);
  if (has_left(member)) return MemberState::kLeft;
  return is_alive ? MemberState::kPresent : MemberState::kDied;
}

Status Members::gone(int member, MemberState member_state, const std::string& died,
                     const std::string& left) const {
  if (member_state == MemberState::kDied)
    return make_status(Code::kPeerDied, "{} died or exited{}{}", name(member), died, kDeathAdvice);
  const Departure departure = this->departure(member);
  return make_status(Code::kPeerLeft, "{} {}{}; {}", name(member), departure.how(), left,
                     departure.advice());
}

Status Members::death() const {
  for (int member = 0; member < size(); ++member)
    if (member != rank && member_state(member) == MemberState::kDied)
      return gone(member, MemberState::kDied, " without leaving the group", "");
  return {};
}

void Members::note_end(const std::string& exception) {
  std::lock_guard lock(end_mutex);
  if (own->ending.load(std::memory_order_relaxed) != 0) return;  // stored under the mutex alone
  const size_t length = exception.copy(own->exception, sizeof own->exception - 1);
  own->exception[length] = '\0';
  own->ending.store(1, std::memory_order_release);  // pairs with has_left(), departure()
}

std::function<bool()> Members::unread_later(uint64_t done_word) const {
  return [group_id = group_id, rank = rank, entries = entries, done_word] {
    for (size_t k = 0; k < entries.size(); ++k) {
      if (static_cast<int>(k) == rank || !entries[k].peer->alive()) continue;
      auto* view = reinterpret_cast<const Mailbox*>(
          entries[k].peer->at(entries[k].mailbox_offset, sizeof(Mailbox), kPageBytes));
      // Acquire pairs with leave() and open_mailbox(), as in has_left(), and with end(). The
      // group's id is loaded last: if it differs, the mailbox was reused, and the words before it
      // are of another group.
      if (view->closed.load(std::memory_order_acquire) != kReadsEnded &&
          view->done.load(std::memory_order_acquire) < done_word &&
          view->group_id.load(std::memory_order_acquire) == group_id)
        return false;
    }
    return true;
  };
}

std::string Members::name(int member) const {
  const MailboxMember& entry = entries[member];
  return MailboxMember::name(entry.group_rank >= 0 ? entry.group_rank : member, entry.global_rank,
                             entry.peer->describe());
}

std::string MailboxMember::name(int rank, int global_rank, const std::string& process) {
  if (global_rank < 0 || global_rank == rank) return format_text("rank {} ({})", rank, process);
  return format_text("rank {} (global rank {}, {})", rank, global_rank, process);
}

std::string Members::name_call() const {
  const CallRecord record = load_record(own->calls[sequence % kSlots]);
  const bool is_stored = record.sequence == sequence;
  return format_text("{} #{} of group '{}'",
                     is_stored ? collective_name(static_cast<Collective>(record.kind)) : "call",
                     is_stored ? record.number() : sequence, group_name);
}

}  // namespace dscomm
