// Removes MPICH's shared-memory files. MPI_Init_thread makes them, even for a single rank, and only
// MPI_Finalize removes them, which a rank that is killed or just ends does not reach.
#pragma once

namespace dscomm {

// Call it once the ranks of this host have mapped the files: without names, they disappear with the
// last of these ranks.
void remove_names_of_shared_files();

}  // namespace dscomm
