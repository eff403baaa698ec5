#include "core/formation/local_ranks.h"

#include <optional>

#include "core/base/settings.h"

namespace dscomm {

LocalRanks local_ranks_of_launcher(int rank, int size, const std::string& group) {
  const std::optional<TorchrunWorker> worker = torchrun_worker();
  // Processes that a worker has started inherit its variables, but may form other groups.
  if (!worker || worker->rank != rank || worker->world_size != size) return {};
  const int first = rank - worker->local_rank, count = worker->local_world_size;
  if (worker->local_rank < 0 || count <= worker->local_rank || first < 0 || first + count > size)
    return {};
  LocalRanks local;
  for (int k = 0; k < count; ++k) local.ranks.push_back(first + k);
  local.group = worker->attempt + group;
  // Assumes that all hosts have equally many ranks, which torchrun does not say.
  if (size % count == 0 && first % count == 0)
    for (int k = 0; k < size; k += count) local.leaders.push_back(k);
  return local;
}

}  // namespace dscomm
