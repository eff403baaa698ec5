// Handles fork() for Contexts. csrc/torch/exit.cc has a handler for its own state.
#include <pthread.h>
#include <unistd.h>

#include <atomic>

#include "core/engine/context.h"
#include "core/messages/point_to_point.h"

namespace dscomm {
namespace {

// Number of forks between the first process and this one. A Context with a smaller number belongs
// to an ancestor. Relaxed: written by the only thread of a new child.
std::atomic<int> fork_count{0};

}  // namespace

// Installs the handlers once. Called under process_mutex_.
Status Context::handle_forks() {
  static bool are_handled = false;
  if (are_handled) return {};
  if (pthread_atfork([] { process_mutex_.lock(); }, [] { process_mutex_.unlock(); },
                     after_fork_in_child) != 0)
    return Status(Code::kResource, "pthread_atfork failed");
  are_handled = true;
  return {};
}

// The child has neither the parent's threads nor its arenas, which are not mapped. It does not
// touch the parent's Context, except to close its descriptors: if left open, they would keep the
// memory and sockets of a dead parent alive.
void Context::after_fork_in_child() {
  fork_count.fetch_add(1, std::memory_order_relaxed);
  if (process_context_ != nullptr) {
    Context& parents = **process_context_;
    parents.directory_->close_descriptors();
    parents.arena_->close_descriptors();
    if (parents.pool_ != nullptr) parents.pool_->after_fork_in_child();
    parents.point_to_point_->close_descriptors();
    if (parents.transport_ != nullptr) parents.transport_->close_descriptors();
  }
  FlightRecord::after_fork_in_child();
  process_context_ = nullptr;
  process_mutex_.unlock();
}

void Context::note_process() {
  made_in_pid_ = getpid();
  made_after_forks_ = fork_count.load(std::memory_order_relaxed);
}

Status Context::check_process() const {
  if (made_after_forks_ == fork_count.load(std::memory_order_relaxed)) return {};
  return make_status(
      Code::kUnsupported,
      "this process (pid {}) was forked from pid {} after the group was made there; the group "
      "belongs to the parent. Make groups after the fork, or start the child with spawn",
      static_cast<int>(getpid()), made_in_pid_);
}

}  // namespace dscomm
