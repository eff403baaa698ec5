// A meeting of ranks over MPI that can be called off.
//
// MPI makes communicators in calls that wait for other ranks without a bound; a thread that is left
// behind in one takes a core for as long as the process lives. So ranks make sure that all have
// come before they call it.
#pragma once

#include <mpi.h>

#include <functional>
#include <string>
#include <vector>

#include "core/base/deadline.h"
#include "core/base/look.h"
#include "core/base/status.h"

namespace dscomm {

// Until all of `ranks` of `comm`, this one among them, have called it with the same ranks and tag.
// kTimeout names a rank that has not come, by `name` of its place in `ranks`; what `look` gives
// ends the wait too. Messages of no bytes, in as many rounds as the ranks' number has bits.
Status meet(MPI_Comm comm, const std::vector<int>& ranks, int tag, const Deadline& deadline,
            const Look& look, const std::function<std::string(size_t index)>& name);

// Collective over all ranks of a communicator: each exchanges a message with each, for which MPI
// makes its connections. kTimeout at `deadline`, or what `look` says.
Status connect_all(MPI_Comm comm, int tag, const Deadline& deadline, const Look& look);

}  // namespace dscomm
