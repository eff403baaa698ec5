#include "mpi/mpich/pmi_server.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>

#include "core/base/packer.h"
#include "core/base/thread.h"

namespace dscomm {
namespace {

// Limit of a request; MPI's own requests are shorter.
constexpr size_t kMostBytes = 1 << 20;

}  // namespace

Result<std::shared_ptr<PmiServer>> PmiServer::start(int size, std::string node_map) {
  std::shared_ptr<PmiServer> server(new PmiServer(size, std::move(node_map)));
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    return system_error("socketpair");
  server->server_ = UniqueFd(ends[0]);
  server->client_ = ends[1];
  DSCOMM_ASSIGN_OR_RETURN(std::thread thread,
                          start_thread("serving PMI", [server] { server->serve(); }));
  thread.detach();
  return server;
}

void PmiServer::serve() {
  std::string unread;
  char bytes[4096];
  while (unread.size() < kMostBytes) {
    const ssize_t count = ::read(server_.get(), bytes, sizeof bytes);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return;
    unread.append(bytes, static_cast<size_t>(count));
    std::lock_guard lock(mutex_);
    for (size_t end; (end = unread.find('\n')) != std::string::npos; unread.erase(0, end + 1))
      answer(std::string_view(unread).substr(0, end));
  }
}

void PmiServer::answer(std::string_view line) {
  say(session_.answer(line));
  if (lets_through_ && session_.is_in_barrier()) leave_barrier();
}

void PmiServer::leave_barrier() {
  is_taken_ = false;
  say(session_.leave_barrier());
}

void PmiServer::say(std::string_view text) {
  while (!text.empty()) {
    const ssize_t sent = ::send(server_.get(), text.data(), text.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return;  // MPI has closed its end
    text.remove_prefix(static_cast<size_t>(sent));
  }
}

std::optional<std::string> PmiServer::entered_barrier() {
  std::lock_guard lock(mutex_);
  if (!session_.is_in_barrier() || std::exchange(is_taken_, true)) return {};
  return session_.take_values();
}

Status PmiServer::end_barrier(const std::vector<std::string>& said) {
  std::lock_guard lock(mutex_);
  if (!session_.add_values(said)) return malformed_value("values of MPI from another rank");
  leave_barrier();
  return {};
}

void PmiServer::let_through() {
  std::lock_guard lock(mutex_);
  lets_through_ = true;
  if (session_.is_in_barrier()) leave_barrier();
}

}  // namespace dscomm
