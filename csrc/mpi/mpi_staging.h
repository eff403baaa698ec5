// MpiStaging: the memory that MPI reads and writes, and the requests that use it.
//
// MPI never gets user memory: MPI cannot reliably cancel a pending request, and a caller may free
// its tensors after a timeout. Staging that is destroyed with a pending request goes into
// quarantine.
//
// Quarantine: memory that MPI may still access is never freed. MPI may continue a pending request
// in any later call, of any Team.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "core/base/status.h"

namespace dscomm {

// Thread-safe. `memory` may be null.
void quarantine(std::unique_ptr<std::byte[]> memory);

class MpiStaging {
 public:
  MpiStaging() = default;
  ~MpiStaging();
  MpiStaging(const MpiStaging&) = delete;
  MpiStaging& operator=(const MpiStaging&) = delete;

  // Makes room for at least `bytes` of data, aligned to a cache line, and for `table_entries` each
  // of counts() and offsets(), which MPI reads while a request is pending. Keeps the memory if it
  // is large enough; else discards the contents. kResource if memory runs out.
  Status reserve(size_t bytes, size_t table_entries);

  std::byte* data() { return data_; }
  int* counts() { return tables_; }
  int* offsets() { return tables_ + table_entries_; }

  // A new request, which MPI must fill in before the next one is added.
  MPI_Request* add_request() { return &requests.emplace_back(MPI_REQUEST_NULL); }
  bool pending() const { return !requests.empty(); }

  std::vector<MPI_Request> requests;  // empty once all are complete

 private:
  std::unique_ptr<std::byte[]> memory_;
  std::byte* data_ = nullptr;
  size_t data_bytes_ = 0;
  int* tables_ = nullptr;
  size_t table_entries_ = 0;
};

}  // namespace dscomm
