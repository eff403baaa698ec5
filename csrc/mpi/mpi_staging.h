// MpiStaging: the memory that MPI works in, and the requests that work in it.
//
// User memory is never given to MPI: a pending request cannot be taken back, and a caller that was
// told of a timeout frees its tensors. Staging with a request that is still pending when it goes is
// put into quarantine instead of being freed.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "core/base/status.h"

namespace dscomm {

class MpiStaging {
 public:
  MpiStaging() = default;
  ~MpiStaging();
  MpiStaging(const MpiStaging&) = delete;
  MpiStaging& operator=(const MpiStaging&) = delete;

  // Room for at least `bytes` of data, beginning at a cache line, and for two tables of
  // `table_entries` counts, which MPI reads as long as a request is pending. Keeps no contents.
  // kResource when there is no memory.
  Status reserve(size_t bytes, size_t table_entries);

  std::byte* data() { return data_; }
  int* counts() { return tables_; }
  int* places() { return tables_ + table_entries_; }

  // For MPI to fill in, before another one is added.
  MPI_Request* add_request() { return &requests.emplace_back(MPI_REQUEST_NULL); }
  bool pending() const { return !requests.empty(); }

  std::vector<MPI_Request> requests;  // none once all are complete

 private:
  std::unique_ptr<std::byte[]> memory_;
  std::byte* data_ = nullptr;
  size_t data_bytes_ = 0;
  int* tables_ = nullptr;
  size_t table_entries_ = 0;
};

}  // namespace dscomm
