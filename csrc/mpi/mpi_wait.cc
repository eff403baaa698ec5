#include "mpi/mpi_wait.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "mpi/guarded.h"
#include "mpi/mpi_error.h"

namespace dscomm {
namespace {

Result<bool> poll(std::vector<MPI_Request>* requests) {
  int done = 0;
  const int code = guarded([&] {
    return MPI_Testall(static_cast<int>(requests->size()), requests->data(), &done,
                       MPI_STATUSES_IGNORE);
  });
  if (code != MPI_SUCCESS) return mpi_error("MPI_Testall", code);
  if (done) requests->clear();
  return done != 0;
}

}  // namespace

Status wait_for(std::vector<MPI_Request>* requests, const MpiWaitPolicy& policy,
                const Deadline& deadline, MpiWatch& watch) {
  for (int i = 0; i < policy.spin_polls; ++i) {
    DSCOMM_ASSIGN_OR_RETURN(bool done, poll(requests));
    if (done) return {};
    DSCOMM_RETURN_IF_ERROR(watch.look(0));
  }
  const int64_t left_at_first = deadline.remaining_ns();
  TimeLeft time_left(deadline);
  while (true) {
    DSCOMM_ASSIGN_OR_RETURN(bool done, poll(requests));
    if (done) return {};
    const int64_t waited = left_at_first - deadline.remaining_ns();
    const int64_t left = time_left.ns();
    DSCOMM_RETURN_IF_ERROR(watch.look(waited));
    if (left <= 0) return watch.timed_out();
    const int64_t nap = waited < policy.yield_ns
                            ? 0
                            : std::min({waited / policy.nap_divisor, policy.longest_nap_ns, left});
    const int64_t began = monotonic_ns();
    if (nap == 0)
      sched_yield();
    else
      std::this_thread::sleep_for(std::chrono::nanoseconds(nap));
    deadline.note_slice(began, nap);
  }
}

}  // namespace dscomm
