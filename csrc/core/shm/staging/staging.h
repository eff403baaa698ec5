// Staging: one rank's staging memory in a group, for data that does not fit into a slot.
//
// A slab is a table of counts and a ring of bytes. A call takes the next range of the ring and cuts
// it into buffers of one size, one per round or as many as fit, and uses these in turn. A byte is
// rewritten only after all readers of its old value have acknowledged the round (within a call) or
// finished the call (between calls). Calls walk through the whole ring because writing a cache line
// that a peer has read is expensive: the peer's copy must be invalidated first. When a line's turn
// comes again, it has left the peer's cache. Small calls, and larger ones if the readers run on the
// writer's core, use only a part of the ring, which stays in the writer's cache.
//
// The first call that needs a slab takes it from the arena. A group keeps it between calls while
// the groups of the process together hold little memory. Beyond that, a call borrows a slab for its
// data alone and returns it once its readers are done, so that thousands of groups share the memory
// of the calls in flight. If the arena is full of unread data, a call waits for the readers.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <span>

#include "core/shm/mailbox/mailboxes.h"
#include "core/team/chunk.h"

namespace dscomm {

// A call of many rounds has at least this many buffers: an input and a result for each of two
// chunks, one being staged and one being reduced.
inline constexpr uint32_t kLeastBuffers = 4;

// Rounds in which `bytes` go through buffers of `buffer_bytes`; at least 1, as every rank posts.
inline uint32_t rounds_of(size_t bytes, size_t buffer_bytes) {
  return static_cast<uint32_t>(bytes == 0 ? 1 : (bytes + buffer_bytes - 1) / buffer_bytes);
}
// The bytes of round r.
inline size_t round_bytes(size_t bytes, size_t buffer_bytes, uint32_t round) {
  return in_chunk(bytes, size_t{round} * buffer_bytes, buffer_bytes);
}

class Staging {
 public:
  // ring_bytes is at least kLeastBuffers times the buffer_bytes of any call.
  Staging(std::shared_ptr<Arena> arena, Mailboxes& mailboxes, size_t ring_bytes)
      : arena_(std::move(arena)), mailboxes_(mailboxes), ring_bytes_(ring_bytes) {}
  ~Staging();  // releases the slab once all readers are done

  // The data that a call publishes.
  struct Publication {
    uint64_t bytes;       // in all
    size_t buffer_bytes;  // of the longest round
    uint32_t rounds;
    size_t piece_bytes = 0;               // of each rank's piece of a round; 0: no pieces
    int reader = -1;                      // the only reader; -1: every member
    std::optional<uint64_t> tensor = {};  // offset in the pool if read in place
    uint32_t in_place = kEverything;      // parts read from the tensor, not the buffers
    // If not empty, a table for the readers: the number of elements of each rank's block. A reader
    // then acknowledges the rounds of its own block, which have piece_count elements each.
    std::span<const size_t> table = {};
    size_t piece_count = 0;
  };
  // Starts a call: publishes in this rank's slot where its data lies. Call between
  // Mailboxes::begin() and post(). The data and the table must stay until end().
  Status open(const Publication& call) {
    call_ = call;  // inline, so that the compiler makes no second copy
    return open();
  }

  // The buffer of a round, after waiting for the readers of its old data.
  Result<std::byte*> fill(uint32_t round);
  // Returns `bytes` bytes of a member's data, of a round that the member has posted. They begin at
  // in_buffer in the round's buffer or, if this `part` (kInput or kResult) is read in place, at
  // in_tensor in the member's tensor. Fails the group if they lie outside the member's memory.
  Result<const std::byte*> read(int member, uint32_t round, size_t in_buffer, size_t in_tensor,
                                size_t bytes, uint32_t part = kInput) const;
  // Like read(), for this rank's piece of a round, or the start of the buffer if it has no pieces.
  Result<const std::byte*> read_piece(int member, uint32_t round, size_t in_tensor,
                                      size_t bytes) const;

  // Prefetches for ownership the buffers of the next call, as if it staged as much as this call.
  // Call it after post().
  void prefetch_next_range();

  // A member's table, see Publication.
  Result<std::span<const uint64_t>> read_table(int member) const;

  // Ends the call, even if it staged nothing. If members read a tensor in place, returns only when
  // they no longer read it: the caller may write or free the tensor afterwards.
  Status end() {
    if (opened_ == mailboxes_.sequence()) DSCOMM_RETURN_IF_ERROR(close());
    return mailboxes_.end();
  }

 private:
  bool has_buffers() const { return !call_.tensor || call_.in_place != kEverything; }
  Status open();
  Status open_buffers(StagedData& staged);
  Status close();

  // The part of the ring that a call has taken.
  struct RingRange {
    uint64_t sequence = 0;  // of the call; 0: none
    size_t begin = 0, end = 0;
  };

  // Where in the ring a call of this length begins.
  size_t next_begin(size_t length) const;
  // Takes a slab whose ring has at least needed_bytes.
  Status take_slab(size_t needed_bytes);
  Status borrow_slab(size_t needed_bytes);
  void give_back_slab(std::function<bool()> is_unread, std::optional<Arena::Borrower> call = {});
  Arena::Borrower this_call() const {
    return {mailboxes_.members().group_id, mailboxes_.sequence()};
  }
  size_t table_bytes() const;
  size_t slab_bytes() const { return table_bytes() + slab_ring_bytes_; }
  std::byte* ring() const { return data_ + table_bytes(); }
  uint64_t free_after(size_t begin, size_t end) const;

  std::shared_ptr<Arena> arena_;
  Mailboxes& mailboxes_;
  const size_t ring_bytes_;
  uint64_t slab_offset_ = 0;  // 0: none (offset 0 is the arena's header)
  std::byte* data_ = nullptr;
  size_t slab_ring_bytes_ = 0;        // ring_bytes_, or less in a borrowed slab
  bool is_borrowed_ = false;          // for this call alone
  RingRange range_;                   // of the call in progress
  size_t next_ = 0, next_small_ = 0;  // where the next call's range begins, if it fits
  Publication call_ = {};
  uint64_t opened_ = 0;  // sequence of call_
  size_t buffer_bytes_ = 0;
  uint32_t buffers_ = 0;
  // The ranges of the last calls, by sequence. Readers are done with older calls, because
  // Mailboxes::begin() waits for that.
  std::array<RingRange, kSlots> earlier_;
  uint64_t table_free_after_ = 0;  // done word to reach before the table is rewritten
};

}  // namespace dscomm
