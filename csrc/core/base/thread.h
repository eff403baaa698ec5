// Starts the threads of the library. They block all signals, because signals belong to the program.
#pragma once

#include <functional>
#include <thread>

#include "core/base/status.h"

namespace dscomm {

// kResource if the system refuses a thread (ulimit -u, ulimit -v, a cgroup's pids.max); `what`
// names the thread in the message.
Result<std::thread> start_thread(const char* what, std::function<void()> body);

}  // namespace dscomm
