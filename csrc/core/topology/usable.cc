// The cpus and the cgroup cpu quota that the kernel grants this process.

#include <dirent.h>
#include <hwloc.h>
#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <sstream>
#include <vector>

#include "core/topology/topology.h"

namespace dscomm {
namespace {

constexpr double kNoQuota = std::numeric_limits<double>::infinity();

// Calls f(tid) for every thread of this process.
template <typename F>
void for_each_thread(F f) {
  DIR* directory = opendir("/proc/self/task");
  if (directory == nullptr) {
    f(0);  // /proc is not mounted: use the calling thread alone
    return;
  }
  while (const dirent* entry = readdir(directory))
    if (entry->d_name[0] != '.') f(static_cast<pid_t>(std::atoi(entry->d_name)));
  closedir(directory);
}

// Adds the thread's cpus. A thread that has just ended has none.
void add_cpus_of(pid_t tid, hwloc_bitmap_t cpus) {
  // The kernel rejects a mask smaller than its own, and does not report the size that it needs.
  for (int cpu_count = 1024; cpu_count <= 1 << 20; cpu_count *= 2) {
    size_t mask_bytes = CPU_ALLOC_SIZE(cpu_count);
    cpu_set_t* mask = CPU_ALLOC(cpu_count);
    if (mask == nullptr) return;
    int rc = sched_getaffinity(tid, mask_bytes, mask);
    bool too_small = rc != 0 && errno == EINVAL;
    for (int cpu = 0; rc == 0 && cpu < cpu_count; ++cpu)
      if (CPU_ISSET_S(cpu, mask_bytes, mask)) hwloc_bitmap_set(cpus, static_cast<unsigned>(cpu));
    CPU_FREE(mask);
    if (!too_small) return;
  }
}

std::vector<std::string> fields_of(const std::string& text, char separator) {
  std::vector<std::string> fields;
  std::istringstream stream(text);
  for (std::string field; std::getline(stream, field, separator);) fields.push_back(field);
  return fields;
}

bool has_item(const std::string& comma_separated, const std::string& item) {
  for (const std::string& each : fields_of(comma_separated, ','))
    if (each == item) return true;
  return false;
}

// The quota in cpus, from a quota and a period in us; a quota of -1 (v1) or "max" (v2) is none.
double quota_of(const std::string& quota, const std::string& period) {
  double quota_us = std::strtod(quota.c_str(), nullptr);
  double period_us = std::strtod(period.c_str(), nullptr);
  return quota_us > 0 && period_us > 0 ? quota_us / period_us : kNoQuota;
}

double quota_of_directory(const std::string& directory, bool is_v2) {
  std::string quota, period;
  if (is_v2) {
    std::ifstream(directory + "/cpu.max") >> quota >> period;
  } else {
    std::ifstream(directory + "/cpu.cfs_quota_us") >> quota;
    std::ifstream(directory + "/cpu.cfs_period_us") >> period;
  }
  return quota_of(quota, period);
}

// The smallest quota of the cgroup at `path` (from /proc/self/cgroup) and of its ancestors, as far
// as this mount shows them.
double least_quota_above(const std::string& file_root, const std::string& mount_point,
                         const std::string& mount_root, std::string path, bool is_v2) {
  // In a container, the mount may show only a part of the hierarchy: `mount_root` is then a prefix
  // of the path.
  if (mount_root != "/") {
    bool inside = (path + "/").starts_with(mount_root + "/");
    path = inside ? path.substr(mount_root.size()) : "";
  }
  double least = kNoQuota;
  while (true) {
    least = std::min(least, quota_of_directory(file_root + mount_point + path, is_v2));
    size_t slash = path.rfind('/');
    if (slash == std::string::npos) return least;
    path.resize(slash);
  }
}

// The path of this process's cgroup: from the line "0::/path" in v2, "4:cpu,cpuacct:/path" in v1.
std::string cgroup_path(const std::string& file_root, bool is_v2) {
  std::ifstream file(file_root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    size_t first = line.find(':');
    size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    std::string controllers = line.substr(first + 1, second - first - 1);
    if (is_v2 ? controllers.empty() : has_item(controllers, "cpu")) return line.substr(second + 1);
  }
  return "";
}

}  // namespace

std::string process_cpu_list() {
  hwloc_bitmap_t cpus = hwloc_bitmap_alloc();
  for_each_thread([&](pid_t tid) { add_cpus_of(tid, cpus); });
  char* text = nullptr;
  std::string list;
  if (hwloc_bitmap_list_asprintf(&text, cpus) >= 0) list = text;
  std::free(text);
  hwloc_bitmap_free(cpus);
  return list;
}

double cgroup_cpu_quota(const std::string& file_root) {
  double least = kNoQuota;
  std::ifstream file(file_root + "/proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    // "36 35 0:31 /root /mount/point options optional... - type source super-options"
    size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    std::vector<std::string> before = fields_of(line.substr(0, dash), ' ');
    std::vector<std::string> after = fields_of(line.substr(dash + 3), ' ');
    if (before.size() < 5 || after.size() < 3) continue;
    bool is_v2 = after[0] == "cgroup2";
    if (!is_v2 && !(after[0] == "cgroup" && has_item(after[2], "cpu"))) continue;
    least = std::min(least, least_quota_above(file_root, before[4], before[3],
                                              cgroup_path(file_root, is_v2), is_v2));
  }
  return least;
}

}  // namespace dscomm
