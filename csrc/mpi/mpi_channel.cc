#include "mpi/mpi_channel.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "core/base/deadline.h"
#include "mpi/guarded.h"
#include "mpi/mpi_error.h"
#include "mpi/mpi_staging.h"
#include "mpi/mpi_tags.h"

namespace dscomm {
namespace {

// Once a probe finds nothing, channels to other ranks do not probe for this long. A pass over a few
// hundred channels takes less, so a pass in which nothing has arrived costs one probe.
constexpr int64_t kPassNs = 10'000;

// With MPI's header, the longest cell stays below the 64 KiB that Open MPI sends eagerly over TCP.
// Longer cells would take more memory, which each peer's rings keep until the channel is destroyed.
constexpr size_t kShortestCell = 4096, kLongestCell = 60 << 10;

}  // namespace

int MpiArrivals::ask(int rank, bool* is_any) {
  *is_any = false;
  if (asker_ != -1 && asker_ != rank && monotonic_ns() - asked_ns_ < kPassNs) return MPI_SUCCESS;
  int is_there = 0;
  const int code = guarded(
      [&] { return MPI_Iprobe(MPI_ANY_SOURCE, kCellTag, comm_, &is_there, MPI_STATUS_IGNORE); });
  *is_any = is_there != 0;
  asker_ = *is_any ? -1 : rank;
  asked_ns_ = monotonic_ns();
  return code;
}

MpiChannel::MpiChannel(std::shared_ptr<MpiArrivals> arrivals, int rank, std::string peer,
                       GiveUpCheck gone)
    : arrivals_(std::move(arrivals)),
      comm_(arrivals_->comm()),
      rank_(rank),
      peer_(std::move(peer)),
      gone_(std::move(gone)),
      sends_(kCells, MPI_REQUEST_NULL) {}

std::byte* MpiChannel::arriving(uint64_t number) {
  return arriving_.get() + number % kReceives * kLongestCell;
}

Status MpiChannel::failed(const char* what, int code) const {
  Status refused = mpi_error(what, code);
  // MPI gives up for the whole process, perhaps because of another peer, so do not name this one.
  if (mpi_gave_up()) return refused;
  return Status(refused.code(), "messages to or from " + peer_ + ": " + refused.message());
}

Status MpiChannel::open(size_t channel_bytes, uint64_t) {
  if (cells_ != nullptr) return {};
  const size_t cell_bytes = std::clamp(channel_bytes / kCells, kShortestCell, kLongestCell);
  cells_.reset(new (std::nothrow) std::byte[kCells * cell_bytes]);
  if (cells_ == nullptr)
    return make_status(Code::kResource,
                       "cannot allocate {} bytes to send to {}; free memory on the sender",
                       kCells * cell_bytes, peer_);
  cell_bytes_ = cell_bytes;
  return {};
}

std::byte* MpiChannel::vacant_cell(size_t) {
  if (published_ - sent_ == kCells) in_flight();
  if (!send_failure_.ok() || published_ - sent_ == kCells) return nullptr;
  return cell(published_) + sizeof(CellHeader);
}

bool MpiChannel::publish(const CellHeader& header, bool) {
  if (!gone_().ok()) {
    ++published_;  // counts as sent: the peer is gone
    return false;
  }
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

// If a message's first cell has arrived, starts to receive it.
Status MpiChannel::probe() {
  bool is_any = false;
  if (int code = arrivals_->ask(rank_, &is_any); code != MPI_SUCCESS)
    return failed("MPI_Iprobe", code);
  if (!is_any) return {};
  int there = 0;
  MPI_Message message = MPI_MESSAGE_NULL;
  MPI_Status status;
  int code =
      guarded([&] { return MPI_Improbe(rank_, kCellTag, comm_, &there, &message, &status); });
  if (code != MPI_SUCCESS) return failed("MPI_Improbe", code);
  if (!there) return {};
  if (arriving_ == nullptr) arriving_.reset(new (std::nothrow) std::byte[kReceives * kLongestCell]);
  if (arriving_ == nullptr)
    return make_status(Code::kResource,
                       "cannot allocate {} bytes to receive from {}; free memory on the receiver",
                       kReceives * kLongestCell, peer_);
  int bytes = 0;
  MPI_Get_count(&status, MPI_BYTE, &bytes);
  if (bytes > static_cast<int>(kLongestCell)) return wrong_length();
  code = guarded([&] {
    return MPI_Imrecv(arriving(posted_), bytes, MPI_BYTE, &message,
                      &receives_[posted_ % kReceives]);
  });
  if (code != MPI_SUCCESS) return failed("MPI_Imrecv", code);
  ++posted_;
  return {};
}

Status MpiChannel::post_following() {
  for (; following_ > 0 && posted_ - consumed_ < kReceives; --following_, ++posted_) {
    const int code = guarded([&] {
      return MPI_Irecv(arriving(posted_), static_cast<int>(kLongestCell), MPI_BYTE, rank_, kCellTag,
                       comm_, &receives_[posted_ % kReceives]);
    });
    if (code != MPI_SUCCESS) return failed("MPI_Irecv", code);
  }
  return {};
}

Result<std::optional<ArrivedCell>> MpiChannel::next_cell() {
  DSCOMM_RETURN_IF_ERROR(send_failure_);
  const bool arrives_now = !arrived_;
  if (!arrived_) {
    DSCOMM_RETURN_IF_ERROR(posted_ == consumed_ && following_ == 0 ? probe() : post_following());
    if (posted_ == consumed_) return std::optional<ArrivedCell>();
    int done = 0, bytes = 0;
    MPI_Status status;
    const int code =
        guarded([&] { return MPI_Test(&receives_[consumed_ % kReceives], &done, &status); });
    if (code != MPI_SUCCESS) return failed("MPI_Test", code);
    if (!done) return std::optional<ArrivedCell>();
    MPI_Get_count(&status, MPI_BYTE, &bytes);
    arrived_bytes_ = static_cast<size_t>(std::max(bytes, 0));
    arrived_ = true;
  }
  ArrivedCell found{};
  CellHeader& header = found.header;
  const std::byte* cell = arriving(consumed_);
  if (arrived_bytes_ >= sizeof header) std::memcpy(&header, cell, sizeof header);
  if (arrived_bytes_ != sizeof header + header.cell_bytes) return wrong_length();
  found.data = cell + sizeof header;
  if (arrives_now) {
    static_assert(kReceives == 2, "at most one is left over, of which following_ knows nothing");
    // All cells of a message except the last are as long as the first.
    if ((header.flags & kFirstCell) != 0 && header.cell_bytes > 0 && header.bytes > 0)
      following_ = (header.bytes - 1) / header.cell_bytes;
    if ((header.flags & kAbandoned) != 0) following_ = 0;
    DSCOMM_RETURN_IF_ERROR(post_following());
  }
  return std::optional<ArrivedCell>(found);
}

Status MpiChannel::wrong_length() const {
  return make_status(Code::kInternal, "a part of a message from {} has the wrong length", peer_);
}

bool MpiChannel::consume(bool) {
  arrived_ = false;
  ++consumed_;
  return false;
}

void MpiChannel::drop() {
  in_flight();
  if (sent_ < published_) quarantine(std::move(cells_));
  // If dscomm has left a receive of MPI (guarded.h), MPI may use the memory without a request here.
  if (consumed_ < posted_ || mpi_gave_up()) quarantine(std::move(arriving_));
  cells_.reset();
  arriving_.reset();
  published_ = sent_ = 0;
  posted_ = consumed_ = following_ = 0;
  arrived_ = false;
}

}  // namespace dscomm
