#include "mpi/quarantine.h"

#include <mutex>
#include <utility>
#include <vector>

namespace dscomm {

void quarantine(std::unique_ptr<std::byte[]> memory) {
  static std::mutex mutex;
  // Never destroyed, so that it outlives whatever polls MPI at exit; reachable, so no leak to
  // tools.
  static auto* kept = new std::vector<std::unique_ptr<std::byte[]>>();
  if (memory == nullptr) return;
  std::lock_guard lock(mutex);
  kept->push_back(std::move(memory));
}

}  // namespace dscomm
