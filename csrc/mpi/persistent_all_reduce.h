// PersistentAllReduce: an all-reduce that MPI prepares once and starts repeatedly, in its own
// staging.
#pragma once

#include <mpi.h>

#include <cstddef>

#include "core/base/status.h"
#include "mpi/mpi_staging.h"

namespace dscomm {

class PersistentAllReduce {
 public:
  // Whether this MPI has persistent collectives: MPI 4's, or Open MPI 4's equivalent extension.
  static bool available();

  PersistentAllReduce() = default;
  PersistentAllReduce(const PersistentAllReduce&) = delete;
  PersistentAllReduce& operator=(const PersistentAllReduce&) = delete;

  // Makes room to send and receive `bytes` each. kResource if memory runs out.
  Status reserve(size_t bytes);
  // Makes MPI prepare the all-reduce of `count` elements. Collective, in the order of the
  // communicator's other collectives. Returns MPI's code.
  int prepare(size_t count, MPI_Datatype type, MPI_Op op, MPI_Comm comm);
  bool is_prepared() const { return request_ != MPI_REQUEST_NULL; }
  // Starts the all-reduce: complete once the requests of staging() are. Returns MPI's code.
  int start();
  // Frees MPI's request. Call it after the last all-reduce, before the communicator is freed.
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
