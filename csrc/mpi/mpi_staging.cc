#include "mpi/mpi_staging.h"

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <new>
#include <utility>

#include "core/base/round_up.h"

namespace dscomm {
namespace {

constexpr size_t kLine = 64;

}  // namespace

void quarantine(std::unique_ptr<std::byte[]> memory) {
  static std::mutex mutex;
  // Never destroyed, because MPI may be polled at exit. Reachable, so it is not reported as a leak.
  static auto* kept = new std::vector<std::unique_ptr<std::byte[]>>();
  if (memory == nullptr) return;
  std::lock_guard lock(mutex);
  kept->push_back(std::move(memory));
}

MpiStaging::~MpiStaging() {
  if (pending()) quarantine(std::move(memory_));
}

Status MpiStaging::reserve(size_t bytes, size_t table_entries) {
  DSCOMM_CHECK(!pending(), "staging is in use until its requests are complete");
  if (memory_ != nullptr && bytes <= data_bytes_ && table_entries <= table_entries_) return {};
  // Calls with different needs share the staging, so it never shrinks.
  bytes = std::max(bytes, data_bytes_);
  table_entries = std::max(table_entries, table_entries_);
  const size_t table_bytes = round_up(2 * table_entries * sizeof(int), kLine);
  memory_.reset(new (std::nothrow) std::byte[kLine + table_bytes + bytes]);
  if (memory_ == nullptr) {
    data_bytes_ = table_entries_ = 0;
    return make_status(Code::kResource,
                       "cannot allocate {} bytes for this call; free memory on this host", bytes);
  }
  const auto address = reinterpret_cast<uintptr_t>(memory_.get());
  std::byte* line = memory_.get() + (kLine - address % kLine) % kLine;
  tables_ = reinterpret_cast<int*>(line);
  data_ = line + table_bytes;
  data_bytes_ = bytes;
  table_entries_ = table_entries;
  return {};
}

}  // namespace dscomm
