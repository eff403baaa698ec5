// MpiChannel: the cells of point-to-point as messages of MPI between two processes.
//
// Every cell is one non-blocking send from a ring of our own memory, and one receive into another
// ring. A receiver probes for the first cell of a message, and posts receives for those that follow
// it: so none is left over, but for one after a message that was abandoned, which the first cell of
// the next one takes. A request of MPI cannot be taken back, so memory that one still uses when the
// channel goes is kept for ever.
#pragma once

#include <mpi.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/base/look.h"
#include "core/messages/endpoint.h"

namespace dscomm {

// Asks MPI once for all channels of a communicator, which outlives this and in which nothing else
// has kCellTag. One thread at a time.
class MpiArrivals {
 public:
  explicit MpiArrivals(MPI_Comm comm) : comm_(comm) {}

  MPI_Comm comm() const { return comm_; }
  // For the channel to this rank: sets *is_any to whether a cell of any rank has come for which no
  // receive is posted. If there is none, the other channels get the same answer in the same pass.
  // Returns MPI's code.
  int ask(int rank, bool* is_any);

 private:
  const MPI_Comm comm_;
  int asker_ = -1;  // for which MPI was asked last, if there was none; or -1
  int64_t asked_ns_ = 0;
};

class MpiChannel final : public CellChannel {
 public:
  // `rank` is the peer's in the communicator, `peer` its description for messages. Once
  // `gone` says that the peer has died or left, cells go nowhere: asked before each.
  MpiChannel(
      std::shared_ptr<MpiArrivals> arrivals, int rank, std::string peer,
      Look gone = [] { return Status(); });
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
  const Look gone_;

  // Cells [sent_, published_) are with MPI.
  std::unique_ptr<std::byte[]> cells_;
  size_t cell_bytes_ = 0;
  uint64_t published_ = 0, sent_ = 0;
  std::vector<MPI_Request> sends_;
  Status send_failure_;

  // Receives [consumed_, posted_) are with MPI; the first of them is complete if arrived_. For
  // following_ more cells of its message none is posted yet.
  std::unique_ptr<std::byte[]> arriving_;
  uint64_t posted_ = 0, consumed_ = 0, following_ = 0;
  std::array<MPI_Request, kReceives> receives_{};
  size_t arrived_bytes_ = 0;
  bool arrived_ = false;
};

}  // namespace dscomm
