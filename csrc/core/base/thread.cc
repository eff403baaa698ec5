#include "core/base/thread.h"

#include <pthread.h>
#include <signal.h>

#include <system_error>

namespace dscomm {

Result<std::thread> start_thread(const char* what, std::function<void()> body) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread;
  Status status;
  try {
    thread = std::thread(std::move(body));
  } catch (const std::system_error& error) {
    status = make_status(Code::kResource,
                         "{} could not start its thread: {}; look at the limits on threads and "
                         "address space (ulimit -u, ulimit -v, the cgroup's pids.max)",
                         what, error.what());
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (!status.ok()) return status;
  return thread;
}

}  // namespace dscomm
