// Stage: one rank's staging memory in a group, for data that does not fit into a slot.
//
// A slab is a table of counts and a ring of bytes. A call takes the next piece of the ring and cuts
// it into buffers of one size, one per round or as many as fit, and uses these in turn. A byte is
// rewritten only after all readers of its old value have acknowledged: by phases within a call, by
// their done words from call to call. Calls walk through the whole ring because writing a cache
// line that a peer has read is expensive: the peer's copy must be invalidated first. When a line's
// turn comes again, it has left the peer's cache. Small calls stay in the ring's first pages, which
// stay in the writer's cache, as do larger calls if the readers share that cache.
//
// The first call that needs a slab takes it from the arena. A group keeps it between calls while
// all groups together hold little. Beyond that, a call borrows a slab of the size that it stages,
// and returns it once its readers are done, so that thousands of groups share the memory of the
// calls in flight. If the arena is full of data that is still unread, a call waits for the readers.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>

#include "core/shm/mailbox/mailboxes.h"

namespace dscomm {

// A call of many rounds has at least as many buffers: an input and a result for each of two chunks,
// one being staged and one being reduced.
inline constexpr uint32_t kLeastBuffers = 4;

class Stage {
 public:
  // ring_bytes is at least kLeastBuffers times the buffer_bytes of any call.
  Stage(std::shared_ptr<Arena> arena, Mailboxes& mailboxes, size_t ring_bytes);
  ~Stage();  // releases the slab once all readers are done

  // Starts a call of `rounds` rounds of up to buffer_bytes each; publishes in this rank's slot
  // where its staging lies, and that it has `bytes` in all. Call between Mailboxes::begin() and
  // post().
  Status open(uint64_t bytes, size_t buffer_bytes, uint32_t rounds);

  // The same for rounds that hold one piece of up to piece_bytes for each rank.
  Status open_pieces(uint64_t bytes, size_t piece_bytes, uint32_t rounds);
  // The same for a call that stages no data, and for one that stages only the table.
  void open_nothing() { mailboxes_.own_slot().stage = {}; }
  Status open_table();
  // After one of these: members read `part` from the tensor at tensor_offset of the pool. The
  // caller keeps what they read unchanged until they have acknowledged the round.
  void open_tensor(uint64_t bytes, uint64_t tensor_offset, uint32_t part);

  // The buffer of a round, after waiting for the readers of its old data. `reader` is the one rank
  // that reads this rank's rounds in this call, or -1 for every member.
  Result<std::byte*> fill(uint32_t round, int reader = -1);
  // `bytes` bytes of a round that a member has posted: at in_buffer of the round's buffer, or at
  // in_tensor of a tensor that is read in place. Fails the group if they lie outside its memory.
  Result<const std::byte*> read(int member, uint32_t round, size_t in_buffer, size_t in_tensor,
                                size_t bytes, uint32_t part = kInput) const;
  // The same for this rank's piece, or for the start of the buffer if it has no pieces.
  Result<const std::byte*> read_piece(int member, uint32_t round, size_t in_tensor,
                                      size_t bytes) const;

  // Prefetches for ownership what a next call of this size will fill. Call after post().
  void prefetch_next_piece();

  // Before Mailboxes::end(), except after open_nothing().
  void close();

  // The table of one number per rank beside the buffers: this rank's to fill, a member's to read.
  Result<uint64_t*> fill_table();
  Result<const uint64_t*> read_table(int member) const;

 private:
  // The part of the ring that a call has taken.
  struct Piece {
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
  size_t slab_ring_bytes_ = 0;        // ring_bytes_, or less if it is borrowed
  bool is_borrowed_ = false;          // for this call alone
  Piece piece_;                       // of the call in progress
  size_t next_ = 0, next_small_ = 0;  // where the next call's piece begins, if it fits
  size_t buffer_bytes_ = 0;
  uint32_t buffers_ = 0;
  // Of the last calls, by sequence. Readers are done with calls older than kSlots:
  // Mailboxes::begin() waits for that.
  std::array<Piece, kSlots> earlier_;
  uint64_t table_free_after_ = 0;  // done word that all readers must reach before it is rewritten
};

}  // namespace dscomm
