// Bring-up: makes the members of a transport one MPI job, whoever started them.
//
//   1. every rank publishes where it runs, and what it knows of MPI;
//   2. rank 0 collects that and publishes the plan: whether MPI has been initialised already (by
//   mpi4py, say), a launcher has prepared it (mpirun, srun --mpi=pmix, flux), or dscomm shall;
//   3. all call MPI_Init_thread;
//   4. rank 0 collects and publishes their ranks in MPI_COMM_WORLD, and they make a communicator.
//
// Whoever cannot go on says why in the store, and all others raise that, soon.
#pragma once

#include <mpi.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "core/base/deadline.h"
#include "core/base/status.h"
#include "core/store/store.h"
#include "core/transport/transport.h"
#include "mpi/abandonable.h"
#include "mpi/plan.h"

namespace dscomm {

class MpiStart;

// MPI, up and running, with MPI_THREAD_MULTIPLE.
class MpiWorld {
 public:
  MpiWorld(MpiOrigin origin, std::unique_ptr<MpiStart> start);
  ~MpiWorld();

  // The starter of MPI, for messages: "dscomm-pmix", "the launcher".
  const char* started_by() const;
  // The members of the request, in its order. Errors return. Never freed: it ends with MPI.
  MPI_Comm comm() const { return comm_; }
  // The rank in MPI_COMM_WORLD of each member. That communicator may have others, too.
  const std::vector<int>& world_ranks() const { return world_ranks_; }

  // The process ends in order: nobody calls MPI any more. What that takes depends on the origin.
  //   kDscomm:   nothing; MPI_Finalize would wait for the other hosts, and an exit without it is
  //              clean.
  //   kLauncher: MPI_Finalize, unless MPI has given up: the launcher takes an exit without it for a
  //              crash and ends the job. It waits for all ranks of the job, up to the deadline.
  //   kProgram:  nothing; whoever initialised MPI finalises it.
  // Returns soon after the deadline at the latest. Idempotent.
  void leave(const Deadline& deadline);

  // In a forked child: closes what it inherited. Nothing else works on this object there, but its
  // destructor.
  void close_descriptors();

 private:
  friend class BringUp;
  MpiOrigin origin_;
  const std::unique_ptr<MpiStart> start_;
  MPI_Comm comm_ = MPI_COMM_NULL;
  std::vector<int> world_ranks_;
  std::atomic<bool> left_{false};
};

// Collective over the members. `helper_path` is where dscomm-pmix lies; `look` is asked every few
// milliseconds and gives a reason to give up, such as that a member has died, or OK.
//
// Fails on all members when it fails on one, within the deadline; the message names the step, the
// rank and its host. MPI itself may end the process, with a message of its own, when it
// finds something wrong inside MPI_Init_thread.
Result<std::unique_ptr<MpiWorld>> bring_up(
    const TransportRequest& request, std::shared_ptr<Store> store, const Deadline& deadline,
    const std::string& helper_path, const Look& look = [] { return Status(); });

}  // namespace dscomm
