// How much memory this process can still take before the kernel would kill somebody for it.
//
// Allocating past the limit of a machine or cgroup brings the out-of-memory killer, not an error,
// so the limits are read first. What is read is a promise about what is visible, no more. Others
// may take memory at the same time: MemoryReservation is for taking it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace dscomm {

struct MemoryLimit {
  int64_t available_bytes = 0;
  std::string source;  // "MemAvailable", "cgroup memory.max of /job"
  std::string path;    // a file or folder that every process under this limit can open
};

// MemAvailable, and for every visible cgroup above this process that has a limit, that limit less
// its use (page cache that can be dropped is not counted as use). From the machine down to the
// process's own cgroup. `proc` and `cgroup` are the mount points, other than the real ones in
// tests.
std::vector<MemoryLimit> memory_limits(const std::string& proc = "/proc",
                                       const std::string& cgroup = "/sys/fs/cgroup");

// The smallest of them.
MemoryLimit memory_limit(const std::string& proc = "/proc",
                         const std::string& cgroup = "/sys/fs/cgroup");

}  // namespace dscomm
