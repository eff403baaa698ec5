// ShmTeam: collectives through shared memory, for the ranks of one host. One file per collective.
//
// Each algorithm is straight-line code over Mailboxes (how far each rank is) and Staging (the
// data). If a call moves data in rounds, a rank posts phase r + 1 when its round r can be read, and
// acknowledges r + 1 when it has read round r of every rank that it reads from. A rank with nothing
// to publish posts phase 1.
//
// Reductions take the values in rank order, so all ranks get bit-identical results.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/base/format.h"
#include "core/reduce/reduce.h"
#include "core/shm/mailbox/mailboxes.h"
#include "core/shm/staging/copy.h"
#include "core/shm/staging/staging.h"
#include "core/team/call.h"
#include "core/team/call_tally.h"
#include "core/team/team.h"

namespace dscomm {

// Parameters that are the same on all ranks of a group; rank 0 decides.
struct ShmTuning {
  uint64_t chunk_bytes = 0;     // most that a rank publishes in a round; whole pages
  uint64_t one_shot_bytes = 0;  // most that a rank reads from the others in a one-shot all-reduce
  uint64_t staging_bytes = 0;   // of the staging ring: at least kLeastBuffers chunks
};

// Which tensors of this rank the others read in place. Each rank decides for itself.
struct InPlace {
  std::shared_ptr<TensorPool> pool;  // only tensors in this pool; null: none
  int64_t least_bytes = -1;  // only tensors of at least this size; -1: by the cache distance
};

class ShmTeam final : public Team {
 public:
  ShmTeam(std::shared_ptr<Arena> arena, uint64_t group_id, std::string name, int rank,
          std::vector<MailboxMember> members, const WaitPolicy& policy, const ShmTuning& tuning,
          InPlace in_place = {});
  ~ShmTeam() override;

  int rank() const override { return mailboxes_->rank(); }
  int size() const override { return mailboxes_->size(); }
  std::string describe() const override { return format_text("shared memory, {} ranks", size()); }

  void abort(const Status& cause) override { mailboxes_->aborts().abort(cause); }
  Status leave() override { return mailboxes_->leave(); }
  Status death() override { return mailboxes_->members().death(); }
  Status failure_in(uint64_t call) override { return mailboxes_->aborts().failure_in(call); }
  void set_parent(const Team* parent) override { mailboxes_->aborts().set_parent(parent); }
  uint64_t finished_calls() const override { return mailboxes_->aborts().finished_calls(); }
  Status failure() override { return mailboxes_->aborts().failure(); }
  void note_end(const std::string& exception) override {
    mailboxes_->members().note_end(exception);
  }

  // For the group's parent team (domain_teams.cc) and for send and recv.
  Agreement& agreement() { return mailboxes_->agreement(); }
  bool has_left(int member) const { return mailboxes_->members().has_left(member); }
  Departure departure(int member) const { return mailboxes_->members().departure(member); }

 private:
  Status begin_call(Call& call) override { return mailboxes_->begin(call.record, *call.options); }
  Status run_all_reduce(const std::byte* in, std::byte* out, size_t count,
                        const Reduction& reduction, const CallOptions&) override;
  Status run_broadcast(std::byte* buffer, size_t count, DType dtype, int root,
                       const CallOptions&) override;
  Status run_reduce(const std::byte* in, std::byte* out, size_t count, const Reduction& reduction,
                    int root, const CallOptions&) override;
  Status run_all_gather(const std::byte* in, size_t count, DType dtype, Outputs outs,
                        Counts out_counts, const CallOptions&) override;
  Status run_reduce_scatter(Inputs ins, Counts counts, std::byte* out, const Reduction& reduction,
                            const CallOptions&) override;
  Status run_gather(const std::byte* in, size_t count, DType dtype, Outputs outs, Counts out_counts,
                    int root, const CallOptions&) override;
  Status run_scatter(Inputs ins, Counts in_counts, std::byte* out, size_t count, DType dtype,
                     int root, const CallOptions&) override;
  Status run_all_to_all(Inputs ins, Counts in_counts, Outputs outs, Counts out_counts, DType dtype,
                        const CallOptions&) override;
  Status run_barrier(const CallOptions&) override;

  Status all_reduce_tiny(const void* in, void* out, size_t count, const Reduction& reduction);
  Status all_reduce_one_shot(const void* in, void* out, size_t count, const Reduction& reduction);
  struct ChunkedAllReduce;
  Status all_reduce_chunked(const std::byte* in, std::byte* out, size_t count,
                            const Reduction& reduction);

  // Counts a call for the log.
  void note(Collective kind, const char* algorithm, size_t bytes) const {
    if (tally_ == nullptr) [[likely]]
      return;
    tally_->set_distance(mailboxes_->distance().describe());
    tally_->add(kind, algorithm, bytes);
  }

  // How this rank writes data that the others read.
  Stores stores() const {
    return mailboxes_->distance().is_far() ? Stores::kStreaming : Stores::kOrdinary;
  }

  // Posts a phase whose data was copied into staging.
  void post_staged(uint32_t phase) {
    finish_copies();
    mailboxes_->post(phase);
    if (phase == 1) staging_->prefetch_next_range();
  }

  // The offset of `data` in the pool if the others are to read it in place; else nullopt.
  std::optional<uint64_t> find_in_pool(const void* data, size_t bytes) const;
  // For several blocks: the offset of the first; nullopt also if the blocks are not contiguous.
  std::optional<uint64_t> find_in_pool(std::span<const void* const> blocks,
                                       std::span<const size_t> counts, size_t element_bytes) const;

  // The data that this rank publishes: one block for all readers, or one block for each rank. A
  // round has one piece of each block.
  struct PublishedBlocks {
    std::span<const void* const> data;
    std::span<const size_t> counts;
    size_t element_bytes;
    size_t piece_bytes;
    size_t stride;  // from one piece to the next in a buffer
    uint32_t rounds;
    bool in_place;
  };
  // The largest piece of one block in a round that has pieces of `blocks` blocks, in bytes.
  size_t piece_bytes(size_t element_bytes, size_t blocks) const {
    return tuning_.chunk_bytes / (element_bytes * blocks) * element_bytes;
  }
  // Writes into this rank's slot where the blocks lie; posts all rounds if they are read in place.
  // `has_table`: also publishes the counts, for readers that do not know them. `reader`: the only
  // reader; -1: every member.
  Result<PublishedBlocks> open_blocks(std::span<const void* const> data,
                                      std::span<const size_t> counts, size_t element_bytes,
                                      bool has_table = false, int reader = -1);
  Status stage_round(const PublishedBlocks& blocks, uint32_t round);
  // Publishes one block and ends the call, on a rank that reads nothing.
  Status publish(const void* data, size_t count, DType dtype, int reader = -1);

  // Waits for a round of a member's data and copies it to its position in `out`. `bytes` is the
  // expected length of all rounds: kMismatch if the member sends another. Does nothing in rounds
  // past this length.
  Status receive_round(int member, uint32_t round, size_t bytes, void* out);
  // Copies this rank's piece of a round that the member has posted. The piece belongs to the block
  // that begins at byte `block_begin` of the member's tensor. `piece`: bytes of a full piece.
  Status receive_piece(int member, uint32_t round, size_t block_begin, size_t block_bytes,
                       size_t piece, void* out);

  // Sets sources_ for a round: `own` for this rank; read(member) for each other member, once it has
  // posted the round.
  template <typename Read>
  Status find_sources(const void* own, uint32_t round, const Read& read) {
    for (int k = 0; k < size(); ++k) {
      if (k == rank()) {
        sources_[k] = own;
        continue;
      }
      DSCOMM_RETURN_IF_ERROR(mailboxes_->wait_posted(k, round + 1));
      DSCOMM_ASSIGN_OR_RETURN(sources_[k], read(k));
    }
    return {};
  }

  // Reduces the sources_ of all ranks, in rank order.
  void reduce_sources(void* out, size_t count, const Reduction& reduction) const {
    dscomm::reduce(out, sources_.data(), size(), count, reduction, size());
  }

  std::shared_ptr<Arena> arena_;
  const uint64_t mailbox_offset_;
  const ShmTuning tuning_;
  const InPlace in_place_;
  std::unique_ptr<Mailboxes> mailboxes_;
  std::unique_ptr<Staging> staging_;
  std::vector<const void*>
      sources_;  // for reductions, by rank; kept from call to call to avoid allocations
  std::unique_ptr<CallTally> tally_;  // null unless calls are logged
};

}  // namespace dscomm
