// PersistentAllReduce: an all-reduce that MPI prepares once and then starts again and again, in
// staging of its own.
#pragma once

#include <mpi.h>

#include <cstddef>

#include "core/base/status.h"
#include "mpi/mpi_staging.h"

namespace dscomm {

class PersistentAllReduce {
 public:
  // Whether this MPI has them: MPI 4's, or Open MPI 4's extension of the same meaning.
  static bool available();

  PersistentAllReduce() = default;
  PersistentAllReduce(const PersistentAllReduce&) = delete;
  PersistentAllReduce& operator=(const PersistentAllReduce&) = delete;

  // Room for `bytes` that are sent and as many that come. kResource when there is no memory.
  Status reserve(size_t bytes);
  // Has MPI prepare it for all of them, `count` of a type. Collective, in the order of the
  // communicator's other collectives. Returns MPI's code.
  int prepare(size_t count, MPI_Datatype type, MPI_Op op, MPI_Comm comm);
  bool is_prepared() const { return request_ != MPI_REQUEST_NULL; }
  // Starts it; complete once the requests of staging() are. Returns MPI's code.
  int start();
  // Gives it back to MPI; only when it is complete here, and before its communicator is.
  void release();

  MpiStaging& staging() { return staging_; }
  std::byte* sent() { return staging_.data(); }
  std::byte* got() { return staging_.data() + bytes_; }

 private:
  MpiStaging staging_;
  size_t bytes_ = 0;
  MPI_Request request_ = MPI_REQUEST_NULL;
};

}  // namespace dscomm
