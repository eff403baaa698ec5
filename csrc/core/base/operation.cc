#include "core/base/operation.h"

#include <algorithm>

namespace dscomm {

std::shared_ptr<Operation> Operation::refuse(const Status& status) {
  auto operation = std::make_shared<Operation>();
  operation->refused_ = true;
  operation->finish(status);
  return operation;
}

Status Operation::status() const {
  if (!done()) return {};
  return status_;
}

Status Operation::wait(std::chrono::milliseconds limit) {
  limit = std::min(limit, std::chrono::milliseconds(int64_t{1} << 42));  // some 139 years
  const auto limit_end = std::chrono::steady_clock::now() + limit;
  if (!done()) help(limit);
  if (!done()) {
    std::unique_lock lock(mutex_);
    auto is_done = [this] { return done(); };
    if (limit.count() > 0) {
      if (!finished_.wait_until(lock, limit_end, is_done))
        return make_status(Code::kTimeout, "not finished within the %lld ms that wait() was given",
                           static_cast<long long>(limit.count()));
    } else {
      finished_.wait(lock, is_done);  // ends: whoever runs the operation is under its deadline
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
