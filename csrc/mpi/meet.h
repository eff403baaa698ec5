// Meetings of ranks over MPI that can be cancelled.
//
// MPI makes communicators in calls that wait for other ranks without a limit, and a thread
// abandoned in such a call uses a core until the process ends. So ranks first check that all are
// there.
#pragma once

#include <mpi.h>

#include <functional>
#include <string>
#include <vector>

#include "core/base/deadline.h"
#include "core/base/give_up_check.h"
#include "core/base/status.h"

namespace dscomm {

// Waits until all of `ranks` of `comm`, including this one, have called meet() with the same ranks
// and tag. kTimeout names a missing rank by name(its index in `ranks`); a failure of `check` ends
// the wait too. Sends empty messages, in log2(number of ranks) rounds.
Status meet(MPI_Comm comm, const std::vector<int>& ranks, int tag, const Deadline& deadline,
            const GiveUpCheck& check, const std::function<std::string(size_t index)>& name);

// Collective over a communicator: each rank exchanges a message with each other one, so that MPI
// makes all connections. Returns kTimeout at `deadline`, or `check`'s failure.
Status connect_all(MPI_Comm comm, int tag, const Deadline& deadline, const GiveUpCheck& check);

// Collective over `ranks` of `comm`: makes a communicator of them, which returns its errors. Blocks
// until all have come. Returns MPI's code.
int create_communicator(MPI_Comm comm, const std::vector<int>& ranks, int tag, MPI_Comm* made);

}  // namespace dscomm
