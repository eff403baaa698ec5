// Stage: the memory of one rank through which a group's large data goes.
//
// A slab: a table of counts and a ring of bytes. A call takes the next piece of the ring, cut into
// as many buffers of one size as it has rounds, or as fit, and uses these in turn. A byte is
// rewritten only when every reader of what it last held has said so: within a call by
// acknowledgements, from call to call by the readers' done words. Calls walk through the whole ring
// because a line that a peer has just read is dear to write: by the time its turn comes again it
// has left the peer's cache. Small calls stay in the ring's first lines, which are in the own one,
// as do larger ones where the peers share it.
//
// The slab is taken from the arena at the first call that needs one. A group keeps it between calls
// while the slabs of all groups are few. Past that, a call borrows a slab that is as large as what
// it stages, and it goes back as soon as its readers are done, so that thousands of groups share
// what those in flight need. Where readers are so late that the arena is full of what they have
// still to read, a call waits for them, as any sender does whose receiver is late.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>

#include "core/shm/lines.h"

namespace dscomm {

// A call of many rounds has at least as many buffers: two chunks that are being staged and reduced,
// each with its input and its result.
inline constexpr uint32_t kLeastBuffers = 4;

class Stage {
 public:
  // ring_bytes is at least kLeastBuffers times what any call passes as buffer_bytes.
  Stage(std::shared_ptr<Arena> arena, Lines& lines, size_t ring_bytes);
  ~Stage();  // the slab is released once nobody reads it

  // Starts a call of `rounds` rounds that each fill at most buffer_bytes: says in this rank's slot
  // where its staging lies and that it holds `bytes` in all. Between Lines::begin() and the first
  // post().
  Status open(uint64_t bytes, size_t buffer_bytes, uint32_t rounds);

  // The same for rounds of one piece for each rank, of at most piece_bytes.
  Status open_pieces(uint64_t bytes, size_t piece_bytes, uint32_t rounds);
  // The same for a call that stages no round, and for one that stages the table alone.
  void open_nothing() { lines_.own_slot().stage = {}; }
  Status open_table();
  // After one of them: members read `part` in this tensor, which lies at tensor_offset of the pool.
  // What they read of it stays as it is until they have acknowledged the round.
  void open_tensor(uint64_t bytes, uint64_t tensor_offset, uint32_t part);

  // The buffer of a round, safe to fill: waits for the readers of what it held. `reader` is the one
  // rank that reads this rank's rounds in this call, or -1 for every member.
  Result<std::byte*> fill(uint32_t round, int reader = -1);
  // Of a member that has posted this round of its call: `bytes` bytes, which lie at in_buffer of
  // the round's buffer, or at in_tensor of the tensor where that is read in place.
  Result<const std::byte*> read(int member, uint32_t round, size_t in_buffer, size_t in_tensor,
                                size_t bytes, uint32_t part = kInput) const;
  // The same for this rank's piece, or for the whole buffer if it has no pieces.
  Result<const std::byte*> read_piece(int member, uint32_t round, size_t in_tensor,
                                      size_t bytes) const;

  // While this rank waits: readies the lines that a next call as short as this one will fill.
  void own_next_piece();

  // Before Lines::end(), after all but open_nothing().
  void close();

  // The table of one number per rank that a member stages beside its buffers.
  Result<uint64_t*> fill_table();
  Result<const uint64_t*> read_table(int member) const;

 private:
  // What a call has taken of the ring.
  struct Piece {
    uint64_t sequence = 0;  // of the call; 0: none
    size_t begin = 0, end = 0;
  };

  // Where in the ring a call that takes so many bytes begins.
  size_t next_begin(size_t length) const;
  // One whose ring has this call's needed_bytes at least.
  Status take_slab(size_t needed_bytes);
  Status borrow_slab(size_t needed_bytes);
  void give_back_slab(std::function<bool()> is_unread, std::optional<Arena::Borrower> call = {});
  Arena::Borrower this_call() const { return {lines_.group_id(), lines_.sequence()}; }
  size_t table_bytes() const;
  size_t slab_bytes() const { return table_bytes() + slab_ring_bytes_; }
  std::byte* ring() const { return data_ + table_bytes(); }
  uint64_t free_after(size_t begin, size_t end) const;

  std::shared_ptr<Arena> arena_;
  Lines& lines_;
  const size_t ring_bytes_;
  uint64_t slab_offset_ = 0;  // 0: none yet (offset 0 is the arena's header)
  std::byte* data_ = nullptr;
  size_t slab_ring_bytes_ = 0;  // of the ring that it holds: ring_bytes_, or what one call needs
  bool is_borrowed_ = false;    // for this call alone
  Piece piece_;                 // of the call in progress
  size_t next_ = 0, next_small_ = 0;  // where the next call's piece begins, if it fits
  size_t buffer_bytes_ = 0;
  uint32_t buffers_ = 0;
  // Of the last calls, by sequence. One that is older than there are slots is done everywhere:
  // Lines::begin() has seen to that.
  std::array<Piece, kSlots> earlier_;
  uint64_t table_free_after_ = 0;  // done word that every reader must reach
};

}  // namespace dscomm
