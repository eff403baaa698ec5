// How much memory this process can still take before the kernel would kill somebody for it.
//
// Allocating past the limit of a machine or cgroup brings the out-of-memory killer, not an error,
// so the limits are read first. What is read is a promise about what is visible, no more.
#pragma once

#include <cstdint>
#include <string>

namespace dscomm {

struct MemoryLimit {
  int64_t available_bytes = 0;
  std::string source;  // "MemAvailable", "cgroup memory.max of /job"
};

// The smallest of MemAvailable and, for every visible cgroup above this process, its limit less its
// use (page cache that can be dropped is not counted as use). `proc` and `cgroup` are the mount
// points, other than the real ones in tests.
MemoryLimit memory_limit(const std::string& proc = "/proc",
                         const std::string& cgroup = "/sys/fs/cgroup");

}  // namespace dscomm
