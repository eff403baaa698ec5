#include "core/base/memory_limit.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>

namespace dscomm {
namespace {

// The number after `key` in a file of "key value" lines; if key is empty, the only number in the
// file. Nothing for "max" or a missing file.
std::optional<int64_t> read_number(const std::string& path, const std::string& key = "") {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string first;
    words >> first;
    if (key.empty()) {
      if (first.empty() || first == "max") return std::nullopt;
      return std::strtoll(first.c_str(), nullptr, 10);
    }
    if (first == key) {
      int64_t value = 0;
      words >> value;
      return value;
    }
  }
  return std::nullopt;
}

// Without a limit, cgroup v1 reports 2^63, less a page. No real limit is as large as this constant.
constexpr int64_t kNoLimit = int64_t{1} << 62;

// Adds the limits of the cgroup `path` and of those above it, the topmost first. `root` is the
// controller's mount point.
void walk(std::vector<MemoryLimit>* limits, const std::string& root, std::string path,
          const char* max_file, const char* use_file, const char* inactive_key) {
  std::vector<MemoryLimit> found;
  while (true) {
    const std::string folder = root + path;
    std::optional<int64_t> most = read_number(folder + "/" + max_file);
    std::optional<int64_t> used = read_number(folder + "/" + use_file);
    if (most && used && *most < kNoLimit) {
      int64_t droppable = read_number(folder + "/memory.stat", inactive_key).value_or(0);
      int64_t bytes = *most - (*used - std::min(droppable, *used));
      found.push_back({std::max<int64_t>(bytes, 0),
                       std::string("cgroup ") + max_file + " of " + (path.empty() ? "/" : path),
                       folder});
    }
    if (path.empty() || path == "/") break;
    path.erase(path.find_last_of('/'));
  }
  limits->insert(limits->end(), found.rbegin(), found.rend());
}

// A file that all processes of a machine can open: the time namespace, which containers hardly ever
// unshare. Before Linux 5.6, the user namespace.
std::string machine_path(const std::string& proc) {
  const std::string time = proc + "/self/ns/time";
  return access(time.c_str(), R_OK) == 0 ? time : proc + "/self/ns/user";
}

}  // namespace

std::vector<MemoryLimit> memory_limits(const std::string& proc, const std::string& cgroup) {
  std::vector<MemoryLimit> limits;
  if (std::optional<int64_t> kib = read_number(proc + "/meminfo", "MemAvailable:"))
    limits.push_back({*kib * 1024, "MemAvailable", machine_path(proc)});
  std::ifstream membership(proc + "/self/cgroup");
  std::string line;
  while (std::getline(membership, line)) {
    size_t first = line.find(':');
    size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string path = line.substr(second + 1);
    if (controllers == ",,")
      walk(&limits, cgroup, path, "memory.max", "memory.current", "inactive_file");
    else if (controllers.find(",memory,") != std::string::npos)
      walk(&limits, cgroup + "/memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes",
           "total_inactive_file");
  }
  return limits;
}

MemoryLimit memory_limit(const std::string& proc, const std::string& cgroup) {
  MemoryLimit smallest{std::numeric_limits<int64_t>::max(), "no limit", ""};
  for (MemoryLimit& limit : memory_limits(proc, cgroup))
    if (limit.available_bytes < smallest.available_bytes) smallest = std::move(limit);
  return smallest;
}

}  // namespace dscomm
