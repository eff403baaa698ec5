// Bring-up: makes the members of a transport one MPI job, however they were started.
//
//   1. Every rank publishes its host and the state of its MPI.
//   2. Rank 0 collects these and publishes the plan, which names one of three cases: MPI is
//      initialised already (by mpi4py, say), a launcher has prepared MPI (mpirun, srun
//      --mpi=pmix, flux), or dscomm starts MPI.
//   3. All ranks call MPI_Init_thread, unless MPI is initialised already.
//   4. Rank 0 publishes all members' ranks in MPI_COMM_WORLD. The members make a communicator.
//
// A rank that fails puts the reason into the store, and all others soon fail with this reason.
#pragma once

#include <mpi.h>

#include <atomic>
#include <memory>
#include <string>

#include "core/base/deadline.h"
#include "core/base/give_up_check.h"
#include "core/base/status.h"
#include "core/store/store.h"
#include "core/transport/transport.h"
#include "mpi/start_plan.h"

namespace dscomm {

class MpiStart;

// A running MPI with MPI_THREAD_MULTIPLE.
class MpiWorld {
 public:
  MpiWorld(MpiOrigin origin, std::unique_ptr<MpiStart> start);
  ~MpiWorld();

  // What started MPI, for messages: "dscomm-pmix", "the launcher".
  const char* started_by() const;
  // The members' communicator, in the order of the request; MPI_COMM_WORLD may have other ranks,
  // too. MPI returns its errors. Never freed.
  MPI_Comm comm() const { return comm_; }

  // Call it when no thread calls MPI any more. Lets dscomm-pmix quit, if dscomm started one. Then
  // calls MPI_Finalize, or not, depending on the origin:
  //   kDscomm: no; MPI_Finalize would wait for the other hosts, and an exit without it is clean.
  //   kLauncher: yes, because the launcher takes an exit without it for a crash and ends the job.
  //     Waits for all ranks, up to the deadline. Not if MPI has given up (guarded.h).
  //   kProgram: no, because the program finalises MPI.
  // Returns soon after the deadline at the latest. Idempotent.
  void leave(const Deadline& deadline);

  // In a forked child: closes inherited descriptors. Only the destructor may be called afterwards.
  void close_descriptors();

 private:
  friend class BringUp;
  MpiOrigin origin_;
  const std::unique_ptr<MpiStart> start_;
  MPI_Comm comm_ = MPI_COMM_NULL;
  std::atomic<bool> left_{false};
};

// Collective over the members. `helper_path` is the path of dscomm-pmix. `check` is polled every
// few milliseconds and returns a reason to give up, such as a member's death, or OK.
//
// A failure on one member fails all members within the deadline; its message names the step, the
// rank and the host. MPI itself may end the process inside MPI_Init_thread, with its own message.
Result<std::unique_ptr<MpiWorld>> bring_up(
    const TransportRequest& request, std::shared_ptr<Store> store, const Deadline& deadline,
    const std::string& helper_path, const GiveUpCheck& check = [] { return Status(); });

}  // namespace dscomm
