// Replaces csrc/core/base/memory_limit.cc and csrc/core/topology/usable.cc, which read the
// machine's files for every group: a world declares its cpus, has no quota, and limit_memory() sets
// its memory.
#include "machine.h"

#include <limits>

#include "core/base/memory_limit.h"
#include "core/topology/topology.h"

namespace dscomm {
namespace {
std::string cpus = "0-1";
}  // namespace

void schedule::set_cpus(const std::string& list) { cpus = list; }

std::string process_cpu_list() { return cpus; }

double cgroup_cpu_quota(const std::string&) { return std::numeric_limits<double>::infinity(); }

std::vector<MemoryLimit> memory_limits(const std::string&, const std::string&) { return {}; }

MemoryLimit memory_limit(const std::string&, const std::string&) {
  return {std::numeric_limits<int64_t>::max(), "no limit", ""};
}

}  // namespace dscomm
