// MpiChannel: the cells of point-to-point as messages of MPI between two processes.
//
// Every cell is one non-blocking send from a ring of our own memory. A receiver matches one cell at
// a time, when it has consumed the one before: so what is not read yet stays with its sender, as in
// shared memory. A request of MPI cannot be taken back, so memory that one still uses when the
// channel goes is kept for ever.
#pragma once

#include <mpi.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/messages/endpoint.h"

namespace dscomm {

class MpiChannel final : public CellChannel {
 public:
  // `comm` outlives the channel; nothing else in it has kCellTag. `rank` is the peer's in it,
  // `peer` its description for messages.
  MpiChannel(MPI_Comm comm, int rank, std::string peer);
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
  static constexpr uint64_t kCells = 8;

  std::byte* cell(uint64_t number) { return cells_.get() + number % kCells * cell_bytes_; }
  Status start_receive();
  Status failed(const char* what, int code) const;

  const MPI_Comm comm_;
  const int rank_;
  const std::string peer_;

  // Cells [sent_, published_) are with MPI.
  std::unique_ptr<std::byte[]> cells_;
  size_t cell_bytes_ = 0;
  uint64_t published_ = 0, sent_ = 0;
  std::vector<MPI_Request> sends_;
  Status send_failure_;

  std::unique_ptr<std::byte[]> arriving_;
  size_t arriving_room_ = 0;
  size_t arriving_bytes_ = 0;
  MPI_Request receive_ = MPI_REQUEST_NULL;
  bool arrived_ = false;
};

}  // namespace dscomm
