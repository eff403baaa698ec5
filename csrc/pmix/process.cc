#include "pmix/process.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "core/base/format.h"

namespace dscomm {

uint64_t process_start_time(int64_t pid) {
  std::FILE* file = std::fopen(format_text("/proc/{}/stat", pid).c_str(), "re");
  if (file == nullptr) return 0;
  char text[1024];
  size_t count = std::fread(text, 1, sizeof text - 1, file);
  std::fclose(file);
  text[count] = '\0';
  // The name, field 2, may contain spaces and brackets.
  const char* rest = std::strrchr(text, ')');
  if (rest == nullptr || rest[1] == '\0' || rest[2] == 'Z' || rest[2] == 'X') return 0;
  for (int field = 2; field < 22; ++field) {
    rest = std::strchr(rest + 1, ' ');
    if (rest == nullptr) return 0;
  }
  return std::strtoull(rest, nullptr, 10);
}

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
