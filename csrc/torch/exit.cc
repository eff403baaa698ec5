#include "torch/exit.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "core/engine/context.h"

namespace dscomm {
namespace {

// Long enough for what all ranks have called; a call that a peer has yet to make may never come.
constexpr std::chrono::seconds kExitGrace{5};
// One exit in three with a gloo group beside dscomm ended in SIGABRT without it, none of 24 with
// it.
constexpr std::chrono::milliseconds kOthersGrace{2};

struct State {
  std::mutex mutex;
  std::condition_variable none_left;
  size_t calls = 0;
  std::vector<std::weak_ptr<Group>> groups;
  std::atomic<bool> exiting{false};  // relaxed: read by the thread that ends the process
};

// Never destroyed: workers may still use it while statics are. A forked child starts with another:
// the calls and groups of its parent are not its own, and a thread of the parent may have held the
// mutex at the fork.
State* the_state = nullptr;

State& state() {
  static const bool made = [] {
    the_state = new State;
    return pthread_atfork(nullptr, nullptr, [] { the_state = new State; }) == 0;
  }();
  (void)made;  // where it fails, for lack of memory, a child waits in end_groups() for nothing
  return *the_state;
}

bool no_calls() { return state().calls == 0; }

std::vector<std::shared_ptr<Group>> living_groups() {
  std::lock_guard lock(state().mutex);
  std::vector<std::shared_ptr<Group>> groups;
  for (const std::weak_ptr<Group>& known : state().groups)
    if (std::shared_ptr<Group> group = known.lock()) groups.push_back(std::move(group));
  return groups;
}

void wait_for_calls() {
  std::unique_lock lock(state().mutex);
  state().none_left.wait_for(lock, kExitGrace, no_calls);
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

void settle_calls() {
  if (state().exiting.load(std::memory_order_relaxed)) wait_for_calls();
}

void end_calls(const std::string& exception) {
  const std::vector<std::shared_ptr<Group>> groups = living_groups();
  for (const std::shared_ptr<Group>& group : groups) group->note_end(exception);
  const Deadline grace = Deadline::after(kExitGrace);
  (void)grace.remaining_ns();  // starts it
  wait_for_calls();
  for (const std::shared_ptr<Group>& group : groups) {
    group->begin_exit();
    // A synchronous call may be under way too, on a daemon thread.
    const std::chrono::milliseconds left(std::max<int64_t>(grace.remaining_ns() / 1'000'000, 0));
    if (group->idle_within(left)) continue;
    group->abort("its process " +
                 (exception.empty() ? "ended" : "was ended by an unhandled " + exception) +
                 " with calls under way; see its output");
    (void)group->idle_within(kExitGrace);
  }
  wait_for_calls();
  state().exiting.store(true, std::memory_order_relaxed);
  // Another backend's worker may be waiting for the GIL in order to drop a tensor (gloo's does so
  // after the call has returned to its caller): it gets the GIL now, or takes the process down.
  std::this_thread::sleep_for(kOthersGrace);
}

void leave_groups() {
  for (const std::shared_ptr<Group>& group : living_groups())
    // A thread that Python has ended may have left a call behind.
    if (group->idle_within(std::chrono::milliseconds(0))) group->shutdown_with_warning();
  Context::end_transport();
}

void end_child(const std::string& exception, bool is_alone) {
  for (const std::shared_ptr<Group>& group : living_groups()) group->note_end(exception);
  wait_for_calls();
  if (is_alone) Context::end_transport();
}

}  // namespace dscomm
