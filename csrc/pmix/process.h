// A process of this host that one does not own, told from a later one of the same number.
#pragma once

#include <cstdint>

#include "core/base/owned.h"

namespace dscomm {

// When the process started, in the kernel's clock ticks; 0 when there is none, or only what is left
// of it until somebody asks for its exit status.
uint64_t process_start_time(int64_t pid);

class OtherProcess {
 public:
  OtherProcess(int64_t pid, uint64_t start_time);

  bool gone();
  // Readable once the process is gone; -1 where the kernel has no such descriptors, and gone() must
  // be asked.
  int fd() const { return descriptor_.get(); }

 private:
  int64_t pid_;
  uint64_t start_time_;
  UniqueFd descriptor_;  // pidfd
  bool gone_ = false;
};

}  // namespace dscomm
