// WatchedProcess: tells whether a process of this host has ended, even if its id is reused.
#pragma once

#include <cstdint>

#include "core/base/owned.h"

namespace dscomm {

class WatchedProcess {
 public:
  // `start_time`: the process's process_start_time(), read while it was alive.
  WatchedProcess(int64_t pid, uint64_t start_time);

  bool gone();
  // Readable once the process is gone; -1 if the kernel has no pidfds: then poll gone().
  int fd() const { return descriptor_.get(); }

 private:
  int64_t pid_;
  uint64_t start_time_;
  UniqueFd descriptor_;  // pidfd
  bool gone_ = false;
};

}  // namespace dscomm
