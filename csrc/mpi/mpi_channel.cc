#include "mpi/mpi_channel.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "mpi/guarded.h"
#include "mpi/mpi_error.h"
#include "mpi/mpi_tags.h"
#include "mpi/quarantine.h"

namespace dscomm {
namespace {

// What leaves a cell by the wire need not be long: the ring is kept for each peer for good.
constexpr size_t kSmallestCell = 4096, kLargestRing = 256 << 10;

}  // namespace

MpiChannel::MpiChannel(MPI_Comm comm, int rank, std::string peer)
    : comm_(comm), rank_(rank), peer_(std::move(peer)), sends_(kCells, MPI_REQUEST_NULL) {}

Status MpiChannel::failed(const char* what, int code) const {
  Status refused = mpi_error(what, code);
  // MPI gives up for all at once, and it may be for another peer than this.
  if (mpi_gave_up()) return refused;
  return Status(refused.code(), "the channel to " + peer_ + ": " + refused.message());
}

Status MpiChannel::open(size_t channel_bytes, uint64_t) {
  if (cells_ != nullptr) return {};
  const size_t cell_bytes = std::max(std::min(channel_bytes, kLargestRing) / kCells, kSmallestCell);
  cells_.reset(new (std::nothrow) std::byte[kCells * cell_bytes]);
  if (cells_ == nullptr)
    return make_status(Code::kResource, "no memory is left for a channel to %s", peer_.c_str());
  cell_bytes_ = cell_bytes;
  return {};
}

std::byte* MpiChannel::vacant_cell(size_t) {
  if (published_ - sent_ == kCells) in_flight();
  if (!send_failure_.ok() || published_ - sent_ == kCells) return nullptr;
  return cell(published_) + sizeof(CellHeader);
}

bool MpiChannel::publish(const CellHeader& header, bool) {
  std::byte* filled = cell(published_);
  std::memcpy(filled, &header, sizeof header);
  const int code = guarded([&] {
    return MPI_Isend(filled, static_cast<int>(sizeof header + header.cell_bytes), MPI_BYTE, rank_,
                     kCellTag, comm_, &sends_[published_ % kCells]);
  });
  if (code != MPI_SUCCESS) send_failure_ = failed("MPI_Isend", code);
  ++published_;
  return false;
}

bool MpiChannel::in_flight() {
  while (sent_ < published_) {
    int done = 0;
    const int code =
        guarded([&] { return MPI_Test(&sends_[sent_ % kCells], &done, MPI_STATUS_IGNORE); });
    if (code != MPI_SUCCESS) send_failure_ = failed("MPI_Test", code);
    if (!done) return send_failure_.ok();
    ++sent_;
  }
  return false;
}

Status MpiChannel::start_receive() {
  int there = 0;
  MPI_Message message = MPI_MESSAGE_NULL;
  MPI_Status status;
  int code =
      guarded([&] { return MPI_Improbe(rank_, kCellTag, comm_, &there, &message, &status); });
  if (code != MPI_SUCCESS) return failed("MPI_Improbe", code);
  if (!there) return {};
  int bytes = 0;
  MPI_Get_count(&status, MPI_BYTE, &bytes);
  arriving_bytes_ = static_cast<size_t>(std::max(bytes, 0));
  if (arriving_bytes_ > arriving_room_) {
    arriving_.reset(new (std::nothrow) std::byte[arriving_bytes_]);
    arriving_room_ = arriving_ == nullptr ? 0 : arriving_bytes_;
    if (arriving_ == nullptr)
      return make_status(Code::kResource, "no memory is left for a cell of %zu bytes from %s",
                         arriving_bytes_, peer_.c_str());
  }
  code = guarded([&] { return MPI_Imrecv(arriving_.get(), bytes, MPI_BYTE, &message, &receive_); });
  return code == MPI_SUCCESS ? Status() : failed("MPI_Imrecv", code);
}

Result<std::optional<ArrivedCell>> MpiChannel::next_cell() {
  DSCOMM_RETURN_IF_ERROR(send_failure_);
  if (!arrived_) {
    if (receive_ == MPI_REQUEST_NULL) DSCOMM_RETURN_IF_ERROR(start_receive());
    if (receive_ == MPI_REQUEST_NULL) return std::optional<ArrivedCell>();
    int done = 0;
    const int code = guarded([&] { return MPI_Test(&receive_, &done, MPI_STATUS_IGNORE); });
    if (code != MPI_SUCCESS) return failed("MPI_Test", code);
    if (!done) return std::optional<ArrivedCell>();
    arrived_ = true;
  }
  ArrivedCell found{};
  if (arriving_bytes_ >= sizeof found.header)
    std::memcpy(&found.header, arriving_.get(), sizeof found.header);
  if (arriving_bytes_ != sizeof found.header + found.header.cell_bytes)
    return make_status(Code::kInternal, "a cell from %s has the wrong length", peer_.c_str());
  found.data = arriving_.get() + sizeof found.header;
  return std::optional<ArrivedCell>(found);
}

bool MpiChannel::consume(bool) {
  arrived_ = false;
  return false;
}

void MpiChannel::drop() {
  in_flight();
  if (sent_ < published_) quarantine(std::move(cells_));
  // Where MPI gave up in a receive it may have kept the memory without giving a request.
  if (receive_ != MPI_REQUEST_NULL || mpi_gave_up()) quarantine(std::move(arriving_));
  cells_.reset();
  published_ = sent_ = 0;
  receive_ = MPI_REQUEST_NULL;
  arrived_ = false;
  arriving_room_ = 0;
}

}  // namespace dscomm
