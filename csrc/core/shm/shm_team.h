// ShmTeam: collectives through memory, for ranks of one host. One file per collective.
//
// Every algorithm here is straight-line code over Lines (who is where) and Stage (the bytes). The
// phases of a call that moves data in rounds: a rank posts r + 1 when its round r can be read, and
// acknowledges r + 1 when it has read round r of everyone it reads. A rank with nothing to publish
// posts phase 1.
//
// Reductions run in rank order on every rank, so all get the same bits.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "core/shm/copy.h"
#include "core/shm/lines.h"
#include "core/shm/stage.h"
#include "core/team/arguments.h"
#include "core/team/call.h"
#include "core/team/team.h"

namespace dscomm {

// What all ranks of a group share, decided by its rank 0.
struct ShmTuning {
  uint64_t chunk_bytes = 0;     // of a round; whole pages
  uint64_t one_shot_bytes = 0;  // most that a rank reads of the others in a one-shot all-reduce
  uint64_t staging_bytes = 0;   // at least kLeastBuffers chunks
};

// What one rank decides for itself: which of its tensors the others read where they are.
struct InPlace {
  std::shared_ptr<TensorPool> pool;  // those that lie in it; null: none
  int64_t least_bytes = -1;          // and are so large; -1 decides by what is measured
};

class ShmTeam final : public Team {
 public:
  ShmTeam(std::shared_ptr<Arena> arena, uint64_t group_id, std::string name, int rank,
          std::vector<LinesMember> members, const WaitPolicy& policy, const ShmTuning& tuning,
          InPlace in_place = {});
  ~ShmTeam() override;

  int rank() const override { return lines_->rank(); }
  int size() const override { return lines_->size(); }
  std::string describe() const override;

  Status all_reduce(const void* in, void* out, size_t count, const Reduction& reduction,
                    const CallOptions& options) override;
  Status broadcast(void* buffer, size_t count, DType dtype, int root,
                   const CallOptions& options) override;
  Status reduce(const void* in, void* out, size_t count, const Reduction& reduction, int root,
                const CallOptions& options) override;
  Status all_gather(const void* in, size_t count, DType dtype, std::span<void* const> outs,
                    std::span<const size_t> out_counts, const CallOptions& options) override;
  Status reduce_scatter(std::span<const void* const> ins, std::span<const size_t> counts, void* out,
                        const Reduction& reduction, const CallOptions& options) override;
  Status gather(const void* in, size_t count, DType dtype, std::span<void* const> outs,
                std::span<const size_t> out_counts, int root, const CallOptions& options) override;
  Status scatter(std::span<const void* const> ins, std::span<const size_t> in_counts, void* out,
                 size_t count, DType dtype, int root, const CallOptions& options) override;
  Status all_to_all(std::span<const void* const> ins, std::span<const size_t> in_counts,
                    std::span<void* const> outs, std::span<const size_t> out_counts, DType dtype,
                    const CallOptions& options) override;
  Status barrier(const CallOptions& options) override;
  void abort(const Status& cause) override { lines_->abort(cause); }
  Status leave() override { return lines_->leave(); }
  Status death() override { return lines_->death(); }
  Status look(uint64_t call) override { return lines_->look(call); }
  void set_composer(const Team* composer) override { lines_->set_composer(composer); }
  uint64_t finished_calls() const override { return lines_->finished_calls(); }
  Status failure() override { return lines_->failure(); }
  void note_end(const std::string& exception) override { lines_->note_end(exception); }

  void end_forming() { lines_->end_forming(); }
  void note_call(const CallRecord& call, bool reads_all) { lines_->note_call(call, reads_all); }
  Status absence() const { return lines_->absence(); }
  bool has_left(int member) const { return lines_->has_left(member); }
  Departure departure(int member) const { return lines_->departure(member); }

 private:
  Status all_reduce_tiny(const void* in, void* out, size_t count, const Reduction& reduction);
  Status all_reduce_one_shot(const void* in, void* out, size_t count, const Reduction& reduction);
  Status all_reduce_chunked(const void* in, void* out, size_t count, const Reduction& reduction);

  // How this rank writes what the others read.
  Stores stores() const {
    return lines_->distance().is_far() ? Stores::kStreaming : Stores::kOrdinary;
  }

  // post(), after data was copied into staging.
  void post_staged(uint32_t phase) {
    finish_copies();
    lines_->post(phase);
    if (phase == 1) stage_->own_next_piece();
  }

  // The offset of this data in the pool, if the others shall read it in place. The call must then
  // end with finish(), because its caller may write or free the tensor.
  std::optional<uint64_t> find_in_pool(const void* data, size_t bytes) const;
  // The same for contiguous blocks, one for each rank.
  std::optional<uint64_t> find_in_pool(std::span<const void* const> blocks,
                                       std::span<const size_t> counts, size_t element_bytes) const;

  // One buffer that this rank publishes in rounds, to `reader` or, with -1, to every member.
  struct Whole {
    const std::byte* data;
    size_t bytes;
    int reader;
    uint32_t rounds;
    bool in_place;
  };
  Result<Whole> open_whole(const void* data, size_t bytes, int reader = -1);
  Status stage_round(const Whole& whole, uint32_t round);
  // Publishes all rounds and ends the call, on a rank that reads nothing.
  Status publish(const void* data, size_t bytes, int reader = -1);

  // Blocks that this rank publishes in rounds, one block for each rank, a piece of each a round.
  struct Blocks {
    std::span<const void* const> data;
    std::span<const size_t> counts;
    size_t element_bytes;
    size_t piece_bytes;
    size_t stride;  // from one piece to the next in a buffer
    uint32_t rounds;
    bool in_place;
  };
  // The largest piece of a block in one round, in bytes.
  size_t piece_bytes(size_t element_bytes) const {
    return tuning_.chunk_bytes / (element_bytes * sources_.size()) * element_bytes;
  }
  // `has_table`: also publishes the counts, because the readers do not know them.
  Result<Blocks> open_blocks(std::span<const void* const> data, std::span<const size_t> counts,
                             size_t element_bytes, size_t bytes, bool has_table);
  Status stage_round(const Blocks& blocks, uint32_t round);

  // Ends the call, after the readers of this rank's tensor have finished.
  Status finish(bool in_place, uint32_t rounds, int reader = -1);
  Status finish(const Blocks& blocks);  // opened with a table

  // Waits for a round of a member's data and copies it to its place in `out`. kMismatch if the data
  // is not `bytes` long. Does nothing if the data has fewer rounds.
  Status receive_round(int member, uint32_t round, size_t bytes, void* out);
  // Copies a round of a block that begins at byte `block_begin` of the member's tensor. The member
  // has posted the round.
  Status receive_piece(int member, uint32_t round, size_t block_begin, size_t block_bytes,
                       size_t piece, void* out);

  // Sets sources_ for a round: `own` for this rank; for each other member, after it has posted the
  // round, the address that read(member) returns.
  template <typename Read>
  Status find_sources(const void* own, uint32_t round, const Read& read) {
    for (int k = 0; k < size(); ++k) {
      if (k == rank()) {
        sources_[k] = own;
        continue;
      }
      DSCOMM_RETURN_IF_ERROR(lines_->wait_posted(k, round + 1));
      DSCOMM_ASSIGN_OR_RETURN(sources_[k], read(k));
    }
    return {};
  }

  std::shared_ptr<Arena> arena_;
  const uint64_t lines_offset_;
  const ShmTuning tuning_;
  const InPlace in_place_;
  std::unique_ptr<Lines> lines_;
  std::unique_ptr<Stage> stage_;
  std::vector<const void*>
      sources_;  // one per rank, for reductions; here to save an allocation a call
};

// Rounds in which `bytes` go through buffers of `buffer_bytes`; at least 1, so that everybody
// posts.
inline uint32_t rounds_of(size_t bytes, size_t buffer_bytes) {
  return static_cast<uint32_t>(bytes == 0 ? 1 : (bytes + buffer_bytes - 1) / buffer_bytes);
}
// The bytes of round r.
inline size_t round_bytes(size_t bytes, size_t buffer_bytes, uint32_t round) {
  return in_chunk(bytes, size_t{round} * buffer_bytes, buffer_bytes);
}

}  // namespace dscomm
