// Stage: the memory of one rank through which a group's large data goes.
//
// A slab of four buffers, used in turn, and a table of counts. A buffer is rewritten only when
// every reader of what it last held has said so: within a call by acknowledgements, from call to
// call by the readers' done words. The slab is taken from the arena at the first call that needs
// one. A group keeps it between calls while the slabs of all groups are few; past that it gives it
// back after each call, as soon as its readers are done, so that thousands of groups share what
// those in flight need.
#pragma once

#include <memory>

#include "core/shm/lines.h"

namespace dscomm {

inline constexpr uint32_t kStageBuffers = 4;

class Stage {
 public:
  Stage(std::shared_ptr<Arena> arena, Lines& lines, size_t chunk_bytes);
  ~Stage();  // the slab is released once nobody reads it

  size_t chunk_bytes() const { return chunk_bytes_; }

  // Starts a call: says in this rank's slot where its staging lies and that it holds `bytes` in
  // all. Between Lines::begin() and the first post().
  Status open(uint64_t bytes);

  // The buffer of a round, safe to fill: waits for the readers of what it held. `reader` is the one
  // rank that reads this rank's rounds in this call, or -1 for every member.
  Result<std::byte*> fill(uint32_t round, int reader = -1);
  // A buffer already filled in this call, of this rank or of a member that has posted its call.
  std::byte* own(uint32_t round) const { return data_ + buffer_offset(first_ + round); }
  Result<const std::byte*> read(int member, uint32_t round) const;

  // Says how many rounds this call has filled, before Lines::end().
  void close(uint32_t rounds, bool table = false);

  // The table of one number per rank that a member stages beside its buffers.
  Result<uint64_t*> fill_table();
  Result<const uint64_t*> read_table(int member) const;

 private:
  Status take_slab();
  void give_back_slab();
  size_t table_bytes() const;
  size_t slab_bytes() const { return table_bytes() + kStageBuffers * chunk_bytes_; }
  size_t buffer_offset(uint32_t index) const {
    return table_bytes() + size_t{index % kStageBuffers} * chunk_bytes_;
  }

  std::shared_ptr<Arena> arena_;
  Lines& lines_;
  const size_t chunk_bytes_;
  uint64_t slab_offset_ = 0;  // 0: none yet (offset 0 is the arena's header)
  std::byte* data_ = nullptr;
  uint32_t first_ = 0;                       // the buffer of round 0 of the call in progress
  uint64_t free_after_[kStageBuffers] = {};  // done word that every reader must reach
  uint64_t table_free_after_ = 0;
};

}  // namespace dscomm
