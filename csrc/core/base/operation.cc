#include "core/base/operation.h"

#include <algorithm>
#include <optional>

#include "core/base/deadline.h"

namespace dscomm {
namespace {

// The longest sleep of a wait with a limit. One that took much longer shows that the process was
// stopped.
constexpr int64_t kSliceNs = 200'000'000;

}  // namespace

std::shared_ptr<Operation> Operation::refuse(const Status& status) {
  auto operation = std::make_shared<Operation>();
  operation->refused_ = true;
  operation->finish(status);
  return operation;
}

Status Operation::status() const { return done() ? status_ : Status(); }

Status Operation::wait(std::chrono::milliseconds limit) {
  const Deadline deadline = Deadline::after(limit);
  std::optional<TimeLeft> time_left;  // nothing: no limit
  if (limit.count() > 0) time_left.emplace(deadline);
  if (!done()) help(limit);
  std::unique_lock lock(mutex_, std::defer_lock);
  if (!done()) {
    lock.lock();
    auto is_done = [this] { return done(); };
    // Ends, because the thread that runs the operation has a deadline.
    if (!time_left) finished_.wait(lock, is_done);
    while (!is_done()) {
      const int64_t left_ns = time_left->ns();
      if (left_ns <= 0)
        return make_status(Code::kTimeout,
                           "timed out after {}, the limit passed to wait(); the call goes on: wait "
                           "again, or pass wait() a longer timeout",
                           duration_text(limit.count()));
      const int64_t slice_ns = std::min(left_ns, kSliceNs), began_ns = monotonic_ns();
      finished_.wait_for(lock, std::chrono::nanoseconds(slice_ns), is_done);
      deadline.note_slice(began_ns, slice_ns);
    }
  }
  return status_;
}

void Operation::when_done(Callback callback) {
  {
    std::lock_guard lock(mutex_);
    if (!done()) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback(status_);
}

void Operation::finish(const Status& status, int source) {
  call_back(complete(status, source), status);
}

std::vector<Operation::Callback> Operation::complete(const Status& status, int source) {
  std::vector<Callback> callbacks;
  {
    std::lock_guard lock(mutex_);
    status_ = status;
    source_ = source;
    callbacks.swap(callbacks_);
    done_.store(true, std::memory_order_release);  // pairs with done()
  }
  finished_.notify_all();
  return callbacks;
}

void Operation::call_back(const std::vector<Callback>& callbacks, const Status& status) {
  for (const Callback& callback : callbacks) callback(status);
}

}  // namespace dscomm
