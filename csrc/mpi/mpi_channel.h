// MpiChannel: sends point-to-point messages to another process through MPI, cut into cells.
//
// Each cell is one non-blocking send from a ring of staging memory, and one receive into the peer's
// ring. The receiver probes for the first cell of a message, then posts receives for the rest. So
// no receive is left over, except one after an abandoned message, which then takes the next
// message's first cell. MPI cannot reliably cancel a pending request, so a ring that is in use when
// the channel is destroyed is never freed.
#pragma once

#include <mpi.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/base/give_up_check.h"
#include "core/messages/peer_process.h"

namespace dscomm {

// Lets all channels of a communicator share probes of MPI. The communicator must outlive this
// object, and kCellTag must have no other use in it. One thread at a time.
class MpiArrivals {
 public:
  explicit MpiArrivals(MPI_Comm comm) : comm_(comm) {}

  MPI_Comm comm() const { return comm_; }
  // For the channel to `rank`: sets *is_any to whether a cell from any rank has arrived without a
  // posted receive. If not, calls for other ranks in the next 10 us get this answer without a probe
  // of MPI. Returns MPI's code.
  int ask(int rank, bool* is_any);

 private:
  const MPI_Comm comm_;
  int asker_ = -1;  // rank whose probe last found nothing, or -1
  int64_t asked_ns_ = 0;
};

class MpiChannel final : public CellChannel {
 public:
  // `rank` is the peer's rank in the communicator, `peer` its description for messages. `gone` is
  // called before each cell is sent; once it fails, because the peer has died or left, cells are
  // discarded.
  MpiChannel(
      std::shared_ptr<MpiArrivals> arrivals, int rank, std::string peer,
      GiveUpCheck gone = [] { return Status(); });
  ~MpiChannel() override { drop(); }
  MpiChannel(const MpiChannel&) = delete;
  MpiChannel& operator=(const MpiChannel&) = delete;

  Status open(size_t channel_bytes, uint64_t message_bytes) override;
  size_t cell_bytes(uint64_t) const override { return cell_bytes_ - sizeof(CellHeader); }
  std::byte* vacant_cell(size_t bytes) override;
  bool publish(const CellHeader& header, bool more) override;
  Result<std::optional<ArrivedCell>> next_cell() override;
  bool consume(bool at_once) override;
  Status failure() const override { return send_failure_; }
  bool in_flight() override;
  void drop() override;

 private:
  static constexpr uint64_t kCells = 4, kReceives = 2;

  std::byte* cell(uint64_t number) { return cells_.get() + number % kCells * cell_bytes_; }
  std::byte* arriving(uint64_t number);
  Status probe();
  Status post_following();
  Status failed(const char* what, int code) const;
  Status wrong_length() const;

  const std::shared_ptr<MpiArrivals> arrivals_;
  const MPI_Comm comm_;
  const int rank_;
  const std::string peer_;
  const GiveUpCheck gone_;

  // MPI is sending cells [sent_, published_).
  std::unique_ptr<std::byte[]> cells_;
  size_t cell_bytes_ = 0;
  uint64_t published_ = 0, sent_ = 0;
  std::vector<MPI_Request> sends_;
  Status send_failure_;

  // MPI is receiving cells [consumed_, posted_); the first is complete if arrived_. Receives for
  // following_ more cells of the same message are still to be posted.
  std::unique_ptr<std::byte[]> arriving_;
  uint64_t posted_ = 0, consumed_ = 0, following_ = 0;
  std::array<MPI_Request, kReceives> receives_{};
  size_t arrived_bytes_ = 0;
  bool arrived_ = false;
};

}  // namespace dscomm
