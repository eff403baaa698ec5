#include "mpi/mpi_wait.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "mpi/mpi_error.h"

namespace dscomm {
namespace {

Result<bool> poll(MPI_Request* request) {
  int done = 0;
  int code = MPI_Test(request, &done, MPI_STATUS_IGNORE);
  if (code != MPI_SUCCESS) return mpi_error("MPI_Test", code);
  return done != 0;
}

}  // namespace

Status wait_for(MPI_Request* request, const MpiWaitPolicy& policy, const Deadline& deadline,
                MpiWatch& watch) {
  for (int i = 0; i < policy.spin_polls; ++i) {
    Result<bool> done = poll(request);
    if (!done.ok()) return done.status();
    if (done.value()) return {};
    DSCOMM_RETURN_IF_ERROR(watch.look(0));
  }
  const int64_t left_at_first = deadline.remaining_ns();
  while (true) {
    Result<bool> done = poll(request);
    if (!done.ok()) return done.status();
    if (done.value()) return {};
    const int64_t left = deadline.remaining_ns();
    const int64_t waited = left_at_first - left;
    DSCOMM_RETURN_IF_ERROR(watch.look(waited));
    if (left <= 0) return watch.timed_out();
    if (waited < policy.yield_ns) {
      sched_yield();
    } else {
      int64_t nap = std::min({waited / policy.nap_divisor, policy.longest_nap_ns, left});
      std::this_thread::sleep_for(std::chrono::nanoseconds(nap));
    }
  }
}

}  // namespace dscomm
