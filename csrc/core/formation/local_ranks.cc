#include "core/formation/local_ranks.h"

#include <cstdlib>

#include "core/base/settings.h"

namespace dscomm {
namespace {

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// -1 where it is no number.
int number(const char* name) {
  const std::string text = variable(name);
  char* end = nullptr;
  const long value = std::strtol(text.c_str(), &end, 10);
  return text.empty() || *end != '\0' || value < 0 || value > (1 << 30) ? -1
                                                                        : static_cast<int>(value);
}

}  // namespace

LocalRanks local_ranks_of_launcher(int rank, int size, const std::string& group) {
  // A worker may have started processes that form groups of their own, and inherit all of these.
  if (!started_by_torchrun() || number("RANK") != rank || number("WORLD_SIZE") != size) return {};
  const int local_rank = number("LOCAL_RANK"), count = number("LOCAL_WORLD_SIZE");
  const int first = rank - local_rank;
  if (local_rank < 0 || count <= local_rank || first < 0 || first + count > size) return {};
  LocalRanks local;
  for (int k = 0; k < count; ++k) local.ranks.push_back(first + k);
  for (const char* name :
       {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"})
    local.group += variable(name) + "/";
  local.group += group;
  return local;
}

}  // namespace dscomm
