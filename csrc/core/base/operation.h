// Operation: one call in flight, whoever runs it.
//
// Made pending, finished exactly once, by the thread that ran it. Callbacks run after the operation
// has left its group's queue and with no lock held, so that a callback may start the next call.
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

  // One that ended before it began: nothing of it was published.
  static std::shared_ptr<Operation> refuse(const Status& status);
  bool refused() const { return refused_; }

  bool done() const { return done_.load(std::memory_order_acquire); }  // pairs with finish()
  // How it ended; OK while it is still pending.
  Status status() const;
  // The group rank that a received message came from; -1 for everything else and until done.
  int source() const { return done() ? source_ : -1; }

  // Blocks until done and returns how it ended. A limit above zero gives up earlier with kTimeout;
  // the operation itself then goes on under its own deadline. May run the operation, or those
  // queued before it, on the calling thread.
  Status wait(std::chrono::milliseconds limit = std::chrono::milliseconds(0));

  // Calls back once when done: on the thread that finishes it, or at once on this one.
  void when_done(Callback callback);

  // Ends the operation; for whoever runs it. Call it with no lock held.
  void finish(const Status& status, int source = -1);

  // The two halves of finish(): marks the operation done and wakes who waits, with any lock held;
  // then calls back, with none.
  [[nodiscard]] std::vector<Callback> complete(const Status& status, int source = -1);
  static void call_back(const std::vector<Callback>& callbacks, const Status& status);

 protected:
  // Does what it can towards the end on the calling thread before that thread sleeps, within the
  // limit (0: the operation's own deadline).
  virtual void help(std::chrono::milliseconds limit) { (void)limit; }

 private:
  bool refused_ = false;           // set before anyone else has it
  std::atomic<bool> done_{false};  // released by finish(), acquired by done()
  int source_ = -1;
  Status status_;
  mutable std::mutex mutex_;
  std::condition_variable finished_;
  std::vector<Callback> callbacks_;
};

using OperationPtr = std::shared_ptr<Operation>;

}  // namespace dscomm
