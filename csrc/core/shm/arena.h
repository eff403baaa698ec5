// Arena: the memory of one rank that its peers read.
//
// Sealed, so that peers cannot write it. Memory is taken from the kernel as it is handed out, and
// is reused but never given back while the process lives. A page that once held lines holds lines
// for ever: members of a group that is gone may still look at its words.
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
#include "core/shm/block_space.h"
#include "core/shm/layout.h"

namespace dscomm {

class Topology;

class Arena {
 public:
  // arena_bytes is address space; RLIMIT_AS and RLIMIT_FSIZE may make it smaller. With a topology,
  // its memory is asked of the NUMA node to which this process is bound, where there is one.
  static Result<std::shared_ptr<Arena>> create(size_t arena_bytes,
                                               const Topology* topology = nullptr);
  ~Arena();

  int fd() const { return space_.memory().fd(); }
  ArenaId id() const { return header().id; }
  std::byte* data() const { return space_.memory().data(); }
  size_t size() const { return space_.memory().size(); }
  ArenaHeader& header() const { return *reinterpret_cast<ArenaHeader*>(space_.memory().data()); }

  // Bytes (rounded up to pages) of zeroed or reused memory, as an offset. kResource when the arena
  // is full or a limit cannot hold it. Any thread.
  Result<uint64_t> allocate(size_t bytes);
  // The same for the lines of a group, which keep their page.
  Result<uint64_t> allocate_lines();
  // The same for what comes back through release_when(), with `is_lent`, as soon as the call that
  // takes it and its readers are done. A part of the arena is kept from it, for what stays. Whoever
  // was refused may wait for a turn: until then nobody without one gets any.
  class Turn;
  struct Borrower {
    uint64_t group_id = 0;
    uint64_t sequence = 0;  // of the call
  };
  Result<uint64_t> lend(size_t bytes, const Borrower& borrower, const Turn* turn = nullptr);
  // Whether a later lend() may succeed: memory is lent, or waits until its readers are done, or
  // another turn comes first. Not what the call of a rank that waits for a turn, or a later call of
  // its group, has on another rank of this process: it comes back when that rank has made the call.
  bool expects_memory(const Turn& turn) const;

  // Gives memory back for reuse. No peer may read it any more.
  void release(uint64_t offset, size_t bytes);
  // Memory that peers may still read: `is_free` is asked now and then and the memory is released
  // once it says yes. With the call whose readers are to be done, where it is that of one.
  void release_when(std::function<bool()> is_free, std::vector<std::pair<uint64_t, size_t>> pieces,
                    std::optional<Borrower> borrower = {});

  // Holds the life mutex on the calling thread; a thread that calls it must live as long as the
  // process (or call end_life before it ends).
  void begin_life();
  // Also drops what waits to be released: its questions hold peers, which may hold this arena.
  void end_life();

  // In a forked child: closes what it inherited. Nothing else works on this object there.
  void close_descriptors() { space_.memory().close_descriptor(); }

  // Bytes taken from the kernel so far, and those of them that are handed out.
  size_t resident_bytes() const;
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
  size_t used_ = 0;                     // bytes handed out, those that wait in pending_ included
  std::map<uint64_t, Borrower> lent_;   // what lend() gave and did not come back, by offset
  std::unordered_set<uint64_t> lines_;  // every page that ever held lines
  std::vector<uint64_t> vacant_lines_;  // those of them that hold none
  std::map<uint64_t, Borrower> turns_;  // those that wait for lent memory, oldest first
  uint64_t next_turn_ = 1;
  std::vector<Pending> pending_;
  size_t next_pending_ = 0;  // which of them is asked next
  bool ended_ = false;       // its life has: nothing is released any more
};

// A place in the line of those who wait for lent memory, from its making to its end. Memory goes to
// the oldest: ranks that make the same calls in the same order then hold memory for the same ones,
// and do not each hold what the other's calls need.
class Arena::Turn {
 public:
  Turn(Arena& arena, const Borrower& borrower);
  ~Turn();
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  friend class Arena;
  Arena& arena_;
  uint64_t number_;
};

}  // namespace dscomm
