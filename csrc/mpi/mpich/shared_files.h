// The files of shared memory that MPICH makes in MPI_Init_thread, for one rank alone, too. It
// removes them in MPI_Finalize, which a rank that is killed, or just ends, does not reach.
#pragma once

namespace dscomm {

// Once the ranks of this host have mapped them: they have no name any more, and so end with the
// last of these ranks.
void remove_names_of_shared_files();

}  // namespace dscomm
