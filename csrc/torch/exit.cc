#include "torch/exit.h"

#include <pthread.h>

#include <algorithm>
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

}  // namespace

void remember_group(const std::shared_ptr<Group>& group) {
  std::lock_guard lock(state().mutex);
  std::erase_if(state().groups, [](const std::weak_ptr<Group>& known) { return known.expired(); });
  state().groups.push_back(group);
}

void call_begins() {
  std::lock_guard lock(state().mutex);
  ++state().calls;
}

void call_ends() {
  std::lock_guard lock(state().mutex);
  if (--state().calls == 0) state().none_left.notify_all();
}

void end_groups() {
  std::vector<std::shared_ptr<Group>> groups;
  std::unique_lock lock(state().mutex);
  const auto no_calls = [] { return state().calls == 0; };
  const Deadline grace = Deadline::after(kExitGrace);
  (void)grace.remaining_ns();  // starts it
  state().none_left.wait_for(lock, kExitGrace, no_calls);
  for (const std::weak_ptr<Group>& known : state().groups)
    if (std::shared_ptr<Group> group = known.lock()) groups.push_back(std::move(group));
  lock.unlock();
  for (const std::shared_ptr<Group>& group : groups) {
    // A synchronous call may be under way too, on a daemon thread.
    const std::chrono::milliseconds left(std::max<int64_t>(grace.remaining_ns() / 1'000'000, 0));
    if (!group->idle_within(left))
      group->abort("the process of rank " + std::to_string(group->rank()) +
                   " ended with calls under way");
    group->shutdown();
  }
  lock.lock();
  state().none_left.wait_for(lock, kExitGrace, no_calls);
  lock.unlock();
  Context::end_transport();
  // Another backend's worker may be waiting for the GIL in order to drop a tensor (gloo's does so
  // after the call has returned to its caller): it gets the GIL now, or takes the process down.
  std::this_thread::sleep_for(kOthersGrace);
}

}  // namespace dscomm
