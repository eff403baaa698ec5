// How much memory this process can still take before the kernel's out-of-memory killer acts.
//
// Allocation beyond the limit of a machine or cgroup is not an error: the kernel kills a process.
// So the limits are read first. They are a snapshot, and other processes may take memory at the
// same time: use MemoryReservation to take memory.
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

// The machine's MemAvailable, and one entry for each visible cgroup of this process that has a
// limit: the limit minus the usage, without page cache that can be dropped. Ordered from the
// machine down to the process's cgroup. `proc` and `cgroup` are mount points; tests pass others.
std::vector<MemoryLimit> memory_limits(const std::string& proc = "/proc",
                                       const std::string& cgroup = "/sys/fs/cgroup");

// The smallest limit.
MemoryLimit memory_limit(const std::string& proc = "/proc",
                         const std::string& cgroup = "/sys/fs/cgroup");

}  // namespace dscomm
