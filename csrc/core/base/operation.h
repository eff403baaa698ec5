// Operation: one call in flight.
//
// It is created pending, and finished exactly once, by the thread that has run it. Callbacks run
// with no lock held, after the operation has left its group's queue, so a callback may start the
// next call.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "core/base/status.h"

namespace dscomm {

class Operation : public std::enable_shared_from_this<Operation> {
 public:
  using Callback = std::function<void(const Status&)>;

  virtual ~Operation() = default;

  // Makes an operation that has failed before it began: other ranks have seen nothing of it.
  static std::shared_ptr<Operation> refuse(const Status& status);
  bool refused() const { return refused_; }

  bool done() const { return done_.load(std::memory_order_acquire); }  // pairs with complete()
  // The result; OK while the operation is pending.
  Status status() const;
  // The group rank that a received message came from; -1 for everything else and until done.
  int source() const { return done() ? source_ : -1; }

  // Blocks until done and returns the result. With a limit above zero, returns kTimeout if that
  // passes first; the operation then continues under its own deadline. May run this operation, or
  // those queued before it, on the calling thread.
  Status wait(std::chrono::milliseconds limit = std::chrono::milliseconds(0));

  // Calls back once: on the thread that finishes the operation, or in this call if it is done.
  void when_done(Callback callback);

  // Called by the thread that runs the operation, with no lock held.
  void finish(const Status& status, int source = -1);

  // The two halves of finish(). complete() marks the operation done, wakes waiting threads and
  // returns the callbacks; the caller may hold locks. call_back() must be called with none held.
  [[nodiscard]] std::vector<Callback> complete(const Status& status, int source = -1);
  static void call_back(const std::vector<Callback>& callbacks, const Status& status);

 protected:
  // Makes progress on the calling thread before that thread sleeps, within the limit (0: the
  // operation's own deadline).
  virtual void help(std::chrono::milliseconds limit) { (void)limit; }

 private:
  bool refused_ = false;           // set before other threads see the operation
  std::atomic<bool> done_{false};  // released by complete(), acquired by done()
  int source_ = -1;
  Status status_;
  mutable std::mutex mutex_;
  std::condition_variable finished_;
  std::vector<Callback> callbacks_;
};

using OperationPtr = std::shared_ptr<Operation>;

}  // namespace dscomm
