// PointToPoint: the threads that wait for operations, and the worker for all other operations.
#include <sched.h>

#include <algorithm>
#include <optional>

#include "core/base/deadline.h"
#include "core/base/thread.h"
#include "core/messages/state.h"

namespace dscomm {
namespace {

// How long a sleep may last if a peer has no doorbell: short compared with a hop between hosts. If
// the peer's sockets are known, their data ends the sleep, unless another thread takes that data.
// So the limit then grows, but slowly: by a sixteenth with each sleep until cells move.
constexpr int64_t kPolledSliceNs = 50'000, kLongestPolledSliceNs = 1'000'000;

// The worker checks at this interval whether threads make progress themselves. It takes over after
// a tick without such a thread, and parks after kTicksBeforeParking ticks without work.
constexpr std::chrono::milliseconds kWorkerTick{1};
constexpr int kTicksBeforeParking = 10;

}  // namespace

void PointToPoint::flush(std::chrono::milliseconds limit) {
  const Deadline deadline = Deadline::after(limit);
  std::unique_lock lock(mutex_);
  FinishedTransfers finished;
  while (in_flight_ && !deadline.expired()) {
    progress(&finished);
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::nanoseconds(kPolledSliceNs));
    lock.lock();
  }
  lock.unlock();
  deliver(std::move(finished));
}

Status PointToPoint::start_worker(const PointToPointGroup& group) {
  if (!worker_.joinable()) {
    Result<std::thread> worker = start_thread("the worker for messages", [this] { work(); });
    if (!worker.ok())
      return make_status(worker.status().code(), "rank {} of group '{}': {}", group.rank,
                         group.name, worker.status().message());
    worker_ = std::move(worker).value();
  }
  if (helpers_ == 0) unpark_worker();
  return {};
}

void PointToPoint::unpark_worker() {
  if (!worker_parked_) return;
  worker_parked_ = false;
  worker_wake_.notify_all();
}

void PointToPoint::help(Transfer& transfer, std::chrono::milliseconds limit) {
  const Deadline deadline = Deadline::after(limit);
  std::optional<TimeLeft> time_left;  // nothing: no limit
  if (limit.count() > 0) time_left.emplace(deadline);
  const WaitPolicy& policy = transfer.group->wait;
  int pauses = 0;
  int64_t yield_end_ns = 0;  // 0: not yielding yet
  std::unique_lock lock(mutex_);
  ++helpers_;
  ++helper_visits_;
  ++transfer.waiting_threads;
  while (!transfer.is_finished) {
    FinishedTransfers finished;
    bool moved = progress(&finished, &transfer);
    if (moved) check_when_due(&finished);
    bool is_finished = transfer.is_finished;
    deliver_as_helper(lock, std::move(finished));
    lock.unlock();
    if (moved || is_finished) {
      pauses = 0;
      yield_end_ns = 0;
      if (!is_finished && time_left && time_left->is_over()) break;
    } else if (pauses < policy.spin_pauses) {
      ++pauses;
      pause_core();
    } else {
      const int64_t now = monotonic_ns();
      const int64_t left_ns = time_left ? time_left->ns() : INT64_MAX;
      if (left_ns <= 0) break;
      if (yield_end_ns == 0) yield_end_ns = now + policy.yield_ns;
      if (now < yield_end_ns) {
        sched_yield();
      } else {
        lock.lock();
        if (!transfer.is_finished) {
          FinishedTransfers after = sleep_once(lock, time_left ? now + left_ns : INT64_MAX);
          deliver_as_helper(lock, std::move(after));
        }
        continue;
      }
    }
    lock.lock();
  }
  if (!lock.owns_lock()) lock.lock();
  --transfer.waiting_threads;
  if (--helpers_ == 0 && has_work()) unpark_worker();
}

// Delivers without the mutex. A callback may take long; meanwhile this thread does not count as a
// helper.
void PointToPoint::deliver_as_helper(std::unique_lock<std::mutex>& lock,
                                     FinishedTransfers finished) {
  if (finished.empty()) return;
  if (--helpers_ == 0 && has_work()) unpark_worker();
  lock.unlock();
  deliver(std::move(finished));
  lock.lock();
  ++helpers_;
  ++helper_visits_;
}

PointToPoint::FinishedTransfers PointToPoint::sleep_once(std::unique_lock<std::mutex>& lock,
                                                         int64_t end_ns) {
  FinishedTransfers finished;
  auto timeout_ns = [&] {
    int64_t now = monotonic_ns();
    int64_t end = std::min(end_ns, next_deadline_ns_);
    if (slice_ns_ > 0) end = std::min(end, now + slice_ns_);
    if (polled_count_ > 0) end = std::min(end, now + next_polled_slice());
    return end == INT64_MAX ? int64_t{-1} : std::max<int64_t>(end - now, 0);
  };
  if (polling_) {
    // Another thread polls, and notifies after its progress; finish_transfer() notifies when this
    // thread's operation is done. So this wait ends.
    const int64_t most_ns = timeout_ns(), began_ns = monotonic_ns();
    if (most_ns < 0) {
      changed_.wait(lock);
    } else {
      changed_.wait_for(lock, std::chrono::nanoseconds(most_ns));
      LostTime::of_process().note(began_ns + most_ns, monotonic_ns());
    }
  } else {
    polling_ = true;
    std::atomic<uint32_t>& sleepers = arena_->header().doorbell_sleepers;
    // Dekker pair, all seq_cst: this thread increments the counter and then checks the channels
    // (Cell::number, consumed); a peer publishes or consumes and then loads the counter. So this
    // thread sees the cell, or the peer sees the sleeper.
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    if (!progress_before_sleep(&finished) && !stopping_) {
      const int64_t most_ns = timeout_ns(), began_ns = monotonic_ns();
      const bool polled = polled_count_ > 0;
      polled_slice_ns_ = next_polled_slice();
      // Leaves the sockets out if all their cells stay unread: that data would end every sleep.
      SocketSleep* far_sockets = some_are_polled_ ? remote_sockets_.get() : nullptr;
      asleep_ = true;
      lock.unlock();
      if (far_sockets == nullptr || !far_sockets->sleep(most_ns, doorbell_->descriptor()))
        doorbell_->sleep(polled ? std::min(most_ns, kPolledSliceNs) : most_ns);
      if (most_ns >= 0) LostTime::of_process().note(began_ns + most_ns, monotonic_ns());
      lock.lock();
      asleep_ = false;
      doorbell_->clear();
    }
    sleepers.fetch_sub(1, std::memory_order_relaxed);  // a late ring by a peer is harmless
    progress(&finished);
    polling_ = false;
    changed_.notify_all();
  }
  check_when_due(&finished);
  return finished;
}

// Makes progress, several times if a peer has no doorbell. Returns whether there was any.
bool PointToPoint::progress_before_sleep(FinishedTransfers* finished) {
  for (int polls = 1;; ++polls) {
    if (progress(finished) || !finished->empty()) return true;
    if (polled_count_ == 0 || polls == SocketSleep::kPollsBefore) return false;
  }
}

int64_t PointToPoint::next_polled_slice() const {
  if (remote_sockets_ == nullptr || !some_are_polled_) return kPolledSliceNs;
  return std::clamp(polled_slice_ns_ + polled_slice_ns_ / 16, kPolledSliceNs,
                    kLongestPolledSliceNs);
}

// The worker: makes progress while no thread waits for an operation. A thread that waits serves
// itself faster, so the worker takes over only after a tick without one.
void PointToPoint::work() {
  std::unique_lock lock(mutex_);
  uint64_t seen_visits = helper_visits_;
  int idle_ticks = 0;
  worker_wake_.wait_for(lock, kWorkerTick, [this] { return stopping_; });
  while (!stopping_) {
    bool attended = helpers_ > 0 || polling_ || helper_visits_ != seen_visits;
    seen_visits = helper_visits_;
    if (has_work() && !attended) {
      idle_ticks = 0;
      FinishedTransfers finished = sleep_once(lock, INT64_MAX);
      lock.unlock();
      deliver(std::move(finished));
      lock.lock();
      continue;
    }
    if (++idle_ticks < kTicksBeforeParking || (has_work() && helpers_ == 0)) {
      worker_wake_.wait_for(lock, kWorkerTick, [this] { return stopping_; });
      continue;
    }
    // Unparked by the next pending operation, or by the last helper if it leaves work behind.
    worker_parked_ = true;
    worker_wake_.wait(lock, [this] { return stopping_ || !worker_parked_; });
    idle_ticks = 0;
  }
}

}  // namespace dscomm
