#include "mpi/mpich/pmi_server.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>
#include <string_view>
#include <utility>

#include "core/base/owned.h"
#include "core/base/thread.h"
#include "mpi/mpich/pmi_session.h"

namespace dscomm {
namespace {

// Limit of a request; MPI's own are shorter than the longest value.
constexpr size_t kMostBytes = 1 << 20;

}  // namespace

struct PmiServer::State {
  State(int size, std::string node_map) : session(size, std::move(node_map)) {}

  UniqueFd server;
  int client = -1;  // closed by MPI
  std::mutex mutex;
  PmiSession session;
  bool is_taken = false;  // the puts before MPI's current barrier have been taken
  bool lets_through = false;

  // Called with the mutex held.
  void say(std::string_view text) {
    while (!text.empty()) {
      const ssize_t sent = ::send(server.get(), text.data(), text.size(), MSG_NOSIGNAL);
      if (sent < 0 && errno == EINTR) continue;
      if (sent < 0) return;  // MPI has closed its end
      text.remove_prefix(static_cast<size_t>(sent));
    }
  }
  void leave_barrier() {
    is_taken = false;
    say(session.leave_barrier());
  }
  void answer(std::string_view line) {
    say(session.answer(line));
    if (lets_through && session.is_in_barrier()) leave_barrier();
  }

  void serve() {
    std::string unread;
    char bytes[4096];
    while (unread.size() < kMostBytes) {
      const ssize_t count = ::read(server.get(), bytes, sizeof bytes);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) return;
      unread.append(bytes, static_cast<size_t>(count));
      std::lock_guard lock(mutex);
      for (size_t end; (end = unread.find('\n')) != std::string::npos; unread.erase(0, end + 1))
        answer(std::string_view(unread).substr(0, end));
    }
  }
};

Result<std::unique_ptr<PmiServer>> PmiServer::start(int size, std::string node_map) {
  auto state = std::make_shared<State>(size, std::move(node_map));
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    return system_error("socketpair");
  state->server = UniqueFd(ends[0]);
  state->client = ends[1];
  Result<std::thread> thread = start_thread("serving PMI", [state] { state->serve(); });
  if (!thread.ok()) return thread.status();
  thread.value().detach();
  return std::unique_ptr<PmiServer>(new PmiServer(std::move(state)));
}

int PmiServer::client() const { return state_->client; }

std::optional<std::string> PmiServer::entered_barrier() {
  std::lock_guard lock(state_->mutex);
  if (!state_->session.is_in_barrier() || std::exchange(state_->is_taken, true)) return {};
  return state_->session.take_values();
}

Status PmiServer::end_barrier(const std::vector<std::string>& said) {
  std::lock_guard lock(state_->mutex);
  if (!state_->session.add_values(said))
    return Status(Code::kInternal,
                  "what ranks said of their MPI is not understood; do all ranks run one build of "
                  "dscomm?");
  state_->leave_barrier();
  return {};
}

void PmiServer::let_through() {
  std::lock_guard lock(state_->mutex);
  state_->lets_through = true;
  if (state_->session.is_in_barrier()) state_->leave_barrier();
}

void PmiServer::close_descriptors() { state_->server.reset(); }

}  // namespace dscomm
