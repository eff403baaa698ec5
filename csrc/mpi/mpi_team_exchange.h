// MpiTeam::Exchange: implements gather, scatter and all_to_all; see mpi_team_exchange.cc.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "mpi/mpi_team.h"

namespace dscomm {

// One call, after its begin_splits().
class MpiTeam::Exchange {
 public:
  Exchange(MpiTeam& team, DType dtype, const CallOptions& options);

  // Adds the blocks to and from `rank`, which must add this rank, too. Counts are in elements;
  // nullopt: no block goes in that direction, whereas a block of 0 still takes one message.
  void add(int rank, const void* in, std::optional<size_t> in_count, void* out,
           std::optional<size_t> out_count);
  // Runs the exchange, after all partners are added.
  Status run();

 private:
  struct Heading;
  struct Partner {
    int rank;
    const std::byte* in;
    std::byte* out;
    size_t in_count, out_count;  // elements
    size_t sends, receives;      // messages
    size_t left = 0;             // messages, in both directions
    size_t waiting = 0;          // messages in flight, sent with MPI_Issend
    bool has_agreed = false;     // its heading has arrived and matches
  };
  // The message in a slot of staging.
  struct SlotUse {
    size_t partner = 0, message = 0;
    bool waits = false;  // completes only when its receive is posted
  };
  struct Cursor {
    size_t partner = 0, message = 0;
    bool is_any_left = false;  // some stream has messages after number `message`
    bool is_at_end = false;

    template <typename MessagesOf>
    bool find(size_t partners, const MessagesOf& messages_of);
  };
  Status fill();
  Status receive(size_t slot);
  Status send(size_t slot);
  Status wait_for_some(CallPhase of_call);
  Status receive_message(size_t slot, const MPI_Status& status);
  Status compare(const Partner& partner, const Heading& heading);
  Status wrong_length(const Partner& partner);

  // Messages of a stream of `count` elements: at least one, for the heading.
  size_t messages(size_t count) const {
    return std::max<size_t>((count * element_bytes_ + piece_bytes_ - 1) / piece_bytes_, 1);
  }
  size_t bytes_of(size_t count, size_t message) const {
    return in_round(count * element_bytes_, piece_bytes_, message);
  }
  // Slots of staging: those for receives, then those for sends.
  MPI_Request* requests() { return team_.staging_[0].requests.data(); }
  std::byte* at(size_t slot) { return team_.staging_[0].data() + slot * slot_bytes_; }

  MpiTeam& team_;
  const std::function<Status()>* const meanwhile_;
  const size_t element_bytes_, piece_bytes_, slot_bytes_;
  const size_t slots_ = team_.options_.stream_slots;
  std::vector<Partner> partners_;
  std::vector<SlotUse> uses_ = std::vector<SlotUse>(2 * slots_);
  Cursor next_receive_, next_send_;
  size_t messages_ = 0;   // of all streams
  size_t in_flight_ = 0;  // of messages_
  size_t headings_left_ = 0;
  std::vector<int> done_ = std::vector<int>(2 * slots_);
  std::vector<MPI_Status> statuses_ = std::vector<MPI_Status>(2 * slots_);
};

}  // namespace dscomm
