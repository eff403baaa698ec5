#include "core/store/bounded_store.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <thread>
#include <utility>

#include "core/base/log.h"
#include "core/base/thread.h"

namespace dscomm {
namespace {

// Added to the deadline, so that a rank that times out can still report this through the store.
constexpr int64_t kGraceNs = 1'000'000'000;
// The shortest limit of a call.
constexpr int64_t kLeastCallNs = 1'000'000'000;
// The limit of a call that begins after the deadline. The caller has other limits, too.
constexpr int64_t kAfterDeadlineNs = 60'000'000'000;
// Waits are slices of this length, so that they notice when the process was stopped.
constexpr std::chrono::milliseconds kSlice{100};

}  // namespace

// A thread that makes one call at a time.
class BoundedStore::CallThread {
 public:
  // Null if no thread can be started.
  static std::shared_ptr<CallThread> make() {
    auto call_thread = std::make_shared<CallThread>();
    Result<std::thread> thread =
        start_thread("calls of the store", [call_thread] { call_thread->serve(); });
    if (!thread.ok()) return nullptr;
    call_thread->thread_ = std::move(thread).value();
    return call_thread;
  }

  // False at the deadline: the thread is abandoned with the call; do not use the CallThread again.
  bool make_call(std::function<void()> body, const Deadline& deadline) {
    std::unique_lock lock(mutex_);
    body_ = std::move(body);
    changed_.notify_all();
    TimeLeft time_left(deadline);
    int64_t began_ns = monotonic_ns();
    while (!changed_.wait_for(lock, kSlice, [this] { return body_ == nullptr; })) {
      deadline.note_slice(began_ns, std::chrono::nanoseconds(kSlice).count());
      if (time_left.is_over()) {
        quits_ = true;
        thread_.detach();
        return false;
      }
      began_ns = monotonic_ns();
    }
    return true;
  }

  // Must not be called during a call.
  void quit() {
    {
      std::lock_guard lock(mutex_);
      quits_ = true;
      changed_.notify_all();
    }
    thread_.join();
  }

 private:
  void serve() {
    std::unique_lock lock(mutex_);
    while (true) {
      // Ends when make_call() or quit() wakes this thread.
      changed_.wait(lock, [this] { return quits_ || body_ != nullptr; });
      if (body_ == nullptr) return;
      lock.unlock();
      body_();  // no other thread touches body_ until it is empty
      lock.lock();
      body_ = nullptr;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> body_;  // of the call in progress
  bool quits_ = false;
  std::thread thread_;
};

BoundedStore::BoundedStore(std::shared_ptr<Store> store, const Deadline& deadline)
    : store_(std::move(store)), deadline_(deadline.later(kGraceNs)) {}

BoundedStore::~BoundedStore() {
  for (const std::shared_ptr<CallThread>& call_thread : idle_) call_thread->quit();
}

std::shared_ptr<BoundedStore::CallThread> BoundedStore::take_call_thread() {
  {
    std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      std::shared_ptr<CallThread> call_thread = std::move(idle_.back());
      idle_.pop_back();
      return call_thread;
    }
  }
  return CallThread::make();
}

Deadline BoundedStore::bound(int64_t own_ns) const {
  const Deadline shared(deadline_);  // a copy, because a Deadline belongs to one thread
  const int64_t left_ns = shared.remaining_ns();
  if (left_ns > std::max(own_ns, kLeastCallNs)) return shared;
  const int64_t least_ns = left_ns > 0 ? kLeastCallNs : kAfterDeadlineNs;
  return Deadline::after(std::chrono::milliseconds(std::max(own_ns, least_ns) / 1'000'000));
}

Status BoundedStore::run(const char* what, const std::string& key, const Deadline& bound,
                         std::function<void()> body) {
  {
    std::lock_guard lock(mutex_);
    if (!lost_.ok()) return lost_;
  }
  std::shared_ptr<CallThread> call_thread = take_call_thread();
  if (call_thread == nullptr) {
    // Warns only once, as each call of the store comes here then. Relaxed: orders nothing.
    static std::atomic<bool> has_warned{false};
    if (!has_warned.exchange(true, std::memory_order_relaxed))
      log_line(LogLevel::kWarn,
               "requests to the store through which ranks meet have no time limit now, because a "
               "thread for them cannot be started; raise ulimit -u, ulimit -v or the cgroup's "
               "pids.max");
    body();
    return {};
  }
  const bool returned = call_thread->make_call(std::move(body), bound);
  std::lock_guard lock(mutex_);
  if (returned) {
    idle_.push_back(std::move(call_thread));
    return {};
  }
  lost_ = make_status(Code::kResource,
                      "timed out after {}: the store through which ranks meet did not answer "
                      "({} key '{}'); check that the process that serves the store is running, and "
                      "that its host can be reached",
                      bound.timeout_text(), what, key);
  return lost_;
}

template <typename Body>
std::invoke_result_t<Body, Store&> BoundedStore::call(const char* what, const std::string& key,
                                                      const Deadline& bound, Body body) {
  auto answer = std::make_shared<std::optional<std::invoke_result_t<Body, Store&>>>();
  DSCOMM_RETURN_IF_ERROR(run(what, key, bound, [store = store_, body = std::move(body), answer] {
    *answer = body(*store);
  }));
  return std::move(**answer);
}

Status BoundedStore::set(const std::string& key, std::string_view value) {
  return call("set", key, bound(),
              [key, value = std::string(value)](Store& store) { return store.set(key, value); });
}

Result<std::string> BoundedStore::get(const std::string& key, const Deadline& deadline) {
  const int64_t own_ns = deadline.remaining_ns();  // starts the clock, also of the copy below
  return call("get", key, bound(std::max<int64_t>(own_ns, 0) + kLeastCallNs),
              [key, deadline](Store& store) { return store.get(key, deadline); });
}

Result<bool> BoundedStore::has(const std::string& key) {
  return call("look for", key, bound(), [key](Store& store) { return store.has(key); });
}

Result<std::optional<std::string>> BoundedStore::find(const std::string& key) {
  return call("look for", key, bound(), [key](Store& store) { return store.find(key); });
}

Result<bool> BoundedStore::has_all(const std::vector<std::string>& keys) {
  if (keys.empty()) return true;
  return call("look for", keys.front(), bound(),
              [keys](Store& store) { return store.has_all(keys); });
}

Result<std::optional<std::vector<std::string>>> BoundedStore::find_all(
    const std::vector<std::string>& keys) {
  if (keys.empty()) return std::optional<std::vector<std::string>>(std::in_place);
  return call("look for", keys.front(), bound(),
              [keys](Store& store) { return store.find_all(keys); });
}

Status BoundedStore::set_all(const KeysAndValues& values) {
  if (values.empty()) return {};
  return call("set", values.front().first, bound(),
              [values](Store& store) { return store.set_all(values); });
}

Result<int64_t> BoundedStore::add(const std::string& key, int64_t amount) {
  return call("add to", key, bound(),
              [key, amount](Store& store) { return store.add(key, amount); });
}

Status BoundedStore::remove(const std::string& key) {
  return call("remove", key, bound(), [key](Store& store) { return store.remove(key); });
}

}  // namespace dscomm
