// Members: the members of a ShmTeam as this rank sees them: which are present, have left or have
// died (see Peer), and the newest call of each.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/shm/mailbox/layout.h"
#include "core/shm/memory/arena.h"
#include "core/shm/memory/peer.h"
#include "core/team/call_record.h"
#include "core/team/departure.h"

namespace dscomm {

struct MailboxMember {
  std::shared_ptr<Peer> peer;
  uint64_t mailbox_offset = 0;
  int global_rank = -1;  // for errors; -1 when it is not known
  int group_rank =
      -1;  // for errors, if only some of a group's ranks have mailboxes here; -1: index in entries

  // "rank 2 (global rank 5, pid 7 on host a)"
  static std::string name(int rank, int global_rank, const std::string& process);
};

// Resets the mailbox at `offset` of this rank's arena. Call it before the offset is published.
void set_up_mailbox(Arena& arena, uint64_t offset);
// Writes the group's id into the mailbox. Call it before any member can wait for this rank.
void open_mailbox(Arena& arena, uint64_t offset, uint64_t group_id);
// For a rank that gives up before it has Mailboxes: members that did not give up see that it left.
void close_mailbox(Arena& arena, uint64_t offset);

// A copy of a call's record word by word, because a reader may race with the owner's next call.
void store_record(CallRecord* to, const CallRecord& from);
// An empty record (sequence 0) if its owner was rewriting it.
CallRecord load_record(const CallRecord& from);

enum class MemberState { kPresent, kLeft, kDied };

struct Members {
  int size() const { return static_cast<int>(entries.size()); }
  // The slot of the call in progress.
  const Slot& slot(int member) const { return views[member]->slots[sequence % kSlots]; }
  // Whether a member has published anything in the call in progress.
  bool has_posted(int member) const {
    return slot(member).posted.load(std::memory_order_acquire) >=
           phase_word(sequence, 1);  // pairs with post()
  }
  // The record of a member's last call; empty before the first call.
  CallRecord newest_record(int member) const;

  // Whether a member has left, or its process has ended in order. Thread-safe.
  bool has_left(int member) const;
  // How a member that has left did so.
  Departure departure(int member) const;
  // `thoroughly`: see Peer::alive().
  MemberState member_state(int member, bool thoroughly = false) const;
  // The error for a member that is gone; `died` or `left` is inserted, and says when.
  Status gone(int member, MemberState member_state, const std::string& died,
              const std::string& left) const;
  // See Team.
  Status death() const;
  // See Team.
  void note_end(const std::string& exception);
  // Returns a function, which may outlive this object: whether every other member has left, died or
  // reached `done_word`. None of them then reads what this rank published in the calls before.
  std::function<bool()> unread_later(uint64_t done_word = UINT64_MAX) const;

  // "rank 2 (pid 7 on host a)"
  std::string name(int member) const;
  // "all_reduce #5 of group 'world'", the call in progress.
  std::string name_call() const;

  std::vector<const Mailbox*> find_mailboxes() const;

  const std::shared_ptr<Arena> arena;
  const uint64_t group_id;
  const std::string group_name;
  const int rank;
  const std::vector<MailboxMember> entries;
  Mailbox* const own = reinterpret_cast<Mailbox*>(arena->data() + entries[rank].mailbox_offset);
  const std::vector<const Mailbox*> views = find_mailboxes();
  uint64_t sequence = 0;      // of the call in progress, else of the last call
  std::mutex end_mutex = {};  // of note_end()
};

}  // namespace dscomm
