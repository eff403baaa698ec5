// Starts the threads of the library, which take no signals: those are the program's own business.
#pragma once

#include <functional>
#include <thread>

#include "core/base/status.h"

namespace dscomm {

// kResource when the system gives no thread (ulimit -u, ulimit -v, a cgroup's pids.max); `what`
// says which one for the message.
Result<std::thread> start_thread(const char* what, std::function<void()> body);

}  // namespace dscomm
