// Construction, the common frame of all calls, and failures. The collectives are in
// mpi_team_reduce.cc, mpi_team_move.cc, mpi_team_chain.cc, mpi_team_shares.cc, mpi_team_pairs.cc
// and mpi_team_exchange.cc.

#include "mpi/mpi_team.h"

#include <chrono>
#include <utility>

#include "core/base/format.h"
#include "core/base/timeout_advice.h"
#include "core/team/mismatch.h"
#include "mpi/abandonable.h"

namespace dscomm {
namespace {

// How often a wait asks the parent team (parent_) whether it has failed.
constexpr int64_t kAskEveryNs = 1'000'000;
// A rank makes all ranks compare their calls after a wait this long (at most a tenth of the
// timeout), and again each time the wait has doubled. From the fourth rank on, ranks wait longer.
constexpr int64_t kCompareAfterNs = 100'000'000;

// A live rank answers a stall probe (timed_out()) within this time, even on an overloaded machine.
// At most a twentieth of the timeout. It is less than a step of HierarchicalTeam::later(), because
// ranks inside the host that wait for this one time out a step later, and know less.
constexpr int64_t kAnswerMs = 150;
// All ranks of a Team time out together, and then ask the others how far they are. If all asked at
// once, each pair of ranks would exchange an answer. So only ranks 0 to 2 ask at once, and the
// others wait first, because an answer to ranks 0 to 2 may end the Team: ranks 3 to 14 wait one
// step, ranks 15 to 62 two, and so on. A step is at most a tenth of the timeout.
constexpr int64_t kAskStepMs = 100;

MpiTeamOptions bounded(MpiTeamOptions options) {
  options.chunk_bytes = std::min(options.chunk_bytes, MpiTeam::kMostChunkBytes);
  if (options.group.empty()) options.group = options.members;
  return options;
}

constexpr int kHeaderTag = 1;

}  // namespace

// Watches a wait of the current call.
class MpiTeam::Monitor final : public MpiWaitMonitor {
 public:
  Monitor(MpiTeam& team, CallPhase phase) : team_(team), phase_(phase) {}

  Status check(int64_t waited_ns) override {
    DSCOMM_RETURN_IF_ERROR(team_.cause_.get());
    team_.read_failure_notices();
    if (team_.has_ended_) {
      const Status end = ends_.check(team_.call_.number(),
                                     [this](uint64_t call) { return team_.failure_in(call); });
      if (!end.ok()) return team_.cause_.keep(end);
    }
    if (team_.parent_ != nullptr && waited_ns >= next_ask_ns_) {
      next_ask_ns_ = waited_ns + kAskEveryNs;
      Team& parent = *team_.parent_;
      DSCOMM_RETURN_IF_ERROR(team_.end(aborts_.check(
          team_.call_.number(), [&](uint64_t call) { return parent.failure_in(call); })));
    }
    if (waited_ns >= next_comparison_ns_) {
      next_comparison_ns_ = 2 * waited_ns;
      team_.outermost().compare_calls(false);
    }
    waited_ns_ = waited_ns;
    return team_.check_missing_members(phase_);
  }

  // Asks all ranks how far they are, so that the error names those that do not answer or are late.
  // While this rank waits for the answers, another rank that knows the cause may end the Team.
  Status timed_out() override {
    team_.outermost().compare_calls(false);
    FailureDetector& detector = team_.detector_;
    const int64_t timeout_ms = team_.deadline_->timeout_ms();
    const Deadline turn = Deadline::after(
        std::chrono::milliseconds(step_of(team_.rank_) * std::min(kAskStepMs, timeout_ms / 10)));
    while (!turn.expired()) DSCOMM_RETURN_IF_ERROR(nap(turn));
    const uint64_t question = detector.ask(team_.options_.id, team_.position(phase_));
    const Deadline limit =
        Deadline::after(std::chrono::milliseconds(std::min(kAnswerMs, timeout_ms / 20)));
    TimeLeft time_left(limit);
    std::vector<Answer> answers;
    Status status;
    while (status.ok()) {
      answers = detector.answers(question);
      const int64_t left_ns = time_left.ns();
      if (left_ns <= 0 || team_.names_of(team_.options_.group, answers, Answer::kSilent).empty())
        break;
      status = nap(limit);
    }
    if (status.ok())
      status = check(waited_ns_);  // includes a difference of calls, if one was found
    detector.close_question(question);
    return status.ok() ? team_.timed_out(phase_, answers) : status;
  }

 private:
  static int64_t step_of(int rank) {
    int64_t step = 0;
    for (++rank; rank >= 4; rank /= 4) ++step;
    return step;
  }
  // Used after the deadline.
  Status nap(const Deadline& limit) {
    DSCOMM_RETURN_IF_ERROR(check(waited_ns_ + kAskEveryNs));
    limit.nap(kAskEveryNs);
    return {};
  }

  MpiTeam& team_;
  const CallPhase phase_;
  AbortMonitor aborts_, ends_;
  int64_t waited_ns_ = 0, next_ask_ns_ = kAskEveryNs;
  // Staggered, so that most ranks see an earlier rank's comparison and need not start one.
  int64_t next_comparison_ns_ = (1 + step_of(team_.rank_in_group_)) *
                                std::min(kCompareAfterNs, team_.deadline_->timeout_ms() * 100'000);
};

MpiTeam::MpiTeam(MPI_Comm data, MPI_Comm check, FailureDetector& detector, MpiTeamOptions options)
    : data_(data),
      check_(check == MPI_COMM_NULL ? data : check),
      detector_(detector),
      options_(bounded(std::move(options))),
      unreceived_bytes_(options_.members.size()),
      tally_(CallTally::make(options_.name, describe())) {
  int size_in_mpi = 0;
  // Neither call communicates.
  MPI_Comm_rank(check_, &rank_);
  MPI_Comm_size(check_, &size_in_mpi);
  DSCOMM_CHECK(size_in_mpi == size(), "the communicators join the members");
  const auto own = std::ranges::find(options_.group, options_.members[rank_].transport_rank,
                                     &MpiTeamMember::transport_rank);
  rank_in_group_ = static_cast<int>(own - options_.group.begin());
  caller_ = {name_of(rank_), options_.name};
  // Makes MPI return its errors where it can; by default they end the process.
  MPI_Comm_set_errhandler(data_, MPI_ERRORS_RETURN);
  MPI_Comm_set_errhandler(check_, MPI_ERRORS_RETURN);
  detector_.note_position(options_.id, 0);
}

MpiTeam::~MpiTeam() {
  detector_.forget(options_.id);
  int is_finalized = 0;
  MPI_Finalized(&is_finalized);
  // A failed Team may have left MPI requests pending, here or on other ranks.
  if (is_finalized || !failure().ok()) return;
  // Every call is complete, so no message for this rank is in transit, unless the ranks' last calls
  // differed and this rank did not wait for the others in its last call.
  for (auto& [key, prepared] : prepared_) prepared.release();
  if (check_ != data_) (void)guarded([&] { return MPI_Comm_free(&check_); });
  (void)guarded([&] { return MPI_Comm_free(&data_); });
}

Status MpiTeam::begin(size_t longest, const CallOptions& options) {
  splits_.clear(0);
  DSCOMM_RETURN_IF_ERROR(begin_splits(options));
  header_.longest = longest;
  return {};
}

Status MpiTeam::begin_one_way(size_t count, const HeaderRoute& way, const CallOptions& options) {
  awaited_.clear();
  may_be_finished_.clear();
  for (int k = 0; k < size(); ++k) {
    const bool is_partner = way.has(rank_, k) || way.has(k, rank_);
    awaited_.push_back(is_partner || way.chain > 0);  // neighbours in a chain wait for their own
                                                      // neighbours
    may_be_finished_.push_back(!way.has(rank_, k));
  }
  DSCOMM_RETURN_IF_ERROR(begin(count, options));
  for (int k = 0; k < size(); ++k)
    if (way.has(k, rank_)) {
      // Messages that rank k sent before it left may still arrive.
      may_be_finished_[static_cast<size_t>(k)] = false;
      gone_since_ns_ = monotonic_ns();
    }
  find_missing_members();
  return {};
}

Status MpiTeam::begin_splits(const CallOptions& options, bool only_receives) {
  // Ignores the abort of a rank that has finished this call: others may still need this rank's
  // part. See Team::failure_in().
  if (!failure_in(options.parent_call != nullptr ? options.parent_call->number() : sequence_ + 1)
           .ok())
    return failure();
  deadline_ = &options.deadline;
  parent_ = options.parent;
  chunks_ = options.chunks;
  plan_ = options.plan;
  call_ = as_sub_call(*record_, options);
  call_.sequence = ++sequence_;
  if (options.parent_call == nullptr) detector_.note_call(options_.id, call_, caller_);
  read_failure_notices();
  // A rank that is gone cannot make this call, so it gets no grace. But if this rank only receives,
  // messages that a rank sent before it left may still arrive.
  gone_since_ns_ = -kGraceOfLeaversNs;
  DSCOMM_RETURN_IF_ERROR(
      check_missing_members(only_receives ? CallPhase::kMoving : CallPhase::kEntering));
  if (only_receives) gone_since_ns_ = monotonic_ns();
  // A call with `meanwhile` notes its position in Exchange::run(), after meanwhile() has returned:
  // until then other ranks may wait for this one inside meanwhile().
  if (options.meanwhile == nullptr)
    detector_.note_position(options_.id, position(CallPhase::kEntering));

  // The memory is free: the previous call is complete.
  const int slots = is_few() ? 1 + 2 * size() : 2;
  DSCOMM_RETURN_IF_ERROR(
      fail(header_staging_.reserve(static_cast<size_t>(slots) * slot_bytes(), 0)));
  piggybacked_bytes_ = following_bytes_ = 0;
  piggybacked_bytes_to_.clear();
  header_ = {};
  header_.hash = hash_call(mix_hash(history_, options_.id), call_);
  if (options.parent_call == nullptr) history_ = hash_call(history_, call_);
  header_.complement = ~header_.hash;
  header_.balance = splits_.balance(rank_);
  header_.longest = splits_.longest();
  return {};
}

std::byte* MpiTeam::piggyback(size_t bytes) {
  piggybacked_bytes_ = bytes;
  return slot(0) + heading_bytes();
}

std::byte* MpiTeam::piggyback_to_be_reduced(DType dtype, ReduceOp op, size_t count) {
  header_.dtype = static_cast<uint8_t>(dtype);
  header_.op = static_cast<uint8_t>(op);
  header_.count = static_cast<uint32_t>(count);
  return piggyback(count * dtype_bytes(dtype));
}

std::byte* MpiTeam::piggyback_to(int k, size_t bytes) {
  piggybacked_bytes_to_.resize(static_cast<size_t>(size()));
  piggybacked_bytes_to_[static_cast<size_t>(k)] = bytes;
  return slot_to(k) + heading_bytes();
}

Status MpiTeam::agree(const HeaderRoute& way) {
  DSCOMM_RETURN_IF_ERROR(start_header(way));
  return finish_header();
}

void MpiTeam::fill_header(std::byte* slot) const {
  std::memcpy(slot, &header_, sizeof header_);
  if (is_few()) std::memcpy(slot + sizeof header_, &call_, sizeof call_);
}

Status MpiTeam::start_header(const HeaderRoute& way) {
  way_ = way;
  fill_header(slot(0));
  if (!is_few()) {
    Result<HeaderType> header = header_type();
    if (!header.ok()) return fail(header.status());
    return check("MPI_Iallreduce", [&] {
      return MPI_Iallreduce(slot(0), slot(1), 1, header.value().type, header.value().op, check_,
                            header_staging_.add_request());
    });
  }
  const auto room = static_cast<int>(slot_bytes());
  for (int k = 0; k < size(); ++k)
    if (way.has(k, rank_))
      DSCOMM_RETURN_IF_ERROR(check("MPI_Irecv", [&] {
        return MPI_Irecv(slot(1 + k), room, MPI_BYTE, k, kHeaderTag, check_,
                         header_staging_.add_request());
      }));
  header_receives_ = header_staging_.requests.size();
  // Starts with the next rank, so that not all ranks send to the same one first.
  for (int i = 1; i < size(); ++i) {
    const int k = (rank_ + i) % size();
    if (!way.has(rank_, k)) continue;
    const bool is_own = !piggybacked_bytes_to_.empty();
    if (is_own) fill_header(slot_to(k));
    const size_t bytes = heading_bytes() + (is_own ? piggybacked_bytes_to_[static_cast<size_t>(k)]
                                                   : piggybacked_bytes_);
    const bool waits = way.is_one_way() && note_sent(k, bytes + following_bytes_);
    DSCOMM_RETURN_IF_ERROR(check("MPI_Isend", [&] {
      return (waits ? MPI_Issend : MPI_Isend)(is_own ? slot_to(k) : slot(0),
                                              static_cast<int>(bytes), MPI_BYTE, k, kHeaderTag,
                                              check_, header_staging_.add_request());
    }));
  }
  return {};
}

Status MpiTeam::finish_header() {
  // In a chain, compare calls with the predecessor without waiting for the successor.
  const auto has_predecessors = [this] {
    return test_all(&header_staging_.requests, header_receives_);
  };
  DSCOMM_RETURN_IF_ERROR(way_.chain > 0 ? wait_with(has_predecessors, CallPhase::kEntering)
                                        : wait(header_staging_, CallPhase::kEntering));
  const uint64_t own_hash = header_.hash;
  if (is_few()) {
    for (int k = 0; k < size(); ++k) {
      if (!way_.has(k, rank_)) continue;
      HeaderFields other;
      CallRecord theirs;
      std::memcpy(&other, slot(1 + k), sizeof other);
      std::memcpy(&theirs, slot(1 + k) + sizeof other, sizeof theirs);
      if (other.hash != own_hash) return differs(theirs, k);
      note_receiving(k);
      if (!may_be_finished_.empty()) may_be_finished_[static_cast<size_t>(k)] = true;
      header_.combine(other);
    }
  } else {
    std::memcpy(&header_, slot(1), sizeof header_);
    unreceived_bytes_.assign(unreceived_bytes_.size(), 0);  // all ranks are in the call
  }
  if (way_.chain > 0) DSCOMM_RETURN_IF_ERROR(wait(header_staging_, CallPhase::kEntering));
  for (int k = 0; k < size(); ++k)
    if (way_.has(rank_, k) && unreceived_bytes_[static_cast<size_t>(k)] >= kMostUnreceivedBytes)
      note_receiving(k);
  if (!header_.ranks_agree()) return disagree();
  detector_.note_position(options_.id, position(CallPhase::kMoving));
  return {};
}

// The first difference may be in an earlier call, which this rank finished without the other rank.
// The rank that finds the difference ends the Team.
Status MpiTeam::differs(const CallRecord& theirs, int rank) {
  DSCOMM_RETURN_IF_ERROR(find_difference(true));
  if (describe_call(theirs) == describe_call(call_) && theirs.number() == call_.number())
    return fail(Code::kMismatch, explain_lost_difference(call_));
  return fail(Code::kMismatch,
              describe_mismatch({rank_, call_, name_of(rank_)}, {rank, theirs, name_of(rank)}));
}

Status MpiTeam::find_difference(bool asks) {
  const auto check_teams = [this] { return end(outermost().failure_in(kAnyCall)); };
  DSCOMM_RETURN_IF_ERROR(check_teams());
  if (asks) outermost().compare_calls(true);
  const Deadline limit = Deadline::after(
      std::min(kDifferenceWait, std::chrono::milliseconds(deadline_->timeout_ms() / 20)));
  while (!limit.expired()) {
    DSCOMM_RETURN_IF_ERROR(check_teams());
    limit.nap(kAskEveryNs);
  }
  return {};
}

// All ranks detect a mismatch, so all call this: they exchange their calls and counts.
Status MpiTeam::disagree() {
  const auto ranks = static_cast<size_t>(size());
  const std::vector<std::byte> mine = encode_side(call_, splits_, ranks);
  MpiStaging& staging = header_staging_;
  DSCOMM_RETURN_IF_ERROR(fail(staging.reserve((1 + ranks) * mine.size(), 0)));
  std::byte* sides = staging.data() + mine.size();
  std::memcpy(staging.data(), mine.data(), mine.size());
  const int bytes = static_cast<int>(mine.size());
  DSCOMM_RETURN_IF_ERROR(check("MPI_Iallgather", [&] {
    return MPI_Iallgather(staging.data(), bytes, MPI_BYTE, sides, bytes, MPI_BYTE, check_,
                          staging.add_request());
  }));
  DSCOMM_RETURN_IF_ERROR(wait(staging, CallPhase::kMoving));
  // With equal hashes, only counts differ.
  if (header_.hash != ~header_.complement) DSCOMM_RETURN_IF_ERROR(find_difference(rank_ == 0));
  std::vector<std::string> names;
  for (const MpiTeamMember& member : options_.members) names.push_back(member.name);
  return fail(Code::kMismatch, explain_mismatch({sides, ranks * mine.size()}, names));
}

// Round r uses staging r mod 4: while MPI works on some rounds, another is delivered and its
// staging filled again. MPI requires that all ranks start collectives in the same order: rounds 0,
// 1, 2, the second step of round 0, round 3, the second step of round 1, and so on.
Status MpiTeam::run(const Rounds& rounds) {
  constexpr size_t kUntilSecond = kInFlight / 2;
  const auto table_entries = 2 * static_cast<size_t>(size());  // to send and to receive
  // Reserve for all rounds: a block of one piece here may have several pieces on other ranks.
  for (MpiStaging& staging : staging_)
    DSCOMM_RETURN_IF_ERROR(fail(staging.reserve(rounds.bytes, table_entries)));

  DSCOMM_RETURN_IF_ERROR(start_header(rounds.way));
  rounds.stage(0, staging_[0].data());
  if (!rounds.goes_ahead) DSCOMM_RETURN_IF_ERROR(finish_header());
  // If headers go one way, the receivers of this rank's messages may not be in the call yet.
  const CallPhase phase = rounds.way.is_one_way() ? CallPhase::kEntering : CallPhase::kMoving;
  // A second step forwards data, which must be of a verified call, so fewer rounds start ahead.
  const size_t ahead = rounds.start_second == nullptr ? kInFlight : kUntilSecond;
  const size_t round_count =
      rounds.order.rounds((header_.longest + rounds.piece - 1) / rounds.piece);

  for (size_t round = 0; round < round_count + kInFlight; ++round) {
    MpiStaging& staging = staging_[round % kInFlight];
    if (round >= kInFlight && round - kInFlight < round_count) {
      DSCOMM_RETURN_IF_ERROR(wait(staging, phase));
      rounds.deliver(round - kInFlight, staging.data());
      if (chunks_ != nullptr && chunks_->consume)
        DSCOMM_RETURN_IF_ERROR(
            end(chunks_->consume(rounds.order.ended(round - kInFlight) * rounds.piece)));
    }
    if (round < round_count) {
      if (chunks_ != nullptr && chunks_->make)
        DSCOMM_RETURN_IF_ERROR(end(chunks_->make(rounds.order.begun(round) * rounds.piece)));
      if (round > 0) rounds.stage(round, staging.data());
      DSCOMM_RETURN_IF_ERROR(
          check("MPI's operation", [&] { return rounds.start(round, staging); }));
    }
    if (rounds.goes_ahead && round + 1 == std::min(ahead, round_count))
      DSCOMM_RETURN_IF_ERROR(finish_header());
    if (rounds.start_second != nullptr && round >= kUntilSecond &&
        round - kUntilSecond < round_count) {
      MpiStaging& before = staging_[(round - kUntilSecond) % kInFlight];
      DSCOMM_RETURN_IF_ERROR(wait(before, phase));
      DSCOMM_RETURN_IF_ERROR(check(
          "MPI's operation", [&] { return rounds.start_second(round - kUntilSecond, before); }));
    }
  }
  return finished();
}

size_t MpiTeam::piece_of_each(size_t element_bytes) const {
  const size_t chunk = options_.chunk_bytes / static_cast<size_t>(size());
  const size_t bytes = is_few() ? std::min(chunk, options_.message_bytes) : chunk;
  return std::max<size_t>(bytes / element_bytes, 1);
}

size_t MpiTeam::within_chunks(size_t piece) const {
  if (chunks_ == nullptr) return piece;
  piece = std::max<size_t>(std::min(piece, chunks_->count / kInFlight), 1);
  // A piece must not cross a ring's end; ring sizes are multiples of messages or powers of two.
  const size_t ring = std::max(chunks_->ring, chunks_->out_ring);
  while (ring % piece != 0) --piece;
  return piece;
}

Status MpiTeam::wait(MpiStaging& staging, CallPhase phase) {
  Monitor monitor(*this, phase);
  return end_of_wait(wait_for(&staging.requests, options_.wait_policy, *deadline_, monitor));
}

Status MpiTeam::wait_with(const std::function<Result<bool>()>& poll, CallPhase phase) {
  Monitor monitor(*this, phase);
  return end_of_wait(wait_until(poll, options_.wait_policy, *deadline_, monitor));
}

Status MpiTeam::end_of_wait(const Status& status) {
  if (status.ok()) return {};
  // If the Team has not ended, `status` is an error of MPI.
  Status known = cause_.get();
  return known.ok() ? refused(status) : known;
}

Status MpiTeam::end(const Status& status) {
  if (status.ok()) return {};
  abort(status);
  return cause_.get();
}

Status MpiTeam::refused(const Status& status) {
  await_all();  // any rank may be the cause: MPI gives up on all at once
  const Status reason = reason_or(status, *deadline_, [this]() -> Status {
    read_failure_notices();
    DSCOMM_RETURN_IF_ERROR(failure_in(kAnyCall));
    DSCOMM_RETURN_IF_ERROR(died_);
    if (parent_ == nullptr) return {};
    DSCOMM_RETURN_IF_ERROR(parent_->failure_in(kAnyCall));
    return parent_->death();
  });
  if (Status known = cause_.get(); !known.ok()) return known;
  return fail(reason);
}

void MpiTeam::read_failure_notices() {
  const uint64_t count = detector_.count();
  if (count == seen_count_) return;
  seen_count_ = count;
  has_ended_ = !detector_.ended(options_.id).ok();
  const bool had_died = !died_.ok(), had_left = !left_.ok();
  find_missing_members();
  if (had_died != !died_.ok() || had_left != !left_.ok()) gone_since_ns_ = monotonic_ns();
}

void MpiTeam::find_missing_members() {
  for (int k = 0; k < size(); ++k) {
    if (k == rank_ || !awaits(k)) continue;
    const MpiTeamMember& member = options_.members[k];
    Status gone = detector_.gone(member.transport_rank);
    const bool has_left = gone.code() == Code::kPeerLeft;
    if (has_left && !may_be_finished_.empty() && may_be_finished_[static_cast<size_t>(k)]) continue;
    Status& kept = has_left ? left_ : died_;
    if (gone.ok() || !kept.ok()) continue;
    kept = gone;
    if (has_left) {
      const Departure departure = detector_.departure(member.transport_rank);
      kept = Status(gone.code(), member.name + " " + departure.how());
      advice_ = departure.advice();
    }
  }
}

void MpiTeam::note_headers() {
  if (may_be_finished_.empty() || header_staging_.requests.empty()) return;
  const MPI_Request* request = header_staging_.requests.data();
  for (int k = 0; k < size(); ++k) {
    if (!way_.has(k, rank_)) continue;
    int came = 0;
    const auto ask = [&] { return MPI_Request_get_status(*request, &came, MPI_STATUS_IGNORE); };
    if (guarded(ask) == MPI_SUCCESS && came) may_be_finished_[static_cast<size_t>(k)] = true;
    ++request;
  }
}

// By default the next call needs every rank.
void MpiTeam::await_all() {
  awaited_.clear();
  may_be_finished_.clear();
  if (detector_.count() != 0) find_missing_members();
}

Status MpiTeam::check_missing_members(CallPhase phase) {
  if (died_.ok() && left_.ok()) return {};
  if (!awaited_.empty()) {  // missing ranks may have done their part by now
    if (phase == CallPhase::kEntering) note_headers();
    died_ = left_ = {};
    find_missing_members();
  }
  const int64_t gone_for_ns = monotonic_ns() - gone_since_ns_;
  if (gone_for_ns >= kCauseGraceNs) DSCOMM_RETURN_IF_ERROR(fail(died_));
  // Once all ranks agree on the call, a rank that left has already sent its part.
  const bool keeps_others_waiting = !left_.ok() && phase == CallPhase::kEntering;
  return keeps_others_waiting && gone_for_ns >= kGraceOfLeaversNs ? fail_because_member_left()
                                                                  : Status();
}

Status MpiTeam::fail_because_member_left() {
  return fail(left_.code(), left_.message() + " before it made this call; " + advice_);
}

Status MpiTeam::timed_out(CallPhase phase, const std::vector<Answer>& answers) {
  if (!left_.ok() && phase == CallPhase::kEntering) return fail_because_member_left();
  const std::string after = "timed out after " + deadline_->timeout_text() + " waiting for ";
  // Searches the whole group: a member of this Team may wait inside its host for a stopped rank.
  if (std::string silent = names_of(options_.group, answers, Answer::kSilent); !silent.empty())
    return fail(Code::kTimeout, format_text("{}{}, from which no answer comes: stopped (continue "
                                            "it with kill -CONT) or cut off (check the network){}",
                                            after, silent, timeout_advice(silent)));
  std::vector<MpiTeamMember> awaited;
  for (int k = 0; k < size(); ++k)
    if (awaits(k)) awaited.push_back(options_.members[static_cast<size_t>(k)]);
  if (std::string behind = names_of(awaited, answers, Answer::kBehind); !behind.empty())
    return fail(Code::kTimeout,
                after + behind +
                    (phase == CallPhase::kEntering ? ", not yet in this call"
                                                   : ", not yet so far in this call") +
                    timeout_advice(behind));
  return fail(Code::kTimeout, format_text("{}messages, though every rank awaited has made this "
                                          "call; look at the network between the hosts{}",
                                          after, raise_the_timeout("it is")));
}

std::string MpiTeam::names_of(const std::vector<MpiTeamMember>& members,
                              const std::vector<Answer>& answers, Answer answer) const {
  std::string text;
  for (const MpiTeamMember& member : members)
    if (answers[member.transport_rank] == answer && detector_.gone(member.transport_rank).ok())
      text += (text.empty() ? "" : "; ") + member.name;
  return text;
}

Status MpiTeam::fail(Code code, const std::string& cause) {
  // Another rank may have found the cause first, and this failure may only follow from it.
  Status first = detector_.ended(options_.id);
  if (first.ok())
    first = Status(code, cause + " (first seen by " + name_of(rank_) + " in " + name_call() + ")");
  abort(first);
  return cause_.get();
}

void MpiTeam::abort(const Status& cause) {
  const Team& counts = counts_calls_ != nullptr ? *counts_calls_ : *this;
  detector_.end(options_.id, cause_.keep(cause), counts.finished_calls() + 1);
}

Status MpiTeam::failure_in(uint64_t call) {
  DSCOMM_RETURN_IF_ERROR(cause_.get());
  return detector_.ended(options_.id, call);
}

Status MpiTeam::failure() {
  DSCOMM_RETURN_IF_ERROR(cause_.get());
  // Relaxed: a stale count only costs another call of ended().
  const uint64_t count = detector_.count();
  if (count == failure_count_.load(std::memory_order_relaxed)) return {};
  if (Status ended = detector_.ended(options_.id); !ended.ok()) return cause_.keep(ended);
  failure_count_.store(count, std::memory_order_relaxed);
  return {};
}

Status MpiTeam::death() {
  DSCOMM_RETURN_IF_ERROR(failure());
  if (detector_.count() == 0) return {};
  for (int k = 0; k < size(); ++k) {
    Status gone = k == rank_ ? Status() : detector_.gone(options_.members[k].transport_rank);
    if (gone.code() == Code::kPeerDied) return gone;
  }
  return {};
}

std::string MpiTeam::name_call() const {
  return format_text("{} #{} of group '{}'", collective_name(static_cast<Collective>(call_.kind)),
                     call_.number(), options_.name);
}

}  // namespace dscomm
