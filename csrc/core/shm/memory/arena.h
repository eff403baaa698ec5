// Arena: the memory of one rank that its peers read.
//
// Sealed memory: peers cannot write it. The arena takes memory from the kernel when it first hands
// it out, and reuses it, but never returns it while the process lives. A page that was once a
// mailbox (Mailbox) stays one, because members of an ended group may still read its words.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/base/status.h"
#include "core/shm/mailbox/layout.h"
#include "core/shm/memory/block_space.h"

namespace dscomm {

class Topology;

class Arena {
 public:
  // arena_bytes is address space; RLIMIT_AS and RLIMIT_FSIZE may reduce it. With a topology, the
  // memory is placed on the NUMA node that this process is bound to, if any.
  static Result<std::shared_ptr<Arena>> create(size_t arena_bytes,
                                               const Topology* topology = nullptr);

  int fd() const { return space_.memory().fd(); }
  ArenaId id() const { return header().id; }
  std::byte* data() const { return space_.memory().data(); }
  size_t size() const { return space_.memory().size(); }
  ArenaHeader& header() const { return *reinterpret_cast<ArenaHeader*>(space_.memory().data()); }

  // The offset of `bytes` bytes (rounded up to pages), zeroed or reused. kResource if the arena is
  // full or a limit forbids more memory. Thread-safe.
  Result<uint64_t> allocate(size_t bytes);
  // The offset of a page for a group's mailbox.
  Result<uint64_t> allocate_mailbox();
  // The offset of memory that a call borrows, and returns through release_when() as soon as the
  // call and its readers are done. An eighth of the arena is never lent. A caller that was refused
  // may queue with a Ticket: while Tickets exist, only the oldest one gets memory.
  class Ticket;
  struct Borrower {
    uint64_t group_id = 0;
    uint64_t sequence = 0;  // of the call
  };
  Result<uint64_t> lend(size_t bytes, const Borrower& borrower, const Ticket* ticket = nullptr);
  // Whether a later lend() may succeed: memory is lent, or waits for its readers, or an older
  // Ticket exists. Ignores memory that another rank of this process has for the same or a later
  // call of a group with a Ticket, because that memory comes back only after the rank with the
  // Ticket has made its call.
  bool may_lend_later(const Ticket& ticket) const;

  // Returns memory that no peer reads any more. Thread-safe.
  void release(uint64_t offset, size_t bytes);
  // Returns memory that peers may still read: releases it once is_free(), polled now and then under
  // the arena's lock, is true. `borrower` is the call that borrowed the memory, if it was lent.
  // Thread-safe.
  void release_when(std::function<bool()> is_free, std::vector<std::pair<uint64_t, size_t>> pieces,
                    std::optional<Borrower> borrower = {});

  // Locks the life mutex. The calling thread must live as long as the process, or call end_life().
  void begin_life();
  // Unlocks the life mutex, and drops pending releases: their predicates hold Peers, which may hold
  // this arena.
  void end_life();

  // In a forked child: closes the inherited descriptor. No other call works there.
  void close_descriptors() { space_.memory().close_descriptor(); }

  // Bytes that are handed out.
  size_t used_bytes() const;

 private:
  Arena() = default;
  Result<uint64_t> allocate_locked(size_t bytes);
  Status full_locked() const;
  void sweep_locked(size_t most);
  void release_locked(uint64_t offset, size_t bytes);

  struct Pending {
    std::function<bool()> is_free;
    std::vector<std::pair<uint64_t, size_t>> pieces;
    std::optional<Borrower> borrower;
  };

  BlockSpace space_;
  mutable std::mutex mutex_;
  size_t used_ = 0;                         // bytes handed out, including those in pending_
  std::map<uint64_t, Borrower> lent_;       // by offset: lent and not yet returned
  std::unordered_set<uint64_t> mailboxes_;  // every page that was ever a mailbox
  std::vector<uint64_t> vacant_mailboxes_;  // those of mailboxes_ that are free
  std::map<uint64_t, Borrower> tickets_;    // waiting for lent memory, oldest first
  uint64_t next_ticket_ = 1;
  std::vector<Pending> pending_;
  size_t next_pending_ = 0;  // index that the next sweep begins at
  bool ended_ = false;       // after end_life(): nothing is released any more
};

// A place in the queue for lent memory, from construction to destruction. The oldest Ticket is
// served first: ranks that make the same calls in the same order then hold memory for the same
// calls, so that no two of them each hold memory that the other needs.
class Arena::Ticket {
 public:
  Ticket(Arena& arena, const Borrower& borrower);
  ~Ticket();
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;

 private:
  friend class Arena;
  Arena& arena_;
  uint64_t number_;
};

}  // namespace dscomm
