// MpiStaging: the memory that one collective of MPI works in, and the request that works in it.
//
// User memory is never given to MPI: a pending request cannot be taken back, and a caller that was
// told of a timeout frees its tensors. Staging whose request is still pending when it goes is put
// into quarantine instead of being freed.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <memory>

#include "core/base/status.h"

namespace dscomm {

class MpiStaging {
 public:
  MpiStaging() = default;
  ~MpiStaging();
  MpiStaging(const MpiStaging&) = delete;
  MpiStaging& operator=(const MpiStaging&) = delete;

  // Room for at least `bytes` of data, beginning at a cache line, and for two tables of
  // `table_entries` counts, which MPI reads as long as the request is pending. Keeps no contents.
  // kResource when there is no memory.
  Status reserve(size_t bytes, size_t table_entries);

  std::byte* data() { return data_; }
  int* counts() { return tables_; }
  int* places() { return tables_ + table_entries_; }

  bool pending() const { return request != MPI_REQUEST_NULL; }

  MPI_Request request = MPI_REQUEST_NULL;

 private:
  std::unique_ptr<std::byte[]> memory_;
  std::byte* data_ = nullptr;
  size_t data_bytes_ = 0;
  int* tables_ = nullptr;
  size_t table_entries_ = 0;
};

}  // namespace dscomm
