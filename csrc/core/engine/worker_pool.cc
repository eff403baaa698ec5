#include "core/engine/worker_pool.h"

#include <pthread.h>

#include "core/base/thread.h"

namespace dscomm {

WorkerPool::~WorkerPool() {
  std::unique_lock lock(mutex_);
  stopping_ = true;
  tasks_.clear();
  arrived_.notify_all();
  ended_.wait(lock, [this] { return threads_ == 0; });  // ends: tasks are under their deadlines
}

Status WorkerPool::submit(std::function<void()> task) {
  std::lock_guard lock(mutex_);
  if (stopping_) return {};
  if (tasks_.size() < idle_) {
    tasks_.push_back(std::move(task));
    arrived_.notify_one();
    return {};
  }
  DSCOMM_ASSIGN_OR_RETURN(std::thread worker, start_thread("a queue of calls", [this] { work(); }));
  // The new thread cannot have used the pool yet, because it needs the lock.
  worker.detach();
  ++threads_;
  tasks_.push_back(std::move(task));
  return {};
}

void WorkerPool::work() {
  pthread_setname_np(pthread_self(), "dscomm-worker");
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    if (tasks_.empty()) {
      ++idle_;
      bool woken =
          arrived_.wait_for(lock, idle_time_, [this] { return stopping_ || !tasks_.empty(); });
      --idle_;
      if (!woken) break;
      continue;
    }
    std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    task = nullptr;  // destroys its captures before the lock is taken
    lock.lock();
  }
  --threads_;
  // Under the lock, because the destructor may destroy the pool as soon as it sees no thread.
  ended_.notify_all();
}

}  // namespace dscomm
