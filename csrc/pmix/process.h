// Watches another process of this host, and is not fooled by a reused process id.
#pragma once

#include <cstdint>

#include "core/base/owned.h"

namespace dscomm {

// When the process started, in the kernel's clock ticks; 0 if there is none or it is a zombie.
uint64_t process_start_time(int64_t pid);

class WatchedProcess {
 public:
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
