// MpiTeam: collectives between processes on any hosts, through MPI's non-blocking operations.
//
// Most calls are: begin(), then agree(), then as many rounds as the longest block needs. A round
// stages a piece of the caller's data, lets MPI work on it, and hands out the result. Four rounds
// are in flight, so that copying and the wire overlap, and memory stays bounded whatever the size
// of the data; a piece is small enough for the counts of MPI, which are int.
//
// Where ranks send to each of the others, or along a chain, a piece is a message that MPI sends at
// once. Over TCP, Open MPI asks before it sends a longer one, and question and answer queue behind
// the data that is on its way: 16 MiB each way between 2 hosts, as it is, at 10 and at 1 Gbit/s,
// takes 6.5, 17 and 140 ms in messages of 60 KiB and 18, 26 and 196 ms in messages of 1 MiB, four
// in flight.
//
// Gather, scatter and all_to_all have no rounds, but a stream for each block from one rank to
// another.
//
// The other calls begin with a short round, the Lead, in which the ranks make sure that they mean
// the same (see mpi_agreement.h); data that fits rides in it. In a small broadcast or reduce among
// few ranks, and along a chain, Leads go one way. Among many ranks the Lead is a collective and has
// a communicator of its own, so that it never meets data.
//
// MPI tells of no death and of no abort: a rank whose peer is gone waits for ever. So every wait
// looks at the failure detector, and ends at the deadline. What MPI then still works on is kept for
// ever (see mpi_staging.h), and this Team calls MPI no more, not even to free its communicators.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "core/detector/failure_detector.h"
#include "core/team/call.h"
#include "core/team/first_cause.h"
#include "core/team/team.h"
#include "mpi/guarded.h"
#include "mpi/mpi_agreement.h"
#include "mpi/mpi_error.h"
#include "mpi/mpi_staging.h"
#include "mpi/mpi_wait.h"
#include "mpi/persistent_all_reduce.h"
#include "mpi/wire_reduction.h"

namespace dscomm {

// A rank that has left in order may have completed its part of what this rank is still in: the
// others pass on what it sent. It gets as long as an overloaded machine may need for that. A rank
// leaves up to a second after the end of its program, and both together are less than a process
// that ends gives its last calls (csrc/torch/exit.cc): so all hear first who left.
inline constexpr int64_t kGraceOfLeaversNs = 3'000'000'000;

struct MpiTeamMember {
  int transport_rank = 0;  // its rank in the transport, by which the failure detector knows it
  std::string name;        // for messages: "rank 3 (pid 7 on host b)"
};

struct MpiTeamOptions {
  uint64_t id = 0;   // names the Team in the failure detector; the same on all members
  std::string name;  // of the group, for messages
  std::vector<MpiTeamMember> members;  // by rank
  std::vector<MpiTeamMember> group;    // all of the group; empty: the members
  // Data of one round; four rounds, each with room for what is sent and for what comes, are held at
  // most. All members must give the same; at most kMostChunkBytes is used.
  size_t chunk_bytes = size_t{1} << 19;
  // Of a piece that goes from one rank to another; the same on all. A little less than what Open
  // MPI sends at once over TCP, 64 KiB with its own heading. UCX and libfabric, both over TCP, took
  // 0.8 to 1.4 times as long in pieces of 256 KiB, along a chain 1.2 to 1.4 times.
  size_t message_bytes = size_t{60} << 10;
  // Among more than `few_ranks`, messages to each rank go by pairs (see mpi_team_pairs.cc) if they
  // are at least as long: below that they cost more than their bytes. The same on all.
  size_t least_pair_bytes = size_t{16} << 10;
  // Some host has several of the ranks, which share its wire. A long all-reduce among many is then
  // left to MPI, most of whose messages stay inside hosts. The same on all.
  bool shares_hosts = false;
  // Messages in flight of a gather, a scatter or an all_to_all, each way.
  size_t places = 16;
  // Where MPI reduces: whether halves travel as float32 and are rounded once, instead of once a
  // hop. The same on all.
  bool halves_as_float32 = false;
  // Up to so many ranks show each other their Leads, in one hop; more let MPI reduce them, up and
  // down a tree. The same on all.
  int few_ranks = 8;
  MpiWaitPolicy wait_policy;
};

struct Pieces;

class MpiTeam final : public Team {
 public:
  // Every count and offset of MPI is an int.
  static constexpr size_t kMostChunkBytes = size_t{1} << 30;

  // `data` and `check` join the members in their order and become the Team's: nothing else uses
  // them. Few ranks need no `check`, nor do gather, scatter and all_to_all; it is MPI_COMM_NULL
  // then. `detector` outlives the Team. Does not communicate.
  MpiTeam(MPI_Comm data, MPI_Comm check, FailureDetector& detector, MpiTeamOptions options);
  ~MpiTeam() override;

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(options_.members.size()); }
  std::string describe() const override { return "mpi, " + std::to_string(size()) + " ranks"; }

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

  void abort(const Status& cause) override;
  Status failure() override;
  Status death() override;
  Status look(uint64_t call) override;
  void set_composer(const Team* composer) override { counts_calls_ = composer; }
  uint64_t finished_calls() const override {
    return finished_calls_.load(std::memory_order_relaxed);  // orders nothing
  }
  void compare_calls(bool always) override { detector_.compare_calls(options_.id, always); }
  bool takes_chunks() const override { return true; }
  size_t piece_bytes() const override { return message_bytes(); }
  size_t least_chunk_bytes() const override {
    return is_few() ? 0 : kInFlight * options_.members.size() * options_.least_pair_bytes;
  }

 private:
  // Where a call is; a later place is a greater number.
  enum class Place : uint64_t { kEntering = 0, kMoving = 1 };
  class Watch;

  // Of a message that MPI sends at once, to one rank; and its elements.
  size_t message_bytes() const { return std::min(options_.chunk_bytes, options_.message_bytes); }
  size_t piece_of_message(size_t element_bytes) const {
    return std::max<size_t>(message_bytes() / element_bytes, 1);
  }
  // Starts to send piece `number` of a stream of such messages. MPI buffers messages without a
  // posted receive. To bound that, some messages complete only when the receive is posted.
  int send_piece(const void* data, size_t bytes, size_t number, int rank, int tag,
                 MPI_Request* request) const {
    const bool waits = number % kSendsAhead == kSendsAhead - 1;
    return (waits ? MPI_Issend : MPI_Isend)(data, static_cast<int>(bytes), MPI_BYTE, rank, tag,
                                            data_, request);
  }
  // Elements of a piece of which each rank sends one to each, or to all of them in a round.
  size_t piece_of_each(size_t element_bytes) const;
  // The same for the rounds of a call whose values come in chunks: those that are in flight are of
  // two chunks at most.
  size_t within_chunks(size_t piece) const;

  // What a round moves: see Order.
  struct Turn {
    size_t piece;
    size_t step;     // from 1 on
    bool is_second;  // see Order::twice
  };
  // Which piece of every block a round moves. Usually round r has piece r. With more `steps` a
  // piece has one round for each. Where each piece goes `twice`, the steps have an index: 2p is
  // that of the first steps of piece p, 2p + 1 that of the second steps of piece p - 1; the first
  // odd one and the last even one are idle.
  struct Order {
    size_t steps = 1;
    bool twice = false;

    size_t rounds(size_t pieces) const {
      return twice && pieces > 0 ? 2 * (pieces + 1) * steps : pieces * steps;
    }
    Turn turn(size_t round) const {
      const size_t index = round / steps, step = 1 + round % steps;
      if (!twice) return {index, step, false};
      // Behind the last piece, and before the first (a number that wraps), there are no elements.
      return {index / 2 - index % 2, step, index % 2 == 1};
    }
    // Pieces whose values are read, at the latest, when the round starts; and whose results are
    // there when it has ended.
    size_t begun(size_t round) const { return round / steps / (twice ? 2 : 1) + 1; }
    size_t ended(size_t round) const {
      const size_t indices = (round + 1) / steps;
      return twice ? std::max<size_t>(indices / 2, 1) - 1 : indices;
    }
  };

  // The rounds of a call. Each of its blocks is cut into pieces of `piece` elements.
  struct Rounds {
    Rounds(size_t piece_elements, size_t round_bytes) : piece(piece_elements), bytes(round_bytes) {}

    const size_t piece;
    const size_t bytes;  // of staging that a round needs on this rank
    Order order;
    // Copies this rank's pieces into staging; runs before the ranks have agreed for round 0.
    std::function<void(size_t round, std::byte* staging)> stage;
    // Starts MPI's operations on staging.data(); returns MPI's code.
    std::function<int(size_t round, MpiStaging& staging)> start;
    // Where a round has two steps: starts the second when the first is complete. If the steps are
    // collectives of MPI, all ranks have it.
    std::function<int(size_t round, MpiStaging& staging)> go_on;
    // Copies results out.
    std::function<void(size_t round, std::byte* staging)> deliver;
    // Nothing of it is truncated whatever the others call, and all ranks that agree have as many
    // rounds: those that are in flight at first begin before they do.
    bool goes_ahead = false;
    LeadWay way;  // of the Leads
  };

  // Whether a call with blocks of up to `count` elements finds all values there, on all ranks:
  // those that have them all decide as those do that are still making them.
  static bool all_is_there(const Chunks* chunks, size_t count) {
    return chunks == nullptr || count <= chunks->count;
  }

  // Refuses on a dead Team, and prepares the Lead of the next call, in which the ranks' longest
  // block has `longest` elements.
  Status begin(const CallRecord& call, size_t longest, const CallOptions& options);
  // The same for a call whose counts differ between ranks: splits_ holds those that this rank
  // knows. `only_receives`: no rank needs anything of this one, so those that it waits for may have
  // left.
  Status begin_splits(const CallRecord& call, const CallOptions& options,
                      bool only_receives = false);
  // begin() of a call whose Leads go one way among few ranks.
  Status begin_one_way(const CallRecord& call, size_t count, const LeadWay& way,
                       const CallOptions& options);
  // The reductions, once the call has begun.
  Status reduce_small(const void* in, void* out, size_t count, const Reduction& reduction,
                      int root);
  Status reduce_by_swap(const void* in, void* out, size_t count, const Reduction& reduction);
  Status reduce_by_mpi(const void* in, void* out, size_t count, const Reduction& reduction,
                       int root);
  Status reduce_by_plan(const void* in, void* out, size_t count, const Reduction& reduction,
                        PersistentAllReduce& prepared);
  Status reduce_by_exchange(const void* in, void* out, size_t count, const Reduction& reduction);
  // Whether each of so many shares of the data fits a message.
  bool fits_shares(size_t count, size_t element_bytes, int shares, const Chunks* chunks) const;
  Status reduce_by_shares(const void* in, void* out, size_t count, const Reduction& reduction,
                          int root);
  Status broadcast_by_shares(void* buffer, size_t count, size_t element_bytes, int root);
  template <typename ShareOf, typename Gets>
  Status spread_shares(const Pieces& shares, void* out, size_t count, const ShareOf& share_of,
                       const Gets& gets);
  // By pairs, among many ranks. `piece`: elements of a message or, in an all-reduce, of one for
  // each rank.
  bool fits_pairs(size_t bytes_of_message) const;
  // Elements of the pieces of `count` elements that are no longer than `most` and of one length.
  size_t even_piece(size_t count, size_t most) const;
  size_t rank_after(size_t step) const { return (rank_ + step) % options_.members.size(); }
  size_t rank_before(size_t step) const {
    return (rank_ + options_.members.size() - step) % options_.members.size();
  }
  int exchange_in_turn(const Turn& turn, size_t sent_bytes, size_t got_bytes, size_t room,
                       MpiStaging& staging) const;
  Status reduce_by_pairs(const void* in, void* out, size_t count, size_t piece,
                         const Reduction& reduction);
  Status reduce_scatter_by_pairs(std::span<const void* const> ins, std::span<const size_t> counts,
                                 void* out, size_t piece, const Reduction& reduction);
  Status all_gather_by_pairs(const void* in, size_t count, size_t element_bytes,
                             std::span<void* const> outs, std::span<const size_t> out_counts,
                             size_t piece);
  struct Chain;
  Status reduce_along_chain(const void* in, void* out, size_t count, const Reduction& reduction,
                            const LeadWay& way);
  Status broadcast_along_chain(void* buffer, size_t count, DType dtype, const LeadWay& way);
  // A gather, a scatter or an all_to_all.
  class Exchange;
  Status exchange_blocks(const CallRecord& call, std::span<const void* const> ins,
                         std::span<void* const> outs, const CallOptions& options);
  // What MPI has prepared, or is to prepare, for the call in progress; null where it is not to.
  PersistentAllReduce* find_prepared(size_t count, const Reduction& reduction);
  WireReduction on_wire(const Reduction& reduction) const;
  bool fits_lead(size_t count, const Reduction& reduction) const;
  void reduce_in_order(void* results, const void* own, const std::byte* others, size_t stride,
                       size_t count, const Reduction& reduction);

  bool is_few() const { return size() <= options_.few_ranks; }
  // Bytes that can ride along.
  size_t ride_room() const {
    return is_few() ? kRideBytesOfFew / static_cast<size_t>(size() - 1) : kRideBytes;
  }
  // Where to put them. Among many they are to be reduced, so every rank brings as many.
  std::byte* ride(size_t bytes);
  std::byte* ride_to_be_reduced(DType dtype, ReduceOp op, size_t count);
  // The same for each of the others, among few, where they get different data: up to a message.
  std::byte* ride_to(int k, size_t bytes);
  // Once the ranks agree: what rank k brought, among few; and the reduced data, among many.
  std::byte* rode(int k) { return slot(1 + k) + heading_bytes(); }
  std::byte* rode_reduced() { return rode(0); }
  // Of lead_staging_: the Lead of this rank, and then those of all, or of all together. Among few,
  // slot_to(k) is this rank's Lead for rank k.
  std::byte* slot(int index) {
    return lead_staging_.data() + static_cast<size_t>(index) * slot_bytes();
  }
  std::byte* slot_to(int k) { return slot(1 + size() + k); }
  size_t slot_bytes() const {
    return is_few() ? heading_bytes() + std::max(ride_room(), message_bytes()) : sizeof(Lead);
  }
  // Before what rides along. Few ranks also show each other their calls.
  size_t heading_bytes() const {
    return is_few() ? sizeof(LeadHead) + sizeof(CallRecord) : sizeof(LeadHead);
  }
  void head_lead(std::byte* slot) const;
  // Until every rank has made the call, and they agree; lead_ is then the ranks' together. With
  // Leads that go one way: until those for this rank have come, and agree with it.
  Status agree(const LeadWay& way = {});
  Status start_lead(const LeadWay& way = {});
  Status finish_lead();
  Status disagree();
  Status differs(const CallRecord& theirs, int rank);
  Team& outermost() { return composer_ != nullptr ? *composer_ : *this; }
  // Has all compare their last calls, or leaves that to another rank, and waits a moment for the
  // result.
  Status find_difference(bool asks);
  // Counts a message to a rank that need not have answered those before. Returns whether it is to
  // complete only when its receive is posted. MPI buffers messages without a posted receive; this
  // bounds how many, and how many bytes, a rank may leave there.
  bool note_sent(int rank, size_t bytes) {
    size_t& unread = unread_bytes_[static_cast<size_t>(rank)];
    unread += std::max(bytes, kMostUnread / kSendsAhead);
    return unread >= kMostUnread;
  }
  // It has come to the call in progress, or has begun to take such a message.
  void note_reader(int rank) { unread_bytes_[static_cast<size_t>(rank)] = 0; }
  // The call is complete here.
  Status finished() {
    if (!awaited_.empty()) await_all();
    finished_calls_.store(sequence_, std::memory_order_relaxed);  // orders nothing
    return {};
  }
  // agree(), and the rounds.
  Status run(const Rounds& rounds);

  // Until the operation is complete, or there is no use in waiting any longer.
  Status wait(MpiStaging& staging, Place place);
  // The same, until `poll` returns true.
  Status wait_with(const std::function<Result<bool>()>& poll, Place place);
  Status end_of_wait(const Status& status);
  template <typename Call>
  Status check(const char* name, const Call& call) {
    const guard::CallDeadline calls_end(*deadline_);
    const int code = guarded(call);
    return code == MPI_SUCCESS ? Status() : refused(mpi_error(name, code));
  }
  // A status of whoever composes this Team; when it is not OK, this Team ends with it.
  Status end(const Status& status);
  // MPI has refused something. Fails with the reason why, where the detector has one soon.
  Status refused(const Status& status);

  // Ends the Team with a cause found by this rank in the call in progress, unless another was
  // first.
  Status fail(Code code, const std::string& cause);
  // The same with a status; does nothing if that is OK.
  Status fail(const Status& cause) {
    return cause.ok() ? Status() : fail(cause.code(), cause.message());
  }
  Status timed_out(Place place, const std::vector<Progress>& answers);
  // Takes in what is new; costs one load when nothing is.
  void look_at_detector();
  // Of the awaited ranks.
  void find_the_gone();
  // More may be on its way from ranks that have left.
  void note_arrival() {
    if (!left_.ok() && died_.ok()) gone_since_ns_ = monotonic_ns();
  }
  bool awaits(int rank) const { return awaited_.empty() || awaited_[static_cast<size_t>(rank)]; }
  void await_all();
  // Fails when a member that has gone keeps the call from being completed.
  Status look_for_the_gone(Place place);
  Status fail_by_leaver();
  // Those of `members` that have answered so, but for this rank.
  std::string names_of(const std::vector<MpiTeamMember>& members,
                       const std::vector<Progress>& answers, Progress answer) const;

  std::string name_of(int member) const { return options_.members[member].name; }
  std::string name_call() const;
  uint64_t position(Place place) const { return 2 * sequence_ + static_cast<uint64_t>(place); }

  MPI_Comm data_;
  MPI_Comm check_;
  FailureDetector& detector_;
  const MpiTeamOptions options_;
  int rank_ = 0;
  int rank_in_group_ = 0;
  Caller caller_;

  uint64_t sequence_ = 0;
  uint64_t history_ = 0;                // see CallOptions; of this Team, where it is not composed
  CallRecord call_;                     // in progress
  Team* composer_ = nullptr;            // see CallOptions
  const Deadline* deadline_ = nullptr;  // of the call in progress
  const Chunks* chunks_ = nullptr;      // see CallOptions
  uint64_t plan_ = 0;                   // see CallOptions
  Splits splits_;
  LeadWay way_;
  LeadHead lead_;
  size_t riding_bytes_ = 0;
  size_t following_bytes_ = 0;           // that the Leads' receivers get afterwards
  std::vector<size_t> riding_bytes_to_;  // by rank; empty: all get the same
  MpiStaging lead_staging_;
  int lead_receives_ = 0;                 // of its requests, the first ones
  static constexpr size_t kInFlight = 4;  // rounds
  static constexpr size_t kSendsAhead = 8;
  static constexpr size_t kMostUnread = size_t{128} << 10;
  std::vector<size_t> unread_bytes_;  // by rank; see note_sent()
  std::array<MpiStaging, kInFlight> staging_;
  // By plan, count, dtype and op; a factor is applied before the wire.
  std::map<std::tuple<uint64_t, size_t, DType, ReduceOp>, PersistentAllReduce> prepared_;
  std::vector<const void*> sources_;  // of a reduction; here to save an allocation a round

  // What the detector said when it was last asked by the thread that waits.
  uint64_t seen_count_ = 0;
  std::vector<bool> awaited_;        // by rank; empty: the call needs every rank until it ends
  std::vector<bool> may_have_left_;  // by rank: it may have done its part; empty: nobody
  bool has_ended_ = false;  // somebody has ended the Team, perhaps after it finished the call
  Status died_, left_;
  std::string advice_;  // on left_
  int64_t gone_since_ns_ = 0;

  const Team* counts_calls_ = nullptr;  // see set_composer(); null: this Team
  std::atomic<uint64_t> finished_calls_{0};

  FirstCause cause_;
  std::atomic<uint64_t> failure_count_{
      0};  // FailureDetector::count() when failure() last found nothing
};

inline std::byte* byte_at(void* base, size_t offset) {
  return static_cast<std::byte*>(base) + offset;
}
inline const std::byte* byte_at(const void* base, size_t offset) {
  return static_cast<const std::byte*>(base) + offset;
}

// How many of `count` elements are in round `round`.
inline size_t in_round(size_t count, size_t piece, size_t round) {
  const size_t begin = round * piece;
  return begin < count ? std::min(piece, count - begin) : 0;
}

// Copies piece `round` of a block of `count` elements between user memory and staging. An empty
// block may be null.
struct Pieces {
  size_t piece;  // elements
  size_t element_bytes;
  const Chunks* chunks = nullptr;  // whose rings the block lies in

  // Of piece `round` of the block: the first element's.
  static size_t in_ring(size_t element, size_t ring) {
    return ring == 0 ? element : element % ring;
  }
  size_t read_at(size_t round) const {
    return in_ring(round * piece, chunks == nullptr ? 0 : chunks->ring) * element_bytes;
  }
  size_t write_at(size_t round) const {
    return in_ring(round * piece, chunks == nullptr ? 0 : chunks->out_ring) * element_bytes;
  }
  size_t bytes() const { return piece * element_bytes; }
  size_t bytes_of(size_t count, size_t round) const {
    return in_round(count, piece, round) * element_bytes;
  }
  void stage(std::byte* staging, const void* block, size_t count, size_t round) const {
    const size_t length = bytes_of(count, round);
    if (length > 0) std::memcpy(staging, byte_at(block, read_at(round)), length);
  }
  void deliver(void* block, const std::byte* staging, size_t count, size_t round) const {
    const size_t length = bytes_of(count, round);
    if (length > 0) std::memcpy(byte_at(block, write_at(round)), staging, length);
  }
  // Between two blocks in user memory, which may be the same.
  void copy(void* to, const void* from, size_t count, size_t round) const {
    if (to != from && bytes_of(count, round) > 0)
      deliver(to, byte_at(from, round * bytes()), count, round);
  }

  // The next two: blocks of all ranks, `place_bytes` apart in staging. The block of rank `me`
  // stays in user memory, or none does (kNone). list() writes MPI's tables of lengths and places.
  static constexpr size_t kNone = SIZE_MAX;
  void list(std::span<const size_t> block_counts, size_t me, size_t round, size_t place_bytes,
            int* lengths, int* places) const {
    for (size_t k = 0; k < block_counts.size(); ++k) {
      lengths[k] = k == me ? 0 : static_cast<int>(bytes_of(block_counts[k], round));
      places[k] = static_cast<int>(k * place_bytes);
    }
  }
  // The block of rank `me` is copied from `own`.
  void deliver_all(std::span<void* const> blocks, std::span<const size_t> block_counts, size_t me,
                   const void* own, size_t round, size_t place_bytes,
                   const std::byte* staging) const {
    for (size_t k = 0; k < block_counts.size(); ++k) {
      if (k == me) {
        copy(blocks[k], own, block_counts[k], round);
      } else {
        deliver(blocks[k], staging + k * place_bytes, block_counts[k], round);
      }
    }
  }
};

// A share for each rank; the last ones may be shorter, or empty.
inline Pieces shares_of(size_t count, int ranks, size_t element_bytes) {
  const auto shares = static_cast<size_t>(ranks);
  return {(count + shares - 1) / shares, element_bytes, nullptr};
}

}  // namespace dscomm
