#include "pmix/process.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "core/base/process_state.h"

namespace dscomm {

WatchedProcess::WatchedProcess(int64_t pid, uint64_t start_time)
    : pid_(pid), start_time_(start_time) {
#ifdef SYS_pidfd_open
  descriptor_ = UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0)));
  if (!descriptor_.valid() && errno == ESRCH) gone_ = true;
#endif
  // Checked after opening the descriptor, which may otherwise be of a process with a reused id.
  if (process_start_time(pid) != start_time) gone_ = true;
}

bool WatchedProcess::gone() {
  if (gone_) return true;
  if (descriptor_.valid()) {
    pollfd entry{descriptor_.get(), POLLIN, 0};
    gone_ = ::poll(&entry, 1, 0) > 0;
  } else {
    gone_ = process_start_time(pid_) != start_time_;
  }
  return gone_;
}

}  // namespace dscomm
