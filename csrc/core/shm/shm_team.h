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
  uint64_t chunk_bytes = 0;     // of a round
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

  // Where in the pool this rank's data of a call lies, if the others shall read it there. Before
  // the call returns, await_readers(): its caller may write the tensor, or free it.
  std::optional<uint64_t> find_in_pool(const void* data, size_t bytes) const;
  // The same for blocks, one for each rank, that lie one behind the other.
  std::optional<uint64_t> find_in_pool(std::span<const void* const> blocks,
                                       std::span<const size_t> counts, size_t element_bytes) const;

  // Until `reader`, or every member with -1, has acknowledged so many rounds of the call.
  Status await_readers(uint32_t rounds, int reader = -1) {
    const uint64_t last_read = progress(lines_->sequence(), rounds);
    return reader < 0 ? lines_->wait_all_acknowledged(last_read)
                      : lines_->wait_acknowledged(reader, last_read);
  }

  // What a member staged in bytes must be what this rank expects of it.
  Status check_bytes(int member, size_t expected_bytes);

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
  size_t begin = size_t{round} * buffer_bytes;
  return begin >= bytes ? 0 : std::min(buffer_bytes, bytes - begin);
}

}  // namespace dscomm
