#include "mpi/persistent_all_reduce.h"

#include "mpi/guarded.h"

// MPI 4 has the first function, Open MPI 4.1 and 5 the second. A missing one is null.
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

// A wait clears the list of requests, but MPI keeps this request, so list it again. List it before
// MPI_Start(), so that the staging goes into quarantine if MPI gives up there.
int PersistentAllReduce::start() {
  MPI_Request* request = staging_.add_request();
  *request = request_;
  return MPI_Start(request);
}

void PersistentAllReduce::release() {
  if (is_prepared()) (void)guarded([&] { return MPI_Request_free(&request_); });
}

}  // namespace dscomm
