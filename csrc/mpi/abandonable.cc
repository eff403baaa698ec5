#include "mpi/abandonable.h"

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#include "core/base/thread.h"
#include "core/team/first_cause.h"
#include "mpi/mpi_error.h"

namespace dscomm {
namespace {

constexpr std::chrono::milliseconds kSlice{5};
constexpr std::chrono::milliseconds kReasonNap{1};
// How long reason_or() polls. Longer than other ranks wait before they report a death
// (kCauseGraceNs), because they may know its cause better.
constexpr int64_t kReasonGraceNs = 2 * kCauseGraceNs;

struct Returned {
  std::mutex mutex;
  std::condition_variable condition;
  bool value = false;
};

}  // namespace

Status run_abandonable(const char* what, std::function<void()> body, const Deadline& deadline,
                       const GiveUpCheck& check) {
  auto returned = std::make_shared<Returned>();
  Result<std::thread> thread = start_thread(what, [returned, body = std::move(body)] {
    body();
    std::lock_guard lock(returned->mutex);
    returned->value = true;
    returned->condition.notify_one();
  });
  if (!thread.ok()) return thread.status();
  std::unique_lock lock(returned->mutex);
  TimeLeft time_left(deadline);
  int64_t began_ns = monotonic_ns();
  while (!returned->condition.wait_for(lock, kSlice, [&] { return returned->value; })) {
    lock.unlock();
    deadline.note_slice(began_ns, std::chrono::nanoseconds(kSlice).count());
    Status status = check();
    if (status.ok() && time_left.is_over())
      status = make_status(Code::kTimeout, "timed out: {} did not return within {}", what,
                           deadline.timeout_text());
    if (!status.ok()) {
      thread.value().detach();
      return status;
    }
    lock.lock();
    began_ns = monotonic_ns();
  }
  lock.unlock();
  thread.value().join();
  return {};
}

Status reason_or(const Status& refused, const Deadline& end, const GiveUpCheck& check) {
  const int64_t grace_end_ns = monotonic_ns() + kReasonGraceNs;
  while (monotonic_ns() < grace_end_ns && !end.expired()) {
    DSCOMM_RETURN_IF_ERROR(check());
    end.nap(kReasonNap);
  }
  return append_first_death(refused);
}

}  // namespace dscomm
