#include "core/base/memory_limit.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>

namespace dscomm {
namespace {

// The number behind `key` in a file of "key value" lines, or the whole file's number when key is
// empty; nothing for "max" or a missing file.
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

void take_smaller(MemoryLimit* limit, int64_t bytes, const std::string& source) {
  if (bytes < limit->available_bytes) *limit = {std::max<int64_t>(bytes, 0), source};
}

// Walks from this process's cgroup to the root; `root` is the controller's mount point.
void walk(MemoryLimit* limit, const std::string& root, std::string path, const char* max_file,
          const char* use_file, const char* inactive_key) {
  while (true) {
    const std::string folder = root + path;
    std::optional<int64_t> most = read_number(folder + "/" + max_file);
    std::optional<int64_t> used = read_number(folder + "/" + use_file);
    if (most && used) {
      int64_t droppable = read_number(folder + "/memory.stat", inactive_key).value_or(0);
      take_smaller(limit, *most - (*used - std::min(droppable, *used)),
                   std::string("cgroup ") + max_file + " of " + (path.empty() ? "/" : path));
    }
    if (path.empty() || path == "/") return;
    path.erase(path.find_last_of('/'));
  }
}

}  // namespace

MemoryLimit memory_limit(const std::string& proc, const std::string& cgroup) {
  MemoryLimit limit{std::numeric_limits<int64_t>::max(), "no limit"};
  if (std::optional<int64_t> kib = read_number(proc + "/meminfo", "MemAvailable:"))
    take_smaller(&limit, *kib * 1024, "MemAvailable");
  std::ifstream membership(proc + "/self/cgroup");
  std::string line;
  while (std::getline(membership, line)) {
    size_t first = line.find(':');
    size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string path = line.substr(second + 1);
    if (controllers == ",,")
      walk(&limit, cgroup, path, "memory.max", "memory.current", "inactive_file");
    else if (controllers.find(",memory,") != std::string::npos)
      walk(&limit, cgroup + "/memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes",
           "total_inactive_file");
  }
  return limit;
}

}  // namespace dscomm
