// MPI_Iallreduce for SMPI, by the algorithms of Open MPI 4 and 5 (libnbc): below 64 KiB a reduce
// and a broadcast along a binomial tree, else Rabenseifner's algorithm. It is made of SMPI's
// blocking collectives, whose algorithms the script `run` sets. SMPI's own MPI_Iallreduce sends
// from every rank to every other.
#pragma once

#include <mpi.h>

// SMPI defines these as macros, which would also replace methods of these names.
#undef sleep
#undef usleep
#undef nanosleep

inline int allreduce_as_open_mpi(const void* sent, void* received, int count, MPI_Datatype type,
                                 MPI_Op op, MPI_Comm comm, MPI_Request* request) {
  *request = MPI_REQUEST_NULL;
  int bytes = 0;
  MPI_Type_size(type, &bytes);
  if (static_cast<long>(count) * bytes >= 65536)
    return MPI_Allreduce(sent, received, count, type, op, comm);
  if (int code = MPI_Reduce(sent, received, count, type, op, 0, comm); code != MPI_SUCCESS)
    return code;
  return MPI_Bcast(received, count, type, 0, comm);
}

#define MPI_Iallreduce(sent, received, count, type, op, comm, request) \
  allreduce_as_open_mpi(sent, received, count, type, op, comm, request)
