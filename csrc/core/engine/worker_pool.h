// WorkerPool: threads that run the queues of busy groups.
//
// A task may block until the deadline of a call, and it may wait for a task on another rank. So
// each task gets a thread at once: an idle one or a new one. The pool grows with the number of busy
// groups, and shrinks when threads have been idle for a while.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

#include "core/base/status.h"

namespace dscomm {

class WorkerPool {
 public:
  explicit WorkerPool(std::chrono::milliseconds idle_time) : idle_time_(idle_time) {}
  ~WorkerPool();  // waits for running tasks; drops those that have not started

  // kResource if the system refuses a thread; the task is then dropped.
  Status submit(std::function<void()> task);

 private:
  void work();

  const std::chrono::milliseconds idle_time_;
  std::mutex mutex_;
  std::condition_variable arrived_, ended_;
  std::deque<std::function<void()>> tasks_;
  size_t threads_ = 0, idle_ = 0;
  bool stopping_ = false;
};

}  // namespace dscomm
