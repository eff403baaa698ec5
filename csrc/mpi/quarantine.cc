#include "mpi/quarantine.h"

#include <mutex>
#include <utility>
#include <vector>

namespace dscomm {

void quarantine(std::unique_ptr<std::byte[]> memory) {
  static std::mutex mutex;
  // Never destroyed, because MPI may be polled at exit. Reachable, so it is not reported as a leak.
  static auto* kept = new std::vector<std::unique_ptr<std::byte[]>>();
  if (memory == nullptr) return;
  std::lock_guard lock(mutex);
  kept->push_back(std::move(memory));
}

}  // namespace dscomm
