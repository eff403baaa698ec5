// MpiTeam: collectives between processes on any hosts, through MPI's non-blocking operations.
//
// Most calls are begin(), agree(), then as many rounds as the longest block needs. A round stages a
// piece of the caller's data, lets MPI work on it, and delivers the result. Four rounds are in
// flight, so that copies overlap with the network. Memory is bounded whatever the size of the data,
// and a piece's counts fit MPI's int.
//
// By swap, by pairs and along a chain (mpi_team_reduce.cc), a piece is a message that MPI sends
// eagerly. Over TCP, Open MPI uses a rendezvous for longer messages, whose control messages queue
// behind data in transit. 16 MiB each way between 2 hosts, without a rate limit, at 10 and at 1
// Gbit/s, takes 6.5, 17 and 140 ms in messages of 60 KiB, and 18, 26 and 196 ms in messages of 1
// MiB, four in flight.
//
// Gather, scatter and all_to_all have no rounds but a stream of messages for each block.
//
// Other calls begin with a short exchange of headers, in which the ranks verify that they
// make the same call (mpi_agreement.h); small data is piggybacked on it. In a small broadcast or
// reduce among few ranks, and along a chain, headers go in one direction. Among many ranks MPI
// reduces the headers on a separate communicator, so that they never meet data.
//
// MPI reports no deaths and no aborts: a rank whose peer is gone waits for ever. So every wait
// polls the failure detector and ends at the deadline. Memory that MPI still uses then is never
// freed (mpi_staging.h), and the Team does not call MPI again, not even to free its communicators.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "core/detector/failure_detector.h"
#include "core/team/call.h"
#include "core/team/call_tally.h"
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

// How long a call waits for messages after a rank left in order, enough for an overloaded machine:
// the rank may have sent its part of the call, and others may still forward it. A rank leaves up to
// a second after its program ends. This time and that second together are less than kExitGrace
// (csrc/torch/exit.cc), for which an ending process waits for its last calls. So a process learns
// before it ends which rank left.
inline constexpr int64_t kGraceOfLeaversNs = 3'000'000'000;

struct MpiTeamMember {
  int transport_rank = 0;  // rank in the transport and the failure detector
  std::string name;        // for messages: "rank 3 (pid 7 on host b)"
};

struct MpiTeamOptions {
  uint64_t id = 0;   // identifies the Team in the failure detector; the same on all members
  std::string name;  // the group's name, for messages
  std::vector<MpiTeamMember> members;  // by rank
  std::vector<MpiTeamMember> group;    // all members of the group; empty: `members`
  // Bytes of one round, at most kMostChunkBytes; the same on all members. Up to four rounds are
  // held, each with send and receive memory.
  size_t chunk_bytes = size_t{1} << 19;
  // Bytes of a piece sent from one rank to another; the same on all members. With its header a
  // piece stays below the 64 KiB that Open MPI sends eagerly over TCP. Larger pieces are no better:
  // with 256 KiB, UCX and libfabric, both over TCP, took 0.8 to 1.4 times as long, and 1.2 to 1.4
  // times in calls that pass data along a chain of ranks (mpi_team_chain.cc).
  size_t message_bytes = size_t{60} << 10;
  // Among more than `few_ranks`, calls go by pairs (mpi_team_pairs.cc) if their messages then have
  // at least this many bytes; in shorter ones the fixed cost dominates. The same on all members.
  size_t least_pair_bytes = size_t{16} << 10;
  // Some host has several of the ranks, which share its network link. Among many ranks, MPI then
  // does long all-reduces, because its messages stay mostly inside hosts. The same on all members.
  bool shares_hosts = false;
  // Messages in flight in each direction of a gather, a scatter or an all_to_all.
  size_t stream_slots = 16;
  // In reductions by MPI, by pairs and along a chain, float16 and bfloat16 travel as float32, and
  // are rounded once, not per hop. The same on all members.
  bool halves_as_float32 = false;
  // Up to this many ranks are "few" and send their headers to each other in one hop. Among more
  // ranks MPI reduces the headers, up and down a tree. The same on all members.
  int few_ranks = 8;
  MpiWaitPolicy wait_policy;
};

struct Pieces;

class MpiTeam final : public Team {
 public:
  // MPI's counts and offsets are int.
  static constexpr size_t kMostChunkBytes = size_t{1} << 30;

  // `data` and `check` contain the members in their order; the Team owns them and nothing else may
  // use them. A Team of few ranks, or one that only makes gathers, scatters and all_to_alls, needs
  // no `check`: pass MPI_COMM_NULL. `detector` outlives the Team. Does not communicate.
  MpiTeam(MPI_Comm data, MPI_Comm check, FailureDetector& detector, MpiTeamOptions options);
  ~MpiTeam() override;

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(options_.members.size()); }
  std::string describe() const override { return "mpi, " + std::to_string(size()) + " ranks"; }

  void abort(const Status& cause) override;
  Status failure() override;
  Status death() override;
  Status failure_in(uint64_t call) override;
  void set_parent(const Team* parent) override { counts_calls_ = parent; }
  uint64_t finished_calls() const override {
    return finished_calls_.load(std::memory_order_relaxed);  // relaxed: guards no data
  }
  void compare_calls(bool always) override { detector_.compare_calls(options_.id, always); }
  bool takes_chunks() const override { return true; }
  size_t piece_bytes() const override { return message_bytes(); }
  size_t least_chunk_bytes() const override {
    return is_few() ? 0 : kInFlight * options_.members.size() * options_.least_pair_bytes;
  }

 private:
  Status begin_call(Call& call) override {
    record_ = &call.record;
    return {};
  }
  Status run_all_reduce(const std::byte* in, std::byte* out, size_t count,
                        const Reduction& reduction, const CallOptions& options) override;
  Status run_broadcast(std::byte* buffer, size_t count, DType dtype, int root,
                       const CallOptions& options) override;
  Status run_reduce(const std::byte* in, std::byte* out, size_t count, const Reduction& reduction,
                    int root, const CallOptions& options) override;
  Status run_all_gather(const std::byte* in, size_t count, DType dtype, Outputs outs,
                        Counts out_counts, const CallOptions& options) override;
  Status run_reduce_scatter(Inputs ins, Counts counts, std::byte* out, const Reduction& reduction,
                            const CallOptions& options) override;
  Status run_gather(const std::byte* in, size_t count, DType dtype, Outputs outs, Counts out_counts,
                    int root, const CallOptions& options) override;
  Status run_scatter(Inputs ins, Counts in_counts, std::byte* out, size_t count, DType dtype,
                     int root, const CallOptions& options) override;
  Status run_all_to_all(Inputs ins, Counts in_counts, Outputs outs, Counts out_counts, DType dtype,
                        const CallOptions& options) override;
  Status run_barrier(const CallOptions& options) override;

  // Progress in a call; a later phase is a greater number.
  enum class CallPhase : uint64_t { kEntering = 0, kMoving = 1 };
  class Monitor;

  // The longest message to one rank, which MPI should send eagerly: in bytes, and in elements.
  size_t message_bytes() const { return std::min(options_.chunk_bytes, options_.message_bytes); }
  size_t piece_of_message(size_t element_bytes) const {
    return std::max<size_t>(message_bytes() / element_bytes, 1);
  }
  // Starts to send piece `number` of a stream. MPI buffers messages without a posted receive; to
  // bound that memory, every kSendsAhead-th message completes only when its receive is posted.
  int send_piece(const void* data, size_t bytes, size_t number, int rank, int tag,
                 MPI_Request* request) const {
    const bool waits = number % kSendsAhead == kSendsAhead - 1;
    return (waits ? MPI_Issend : MPI_Isend)(data, static_cast<int>(bytes), MPI_BYTE, rank, tag,
                                            data_, request);
  }
  // The elements of a piece, if in a round a rank sends one piece to each rank, or one to all.
  size_t piece_of_each(size_t element_bytes) const;
  // Shortens `piece` (elements) if values arrive in chunks, so that the rounds in flight cover at
  // most two chunks and no piece crosses the end of a ring.
  size_t within_chunks(size_t piece) const;

  // The piece and step of a round: see Order.
  struct Turn {
    size_t piece;
    size_t step;     // from 1
    bool is_second;  // see Order::twice
  };
  // The piece of every block that a round moves. By default round r moves piece r. With more
  // `steps` a piece takes that many rounds, which share the index round / steps. With `twice`, each
  // piece passes all steps twice: index 2p is the first pass of piece p, 2p + 1 the second pass of
  // piece p - 1; the first odd index and the last even one are idle.
  struct Order {
    size_t steps = 1;
    bool twice = false;

    size_t rounds(size_t pieces) const {
      return twice && pieces > 0 ? 2 * (pieces + 1) * steps : pieces * steps;
    }
    Turn turn(size_t round) const {
      const size_t index = round / steps, step = 1 + round % steps;
      if (!twice) return {index, step, false};
      // A piece after the last one, or before the first (it wraps around), has no elements.
      return {index / 2 - index % 2, step, index % 2 == 1};
    }
    // begun(): how many pieces' values a round needs. ended(): how many have results after it.
    size_t begun(size_t round) const { return round / steps / (twice ? 2 : 1) + 1; }
    size_t ended(size_t round) const {
      const size_t indices = (round + 1) / steps;
      return twice ? std::max<size_t>(indices / 2, 1) - 1 : indices;
    }
  };

  // The rounds of a call; each block is cut into pieces of `piece` elements.
  struct Rounds {
    Rounds(size_t piece_elements, size_t round_bytes) : piece(piece_elements), bytes(round_bytes) {}

    const size_t piece;
    const size_t bytes;  // staging that a round needs on this rank
    Order order;
    // Copies this rank's pieces into staging; for round 0, before the ranks have agreed.
    std::function<void(size_t round, std::byte* staging)> stage;
    // Starts MPI's operations on staging.data() and returns MPI's code.
    std::function<int(size_t round, MpiStaging& staging)> start;
    // Optional second step of a round: starts once the first is complete. If the steps are MPI
    // collectives, all ranks must have it.
    std::function<int(size_t round, MpiStaging& staging)> start_second;
    // Copies results to user memory.
    std::function<void(size_t round, std::byte* staging)> deliver;
    // Whether the first rounds may start before the ranks have agreed. Only if nothing is truncated
    // whatever the others call, and ranks that agree have the same number of rounds.
    bool goes_ahead = false;
    HeaderRoute way;  // of the headers
  };

  // Whether all values of a call with blocks of up to `count` elements exist on every rank when the
  // call begins: without chunks, or if all are in the first (see Chunks). All get the same answer.
  static bool all_is_there(const Chunks* chunks, size_t count) {
    return chunks == nullptr || count <= chunks->count;
  }

  // Fails if the Team has failed, else prepares the CallHeader of the next call, whose longest
  // block on any rank has `longest` elements.
  Status begin(size_t longest, const CallOptions& options);
  // Like begin(), for a call whose counts differ between ranks; splits_ holds those that this rank
  // knows. `only_receives`: no rank needs anything from this one, so its senders may have left.
  Status begin_splits(const CallOptions& options, bool only_receives = false);
  // begin() for a call whose headers go in one direction among few ranks.
  Status begin_one_way(size_t count, const HeaderRoute& way, const CallOptions& options);
  // The reductions. Call them after begin().
  Status reduce_small(const void* in, void* out, size_t count, const Reduction& reduction,
                      int root);
  Status reduce_by_swap(const void* in, void* out, size_t count, const Reduction& reduction);
  Status reduce_by_mpi(const void* in, void* out, size_t count, const Reduction& reduction,
                       int root);
  Status reduce_by_plan(const void* in, void* out, size_t count, const Reduction& reduction,
                        PersistentAllReduce& prepared);
  Status reduce_by_exchange(const void* in, void* out, size_t count, const Reduction& reduction);
  // Whether data goes in shares: 3 to few_ranks ranks, all values exist, a share fits a message.
  bool fits_shares(size_t count, size_t element_bytes, int shares, const Chunks* chunks) const;
  Status reduce_by_shares(const void* in, void* out, size_t count, const Reduction& reduction,
                          int root);
  Status broadcast_by_shares(void* buffer, size_t count, size_t element_bytes, int root);
  template <typename ShareOf, typename Gets>
  Status spread_shares(const Pieces& shares, void* out, size_t count, const ShareOf& share_of,
                       const Gets& gets);
  // By pairs, among many ranks. `piece`: elements of a message; in an all-reduce, of all shares.
  bool fits_pairs(size_t bytes_of_message) const;
  // The length of a piece if `count` elements are cut into equal pieces of at most `most`.
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
                            const HeaderRoute& way);
  Status broadcast_along_chain(void* buffer, size_t count, DType dtype, const HeaderRoute& way);
  // Implements gather, scatter and all_to_all.
  class Exchange;
  Status exchange_blocks(std::span<const void* const> ins, std::span<void* const> outs,
                         const CallOptions& options);
  // The PersistentAllReduce of the current call, perhaps not prepared yet; null if it has none.
  PersistentAllReduce* find_prepared(size_t count, const Reduction& reduction);
  WireReduction on_wire(const Reduction& reduction) const;
  bool fits_header(size_t count, const Reduction& reduction) const;
  void reduce_in_order(void* results, const void* own, const std::byte* others, size_t stride,
                       size_t count, const Reduction& reduction);

  bool is_few() const { return size() <= options_.few_ranks; }
  // Bytes that can be piggybacked.
  size_t piggyback_room() const {
    return is_few() ? kPiggybackBytesOfFew / static_cast<size_t>(size() - 1) : kPiggybackBytes;
  }
  // Returns memory for piggybacked data. If MPI reduces it (many ranks), all ranks pass one length.
  std::byte* piggyback(size_t bytes);
  std::byte* piggyback_to_be_reduced(DType dtype, ReduceOp op, size_t count);
  // Like piggyback(), with up to message_bytes() of different data for each rank. Only if is_few().
  std::byte* piggyback_to(int k, size_t bytes);
  // Call after agree(). The data that rank k piggybacked, if is_few(); else the reduced data.
  std::byte* was_piggybacked(int k) { return slot(1 + k) + heading_bytes(); }
  std::byte* received_reduced() { return was_piggybacked(0); }
  // A slot of header_staging_: 0 is this rank's CallHeader; 1 + k is rank k's or, among many ranks,
  // 1 is the combined one. Among few ranks, slot_to(k) is this rank's CallHeader for rank k.
  std::byte* slot(int index) {
    return header_staging_.data() + static_cast<size_t>(index) * slot_bytes();
  }
  std::byte* slot_to(int k) { return slot(1 + size() + k); }
  size_t slot_bytes() const {
    return is_few() ? heading_bytes() + std::max(piggyback_room(), message_bytes())
                    : sizeof(CallHeader);
  }
  // Bytes before the piggybacked data. Few ranks also exchange their calls.
  size_t heading_bytes() const {
    return is_few() ? sizeof(HeaderFields) + sizeof(CallRecord) : sizeof(HeaderFields);
  }
  void fill_header(std::byte* slot) const;
  // Waits until all ranks have made the call and agree; header_ is then the combined header. If
  // headers go in one direction, waits only for those to this rank, and checks that they agree.
  Status agree(const HeaderRoute& way = {});
  Status start_header(const HeaderRoute& way = {});
  Status finish_header();
  Status disagree();
  Status differs(const CallRecord& theirs, int rank);
  Team& outermost() { return parent_ != nullptr ? *parent_ : *this; }
  // If `asks`, makes all ranks compare their last calls; if not, another rank does. Then waits for
  // at most kDifferenceWait until the comparison ends the Team.
  Status find_difference(bool asks);
  // Counts a message to a rank that may not have taken the previous ones. Returns whether the
  // message must complete only when its receive is posted, which bounds MPI's buffers for the rank.
  bool note_sent(int rank, size_t bytes) {
    size_t& unread = unreceived_bytes_[static_cast<size_t>(rank)];
    unread += std::max(bytes, kMostUnreceivedBytes / kSendsAhead);
    return unread >= kMostUnreceivedBytes;
  }
  // Call when `rank` has entered the current call, or has begun to receive a message for which
  // note_sent() returned true.
  void note_receiving(int rank) { unreceived_bytes_[static_cast<size_t>(rank)] = 0; }
  // This rank has completed the call.
  Status finished() {
    if (!awaited_.empty()) await_all();
    finished_calls_.store(sequence_, std::memory_order_relaxed);  // relaxed: guards no data
    return {};
  }
  // agree(), then the rounds.
  Status run(const Rounds& rounds);

  // Waits until the operations are complete or can no longer complete.
  Status wait(MpiStaging& staging, CallPhase phase);
  // Like wait(), until `poll` returns true.
  Status wait_with(const std::function<Result<bool>()>& poll, CallPhase phase);
  Status end_of_wait(const Status& status);
  template <typename Call>
  Status check(const char* name, const Call& call) {
    const guard::CallDeadline calls_end(*deadline_);
    const int code = guarded(call);
    return code == MPI_SUCCESS ? Status() : refused(mpi_error(name, code));
  }
  // Ends this Team if `status`, of its parent team, is a failure.
  Status end(const Status& status);
  // Fails after an error of MPI, with the failure detector's reason if it soon has one.
  Status refused(const Status& status);

  // Ends the Team with a cause that this rank found in the current call; an earlier cause wins.
  Status fail(Code code, const std::string& cause);
  // Like fail(code, cause); does nothing if `cause` is OK.
  Status fail(const Status& cause) {
    return cause.ok() ? Status() : fail(cause.code(), cause.message());
  }
  Status timed_out(CallPhase phase, const std::vector<Answer>& answers);
  // Reads new failure notices; a single load if there are none.
  void read_failure_notices();
  // Updates died_ and left_ from the awaited ranks.
  void find_missing_members();
  // In a one-way call, notes which headers have come: their senders may have finished the call.
  void note_headers();
  // A message came: ranks that have left may have more in transit, so their grace starts again.
  void note_arrival() {
    if (!left_.ok() && died_.ok()) gone_since_ns_ = monotonic_ns();
  }
  bool awaits(int rank) const { return awaited_.empty() || awaited_[static_cast<size_t>(rank)]; }
  void await_all();
  // Fails if a missing member keeps the call from completing.
  Status check_missing_members(CallPhase phase);
  Status fail_because_member_left();
  // The names of those `members` that gave `answer` and are not known to have died or left.
  std::string names_of(const std::vector<MpiTeamMember>& members,
                       const std::vector<Answer>& answers, Answer answer) const;

  // For the log.
  void note(Collective kind, const char* algorithm, size_t bytes) const {
    if (tally_ != nullptr) tally_->add(kind, algorithm, bytes);
  }

  std::string name_of(int member) const { return options_.members[member].name; }
  std::string name_call() const;
  uint64_t position(CallPhase phase) const { return 2 * sequence_ + static_cast<uint64_t>(phase); }

  MPI_Comm data_;
  MPI_Comm check_;
  FailureDetector& detector_;
  const MpiTeamOptions options_;
  int rank_ = 0;
  int rank_in_group_ = 0;
  CallerName caller_;

  uint64_t sequence_ = 0;
  uint64_t history_ = 0;                // see CallOptions; of this Team, if it has no parent
  const CallRecord* record_ = nullptr;  // of the current call
  CallRecord call_;                     // *record_, or that of the parent's call
  Team* parent_ = nullptr;              // parent team, see CallOptions
  const Deadline* deadline_ = nullptr;  // of the current call
  const Chunks* chunks_ = nullptr;      // see CallOptions
  uint64_t plan_ = 0;                   // see CallOptions
  Splits splits_;
  HeaderRoute way_;
  HeaderFields header_;
  size_t piggybacked_bytes_ = 0;
  size_t following_bytes_ = 0;                // of data sent after the headers, to their receivers
  std::vector<size_t> piggybacked_bytes_to_;  // by rank; empty: all get the same
  MpiStaging header_staging_;
  size_t header_receives_ = 0;            // the first requests of header_staging_
  static constexpr size_t kInFlight = 4;  // rounds
  static constexpr size_t kSendsAhead = 8;
  static constexpr size_t kMostUnreceivedBytes = size_t{128} << 10;
  std::vector<size_t> unreceived_bytes_;  // by rank; see note_sent()
  std::array<MpiStaging, kInFlight> staging_;
  // By plan (see CallOptions), count, dtype and op. The factor of PREMUL_SUM is no part of the key,
  // because it is applied before MPI gets the values.
  std::map<std::tuple<uint64_t, size_t, DType, ReduceOp>, PersistentAllReduce> prepared_;
  std::vector<const void*> sources_;  // of a reduction; a member, to save an allocation per round
  std::unique_ptr<CallTally> tally_;  // null unless calls are logged

  // The failure detector's state when the waiting thread last read it.
  uint64_t seen_count_ = 0;
  std::vector<bool> awaited_;          // by rank; empty: the call needs every rank until it ends
  std::vector<bool> may_be_finished_;  // by rank: may have done its part; empty: none
  bool has_ended_ = false;  // a rank has ended the Team, perhaps after it finished the call
  Status died_, left_;
  std::string advice_;  // for left_
  int64_t gone_since_ns_ = 0;

  const Team* counts_calls_ = nullptr;  // see set_parent(); null: this Team
  std::atomic<uint64_t> finished_calls_{0};

  FirstCause cause_;
  std::atomic<uint64_t> failure_count_{
      0};  // FailureDetector::count() when failure() last found nothing; relaxed
};

inline std::byte* byte_at(void* base, size_t offset) {
  return static_cast<std::byte*>(base) + offset;
}
inline const std::byte* byte_at(const void* base, size_t offset) {
  return static_cast<const std::byte*>(base) + offset;
}

// How many of `count` elements are in piece `round`.
inline size_t in_round(size_t count, size_t piece, size_t round) {
  const size_t begin = round * piece;
  return begin < count ? std::min(piece, count - begin) : 0;
}

// Copies piece `round` of a block of `count` elements between user memory and staging. An empty
// block may be null.
struct Pieces {
  size_t piece;  // elements
  size_t element_bytes;
  const Chunks* chunks = nullptr;  // set if the block may lie in a ring (see Chunks)

  // The index of the block's `element` in a ring of `ring` elements; 0: the block is no ring.
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
  // Copies within user memory; both blocks may be the same.
  void copy(void* to, const void* from, size_t count, size_t round) const {
    if (to != from && bytes_of(count, round) > 0)
      deliver(to, byte_at(from, round * bytes()), count, round);
  }

  // Writes MPI's lengths and offsets of all ranks' blocks, which lie bytes() apart in staging. The
  // block of rank `me`, if not kNone, stays in user memory.
  static constexpr size_t kNone = SIZE_MAX;
  void list(std::span<const size_t> block_counts, size_t me, size_t round, int* lengths,
            int* offsets) const {
    for (size_t k = 0; k < block_counts.size(); ++k) {
      lengths[k] = k == me ? 0 : static_cast<int>(bytes_of(block_counts[k], round));
      offsets[k] = static_cast<int>(k * bytes());
    }
  }
};

// One share per rank; the last ones may be shorter or empty.
inline Pieces shares_of(size_t count, int ranks, size_t element_bytes) {
  const auto shares = static_cast<size_t>(ranks);
  return {(count + shares - 1) / shares, element_bytes, nullptr};
}

}  // namespace dscomm
