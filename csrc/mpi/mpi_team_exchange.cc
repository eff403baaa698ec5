// Gather, scatter and all_to_all of MpiTeam: pairs of ranks exchange their blocks.
//
// Each block is a stream of messages that MPI sends eagerly (see mpi_team.h), from and into
// staging. The streams share the slots of staging; all first messages precede all second ones.
//
// These calls have no CallHeader. The first message of each stream begins with a heading, which the
// receiver compares with its own call.

#include "mpi/mpi_team_exchange.h"

#include <algorithm>
#include <complex>
#include <cstring>

#include "core/base/round_up.h"
#include "mpi/guarded.h"

namespace dscomm {
namespace {

constexpr int kStreamTag = 4;

}  // namespace

struct MpiTeam::Exchange::Heading {
  CallRecord call;
  uint64_t hash = 0;                // as in a CallHeader
  uint64_t sends = 0, expects = 0;  // elements
};

MpiTeam::Exchange::Exchange(MpiTeam& team, DType dtype, const CallOptions& options)
    : team_(team),
      meanwhile_(options.meanwhile),
      element_bytes_(dtype_bytes(dtype)),
      piece_bytes_(team.piece_of_message(element_bytes_) * element_bytes_),
      // Room for any dtype, since the sender's may differ.
      slot_bytes_(round_up(
          sizeof(Heading) + std::max(team.message_bytes(), sizeof(std::complex<double>)), 64)) {}

void MpiTeam::Exchange::add(int rank, const void* in, std::optional<size_t> in_count, void* out,
                            std::optional<size_t> out_count) {
  Partner partner{.rank = rank,
                  .in = static_cast<const std::byte*>(in),
                  .out = static_cast<std::byte*>(out),
                  .in_count = in_count.value_or(0),
                  .out_count = out_count.value_or(0),
                  .sends = in_count ? messages(*in_count) : 0,
                  .receives = out_count ? messages(*out_count) : 0};
  partner.left = partner.sends + partner.receives;
  messages_ += partner.left;
  if (partner.receives > 0) ++headings_left_;
  partners_.push_back(partner);
}

// Each rank starts with its successor, so that the first messages have different receivers.
Status MpiTeam::Exchange::run() {
  const int me = team_.rank_, ranks = team_.size();
  std::sort(partners_.begin(), partners_.end(), [&](const Partner& a, const Partner& b) {
    return (a.rank - me + ranks) % ranks < (b.rank - me + ranks) % ranks;
  });
  MpiStaging& staging = team_.staging_[0];
  if (messages_ > 0) {
    DSCOMM_RETURN_IF_ERROR(team_.fail(staging.reserve(2 * slots_ * slot_bytes_, 0)));
    staging.requests.assign(2 * slots_, MPI_REQUEST_NULL);
    DSCOMM_RETURN_IF_ERROR(fill());
  }
  if (meanwhile_ != nullptr) DSCOMM_RETURN_IF_ERROR(team_.end((*meanwhile_)()));
  team_.note_arrival();  // arrivals were not noted during `meanwhile`
  // If true, no other rank waits for anything that depends on this rank's receives.
  const bool only_sends = headings_left_ == 0;
  if (meanwhile_ != nullptr || only_sends)
    team_.detector_.note_position(
        team_.options_.id, team_.position(only_sends ? CallPhase::kMoving : CallPhase::kEntering));
  while (in_flight_ > 0) {
    // If this rank only sends, its receivers may not be in the call yet.
    const bool have_come = !only_sends && headings_left_ == 0;
    DSCOMM_RETURN_IF_ERROR(wait_for_some(have_come ? CallPhase::kMoving : CallPhase::kEntering));
    DSCOMM_RETURN_IF_ERROR(fill());
  }
  staging.requests.clear();
  return {};
}

// Starts messages in all free slots. Receives start with the predecessor, because it sends to this
// rank first.
Status MpiTeam::Exchange::fill() {
  const size_t count = partners_.size();
  const auto start = [&](Cursor& cursor, size_t first_slot, auto messages_of, auto begin) {
    for (size_t slot = first_slot; slot < first_slot + slots_; ++slot) {
      if (requests()[slot] != MPI_REQUEST_NULL) continue;
      if (!cursor.find(count, messages_of)) break;
      uses_[slot] = {.partner = cursor.partner, .message = cursor.message};
      DSCOMM_RETURN_IF_ERROR(begin(slot));
      ++in_flight_;
      ++cursor.partner;
    }
    return Status();
  };
  DSCOMM_RETURN_IF_ERROR(start(
      next_receive_, 0, [&](size_t k) { return partners_[count - 1 - k].receives; },
      [&](size_t slot) {
        uses_[slot].partner = count - 1 - uses_[slot].partner;
        return receive(slot);
      }));
  return start(
      next_send_, slots_, [&](size_t k) { return partners_[k].sends; },
      [&](size_t slot) { return send(slot); });
}

// Finds the next message; the first messages of all streams come before any second one.
template <typename MessagesOf>
bool MpiTeam::Exchange::Cursor::find(size_t partners, const MessagesOf& messages_of) {
  while (!is_at_end) {
    if (partner == partners) {
      is_at_end = !is_any_left;
      is_any_left = false;
      partner = 0;
      ++message;
      continue;
    }
    const size_t there = messages_of(partner);
    is_any_left |= message + 1 < there;
    if (message < there) return true;
    ++partner;
  }
  return false;
}

// Receives with room for the longest possible message, so that nothing is truncated.
Status MpiTeam::Exchange::receive(size_t slot) {
  return team_.check("MPI_Irecv", [&] {
    return MPI_Irecv(at(slot), static_cast<int>(slot_bytes_), MPI_BYTE,
                     partners_[uses_[slot].partner].rank, kStreamTag, team_.data_,
                     &requests()[slot]);
  });
}

Status MpiTeam::Exchange::send(size_t slot) {
  const size_t message = uses_[slot].message;
  Partner& partner = partners_[uses_[slot].partner];
  std::byte* data = at(slot);
  if (message == 0) {
    const Heading heading{team_.call_, team_.header_.hash, partner.in_count, partner.out_count};
    std::memcpy(data, &heading, sizeof heading);
    data += sizeof heading;
  }
  const size_t bytes = bytes_of(partner.in_count, message);
  if (bytes > 0) std::memcpy(data, partner.in + message * piece_bytes_, bytes);
  const auto sent = static_cast<int>(static_cast<size_t>(data - at(slot)) + bytes);
  const bool waits = team_.note_sent(partner.rank, static_cast<size_t>(sent));
  uses_[slot].waits = waits;
  partner.waiting += waits;
  return team_.check("MPI_Isend", [&] {
    return (waits ? MPI_Issend : MPI_Isend)(at(slot), sent, MPI_BYTE, partner.rank, kStreamTag,
                                            team_.data_, &requests()[slot]);
  });
}

Status MpiTeam::Exchange::wait_for_some(CallPhase of_call) {
  int done = 0;
  const auto poll = [&]() -> Result<bool> {
    const int code = guarded([&] {
      return MPI_Testsome(static_cast<int>(2 * slots_), requests(), &done, done_.data(),
                          statuses_.data());
    });
    if (code != MPI_SUCCESS) return mpi_error("MPI_Testsome", code);
    return done > 0;
  };
  DSCOMM_RETURN_IF_ERROR(team_.wait_with(poll, of_call));
  team_.note_arrival();
  in_flight_ -= static_cast<size_t>(done);
  // Headings first, because they determine the lengths of the other messages.
  for (const bool is_first : {true, false})
    for (int i = 0; i < done; ++i) {
      const auto slot = static_cast<size_t>(done_[static_cast<size_t>(i)]);
      if ((uses_[slot].message == 0) != is_first) continue;
      Partner& partner = partners_[uses_[slot].partner];
      if (slot < slots_)
        DSCOMM_RETURN_IF_ERROR(receive_message(slot, statuses_[static_cast<size_t>(i)]));
      if (slot >= slots_ && uses_[slot].waits && --partner.waiting == 0)
        team_.note_receiving(partner.rank);
      if (--partner.left == 0) team_.awaited_[partner.rank] = false;
    }
  return {};
}

Status MpiTeam::Exchange::receive_message(size_t slot, const MPI_Status& status) {
  const size_t message = uses_[slot].message;
  Partner& partner = partners_[uses_[slot].partner];
  int got = 0;
  MPI_Get_count(&status, MPI_BYTE, &got);
  const std::byte* data = at(slot);
  auto bytes = static_cast<size_t>(std::max(got, 0));
  if (message == 0) {
    Heading heading;
    if (bytes < sizeof heading) return wrong_length(partner);
    std::memcpy(&heading, data, sizeof heading);
    DSCOMM_RETURN_IF_ERROR(compare(partner, heading));
    data += sizeof heading;
    bytes -= sizeof heading;
    partner.has_agreed = true;
    team_.note_receiving(partner.rank);
    if (--headings_left_ == 0)
      team_.detector_.note_position(team_.options_.id, team_.position(CallPhase::kMoving));
  }
  // If the partner's heading is not compared yet (another thread's poll completed its receive), a
  // wrong length is no error here: the heading comes next, and will show the difference.
  if (bytes != bytes_of(partner.out_count, message))
    return partner.has_agreed ? wrong_length(partner) : Status();
  if (bytes > 0) std::memcpy(partner.out + message * piece_bytes_, data, bytes);
  return {};
}

Status MpiTeam::Exchange::compare(const Partner& partner, const Heading& heading) {
  const bool is_same_call = heading.hash == team_.header_.hash;
  const bool gets_all = heading.sends == partner.out_count;
  if (is_same_call && gets_all && heading.expects == partner.in_count) return {};
  if (!is_same_call) return team_.differs(heading.call, partner.rank);
  const std::string mine = team_.name_of(team_.rank_), theirs = team_.name_of(partner.rank);
  const auto kind = static_cast<Collective>(team_.call_.kind);
  return team_.fail(Code::kMismatch,
                    gets_all ? explain_split(kind, mine, partner.in_count, theirs, heading.expects)
                             : explain_split(kind, theirs, heading.sends, mine, partner.out_count));
}

Status MpiTeam::Exchange::wrong_length(const Partner& partner) {
  return team_.fail(Code::kInternal,
                    "a message from " + team_.name_of(partner.rank) + " has the wrong length");
}

Status MpiTeam::run_gather(const std::byte* in, size_t count, DType, Outputs outs,
                           Counts out_counts, int root, const CallOptions& options) {
  splits_.clear(static_cast<size_t>(size()));
  splits_.sends[root] = count;
  std::copy(out_counts.begin(), out_counts.end(), splits_.expects.begin());
  std::vector<const void*> ins(static_cast<size_t>(size()));
  ins[root] = in;
  return exchange_blocks(ins, outs, options);
}

Status MpiTeam::run_scatter(Inputs ins, Counts in_counts, std::byte* out, size_t count, DType,
                            int root, const CallOptions& options) {
  splits_.clear(static_cast<size_t>(size()));
  std::copy(in_counts.begin(), in_counts.end(), splits_.sends.begin());
  splits_.expects[root] = count;
  std::vector<void*> outs(static_cast<size_t>(size()));
  outs[root] = out;
  return exchange_blocks(ins, outs, options);
}

Status MpiTeam::run_all_to_all(Inputs ins, Counts in_counts, Outputs outs, Counts out_counts, DType,
                               const CallOptions& options) {
  splits_.sends.assign(in_counts.begin(), in_counts.end());
  splits_.expects.assign(out_counts.begin(), out_counts.end());
  return exchange_blocks(ins, outs, options);
}

// splits_ holds the blocks' lengths. If `ins` or `outs` is empty, all its blocks are empty.
Status MpiTeam::exchange_blocks(std::span<const void* const> ins, std::span<void* const> outs,
                                const CallOptions& options) {
  const CallRecord& call = *record_;
  const auto kind = static_cast<Collective>(call.kind);
  const auto sends_to = [&](int from, int to) {
    return kind == Collective::kAllToAll || (kind == Collective::kGather ? to : from) == call.root;
  };
  const auto is_partner = [&](int rank) {
    const bool is_inside =
        options.domains != nullptr && (*options.domains)[rank] == (*options.domains)[rank_];
    return rank != rank_ && !is_inside && (sends_to(rank_, rank) || sends_to(rank, rank_));
  };
  awaited_.clear();
  for (int rank = 0; rank < size(); ++rank) awaited_.push_back(is_partner(rank));
  const bool only_receives =
      kind != Collective::kAllToAll && (kind == Collective::kGather) == (rank_ == call.root);
  DSCOMM_RETURN_IF_ERROR(begin_splits(options, only_receives));

  const auto in = [&](int rank) { return ins.empty() ? nullptr : ins[rank]; };
  const auto out = [&](int rank) { return outs.empty() ? nullptr : outs[rank]; };
  const auto stream = [&](int from, int to, uint64_t count) -> std::optional<size_t> {
    if (!sends_to(from, to)) return std::nullopt;
    return count;
  };
  const auto dtype = static_cast<DType>(call.dtype);
  note(kind, "in blocks", call.own_count * dtype_bytes(dtype));
  Exchange exchange(*this, dtype, options);
  for (int rank = 0; rank < size(); ++rank) {
    const uint64_t sends = splits_.sends[rank], expects = splits_.expects[rank];
    if (is_partner(rank))
      exchange.add(rank, in(rank), stream(rank_, rank, sends), out(rank),
                   stream(rank, rank_, expects));
    else
      DSCOMM_CHECK(rank == rank_ || sends + expects == 0,
                   "ranks of one domain exchange nothing here");
  }
  DSCOMM_RETURN_IF_ERROR(exchange.run());
  const size_t own_bytes = splits_.sends[rank_] * dtype_bytes(dtype);
  if (out(rank_) != in(rank_) && own_bytes > 0) std::memcpy(out(rank_), in(rank_), own_bytes);
  return finished();
}

}  // namespace dscomm
