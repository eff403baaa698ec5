#include "mpi/persistent_all_reduce.h"

#include "mpi/guarded.h"

// Open MPI 5 has the first, 4.1 and 5 the second; which one is there shows when MPI is loaded.
extern "C" {
__attribute__((weak)) int MPI_Allreduce_init(const void* sent, void* got, int count,
                                             MPI_Datatype type, MPI_Op op, MPI_Comm comm,
                                             MPI_Info info, MPI_Request* request);
__attribute__((weak)) int MPIX_Allreduce_init(const void* sent, void* got, int count,
                                              MPI_Datatype type, MPI_Op op, MPI_Comm comm,
                                              MPI_Info info, MPI_Request* request);
}

namespace dscomm {
namespace {

auto find_init() {
  return MPI_Allreduce_init != nullptr ? MPI_Allreduce_init : MPIX_Allreduce_init;
}

}  // namespace

bool PersistentAllReduce::available() { return find_init() != nullptr; }

Status PersistentAllReduce::reserve(size_t bytes) {
  bytes_ = bytes;
  return staging_.reserve(2 * bytes, 0);
}

int PersistentAllReduce::prepare(size_t count, MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
  return find_init()(sent(), got(), static_cast<int>(count), type, op, comm, MPI_INFO_NULL,
                     &request_);
}

// Who waits clears the list of requests; for MPI this one stays what it is. It is there before MPI
// works in the staging, which is kept for ever should MPI give up in the middle.
int PersistentAllReduce::start() {
  MPI_Request* request = staging_.add_request();
  *request = request_;
  return MPI_Start(request);
}

void PersistentAllReduce::release() {
  if (is_prepared()) (void)guarded([&] { return MPI_Request_free(&request_); });
}

}  // namespace dscomm
