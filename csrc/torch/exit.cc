#include "torch/exit.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <thread>
#include <vector>

#include "core/base/format.h"
#include "core/engine/context.h"

namespace dscomm {
namespace {

// How long an exit waits for running calls. Enough for a call that all ranks have made; a call that
// a peer has not made may never end. Longer than kGraceOfLeaversNs, so that a call that waits for a
// departed rank fails first.
constexpr std::chrono::seconds kExitGrace{5};
// An exit pauses this long for other threads that need the GIL. (With a gloo group beside dscomm,
// one exit in three ended in SIGABRT without the pause, and none of 24 with it.)
constexpr std::chrono::milliseconds kOthersGrace{2};
// After that pause, an exit waits until the other threads of this process are idle, because a
// thread may need long to return to Python if no core is free. The limit of this wait is
// kReturnLimit if calls were aborted here, else kQuietLimit.
constexpr std::chrono::milliseconds kReturnLimit{1000}, kQuietLimit{20};

struct State {
  std::mutex mutex;
  std::condition_variable none_left;
  size_t calls = 0;
  std::vector<std::weak_ptr<Group>> groups;
  std::atomic<bool> exiting{false};  // relaxed: guards no data; set by the thread that ends the
                                     // process, read by any thread
};

// Never destroyed, since workers may use it during static destruction. A forked child gets a new
// one: its parent's calls and groups are not its own, and the mutex may have been held at the fork.
State* the_state = nullptr;

State& state() {
  static const bool made = [] {
    the_state = new State;
    return pthread_atfork(nullptr, nullptr, [] { the_state = new State; }) == 0;
  }();
  (void)made;  // if pthread_atfork() fails, for lack of memory, a forked child may wait too long in
               // wait_for_calls(), or forever for the mutex
  return *the_state;
}

std::vector<std::shared_ptr<Group>> living_groups() {
  std::lock_guard lock(state().mutex);
  std::vector<std::shared_ptr<Group>> groups;
  for (const std::weak_ptr<Group>& known : state().groups)
    if (std::shared_ptr<Group> group = known.lock()) groups.push_back(std::move(group));
  return groups;
}

// Whether another thread runs or is ready to run.
bool other_threads_run() {
  const std::string own = std::to_string(gettid());
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task", error)) {
    if (entry.path().filename() == own) continue;
    char stat[128] = "";  // "7 (python) R 1 ..."; the kernel limits the name to 15 characters
    std::FILE* file = std::fopen((entry.path() / "stat").c_str(), "re");
    if (file == nullptr) continue;  // the thread has ended
    const size_t bytes = std::fread(stat, 1, sizeof stat - 1, file);
    std::fclose(file);
    const char* name_end = bytes > 0 ? std::strrchr(stat, ')') : nullptr;
    if (name_end != nullptr && std::strncmp(name_end, ") R", 3) == 0) return true;
  }
  return false;
}

// Call it without the GIL. Waits kOthersGrace, then up to `limit`, for threads that need the GIL.
void yield_to_returning_threads(std::chrono::milliseconds limit) {
  std::this_thread::sleep_for(kOthersGrace);
  const auto end = std::chrono::steady_clock::now() + limit;
  while (other_threads_run() && std::chrono::steady_clock::now() < end)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void wait_for_calls() {
  std::unique_lock lock(state().mutex);
  state().none_left.wait_for(lock, kExitGrace, [] { return state().calls == 0; });
}

}  // namespace

void remember_group(const std::shared_ptr<Group>& group) {
  {
    std::lock_guard lock(state().mutex);
    std::erase_if(state().groups,
                  [](const std::weak_ptr<Group>& known) { return known.expired(); });
    state().groups.push_back(group);
  }
  if (state().exiting.load(std::memory_order_relaxed)) group->begin_exit();
}

void call_begins() {
  std::lock_guard lock(state().mutex);
  ++state().calls;
}

void call_ends() {
  std::lock_guard lock(state().mutex);
  if (--state().calls == 0) state().none_left.notify_all();
}

void wait_for_calls_at_exit() {
  if (state().exiting.load(std::memory_order_relaxed)) wait_for_calls();
}

void end_calls(const std::string& exception) {
  const std::vector<std::shared_ptr<Group>> groups = living_groups();
  for (const std::shared_ptr<Group>& group : groups) group->note_end(exception);
  const Deadline grace = Deadline::after(kExitGrace);
  (void)grace.remaining_ns();  // starts it
  bool ended_some = false;
  wait_for_calls();
  for (const std::shared_ptr<Group>& group : groups) {
    group->begin_exit();
    // A daemon thread may still be in a synchronous call.
    const std::chrono::milliseconds left(std::max<int64_t>(grace.remaining_ns() / 1'000'000, 0));
    if (group->idle_within(left)) continue;
    ended_some = true;
    group->abort(
        format_text("its process {} with calls under way; see its output",
                    exception.empty() ? "ended" : "was ended by an unhandled " + exception));
    (void)group->idle_within(kExitGrace);
  }
  wait_for_calls();
  state().exiting.store(true, std::memory_order_relaxed);
  // Another backend's worker may be waiting for the GIL in order to drop a tensor (gloo's does so
  // after the call has returned). It must get the GIL now, or it takes the process down.
  yield_to_returning_threads(ended_some ? kReturnLimit : kQuietLimit);
}

void leave_groups() {
  for (const std::shared_ptr<Group>& group : living_groups())
    // Skip a group with an unfinished call, which never ends if Python has killed its thread.
    if (group->idle_within(std::chrono::milliseconds(0))) group->shutdown_with_warning();
  Context::end_transport();
}

void end_child(const std::string& exception, bool is_alone) {
  for (const std::shared_ptr<Group>& group : living_groups()) group->note_end(exception);
  wait_for_calls();
  if (is_alone) leave_groups();
}

}  // namespace dscomm
