#include "mpi/mpi_notices.h"

#include <algorithm>

#include "mpi/guarded.h"
#include "mpi/mpi_tags.h"

namespace dscomm {

MpiNotices::MpiNotices(MPI_Comm comm) : comm_(comm) {
  broken_ = MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN) != MPI_SUCCESS;
}

MpiNotices::~MpiNotices() {
  // MPI may still read what is being sent, so that is never freed.
  if (!sending_.empty()) static_cast<void>(new std::list<Sending>(std::move(sending_)));
}

void MpiNotices::say(uint64_t team_id, uint64_t position, std::span<const int> ranks) {
  std::lock_guard lock(mutex_);
  reap();
  for (int rank : ranks) {
    if (broken_) return;
    Sending& sending = sending_.emplace_back(Sending{{team_id, position}, MPI_REQUEST_NULL});
    broken_ = guarded([&] {
                return MPI_Isend(&sending.notice, sizeof sending.notice, MPI_BYTE, rank, kNoticeTag,
                                 comm_, &sending.request);
              }) != MPI_SUCCESS;
  }
}

void MpiNotices::listen() {
  std::lock_guard lock(mutex_);
  reap();
  while (!broken_) {
    int there = 0;
    MPI_Message message = MPI_MESSAGE_NULL;
    MPI_Status status;
    broken_ = guarded([&] {
                return MPI_Improbe(MPI_ANY_SOURCE, kNoticeTag, comm_, &there, &message, &status);
              }) != MPI_SUCCESS;
    if (broken_ || !there) return;
    // A message of this size is there whole once it is matched, so this does not wait.
    broken_ = guarded([&] {
                return MPI_Mrecv(&coming_, sizeof coming_, MPI_BYTE, &message, MPI_STATUS_IGNORE);
              }) != MPI_SUCCESS;
    if (broken_) return;
    uint64_t& furthest = heard_[{coming_.team_id, status.MPI_SOURCE}];
    furthest = std::max(furthest, coming_.position);
  }
}

uint64_t MpiNotices::heard(uint64_t team_id, int rank) {
  std::lock_guard lock(mutex_);
  auto found = heard_.find({team_id, rank});
  return found == heard_.end() ? 0 : found->second;
}

void MpiNotices::forget(uint64_t team_id) {
  std::lock_guard lock(mutex_);
  std::erase_if(heard_, [team_id](const auto& entry) { return entry.first.first == team_id; });
}

// Lets go of what has been sent.
void MpiNotices::reap() {
  while (!broken_ && !sending_.empty()) {
    int sent = 0;
    broken_ = guarded([&] {
                return MPI_Test(&sending_.front().request, &sent, MPI_STATUS_IGNORE);
              }) != MPI_SUCCESS;
    if (!sent) return;
    sending_.pop_front();
  }
}

}  // namespace dscomm
