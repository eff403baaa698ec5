// meet(): ranks wait for each other over MPI, but no longer than a deadline.
//
// MPI makes communicators in calls that wait for other ranks without a limit, and a thread that is
// abandoned in such a call uses a core until the process ends. So the ranks meet() before the call.
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
// and tag. kTimeout names a rank whose message is missing, by name(index in `ranks`). A failure of
// `check` ends the wait, too. Sends empty messages, in log2(number of ranks) steps.
Status meet(MPI_Comm comm, const std::vector<int>& ranks, int tag, const Deadline& deadline,
            const GiveUpCheck& check, const std::function<std::string(size_t index)>& name);

// Collective over a communicator: each rank exchanges a message with each other one, so that MPI
// makes all connections. Returns kTimeout at `deadline`, or `check`'s failure.
Status connect_all(MPI_Comm comm, int tag, const Deadline& deadline, const GiveUpCheck& check);

// Collective over `ranks` of `comm`: makes a communicator of them, on which MPI returns its errors.
// Blocks until all have called this. Returns MPI's code.
int create_communicator(MPI_Comm comm, const std::vector<int>& ranks, int tag, MPI_Comm* made);

}  // namespace dscomm
