#include "mpi/open_mpi/tcp_hooks.h"

#include <dlfcn.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>

#include "core/base/log.h"
#include "core/transport/address_filter.h"
#include "mpi/mpi_wait.h"

namespace dscomm {
namespace {

using Token = std::array<char, 16>;
// A token that refuses every greeting.
const Token kRefuse{};

// Never destroyed: MPI calls the hooks until the process ends.
struct Guard {
  std::mutex mutex;
  bool is_on = false;
  std::vector<std::string> addresses;
};
Guard& the_guard() {
  static auto* const guard = new Guard;
  return *guard;
}

// Relaxed: read by a thread that has joined the one that calls MPI_Init_thread.
std::atomic<bool> were_called{false};
// Null: unchanged greetings. Release stores in guard_mpi_listeners() and admit_greetings() pair
// with acquire loads in the hooks.
std::atomic<const Token*> required{nullptr};

void note_socket(int socket) {
  were_called.store(true, std::memory_order_relaxed);
  mpi_sockets().add(socket);
  std::lock_guard lock(the_guard().mutex);
  if (!the_guard().is_on) return;
  if (Status status = admit_only(socket, the_guard().addresses); !status.ok())
    log_line(LogLevel::kInfo, "anybody may connect to MPI's port here: {}", status.message());
}

}  // namespace

std::string random_token() {
  Token token;
  if (getrandom(token.data(), token.size(), 0) != static_cast<ssize_t>(token.size())) return "";
  return std::string(token.data(), token.size());
}

void guard_mpi_listeners(const std::vector<std::string>& addresses, bool refuses_greetings) {
  if (refuses_greetings) required.store(&kRefuse, std::memory_order_release);
  std::lock_guard lock(the_guard().mutex);
  the_guard().is_on = true;
  the_guard().addresses = addresses;
}

bool are_hooks_called() { return were_called.load(std::memory_order_relaxed); }

void admit_greetings(const std::string& token) {
  {
    std::lock_guard lock(the_guard().mutex);
    the_guard().is_on = false;
  }
  Token* kept = nullptr;  // never destroyed, since the hooks use it until the process ends
  if (!token.empty()) {
    kept = new Token{};
    std::memcpy(kept->data(), token.data(), std::min(token.size(), kept->size()));
  }
  required.store(kept, std::memory_order_release);
}

}  // namespace dscomm

// As declared by Open MPI 4 and 5. The last two return the number of bytes; if it is too small,
// Open MPI closes the connection.
extern "C" {

__attribute__((visibility("default"))) void mca_btl_tcp_set_socket_options(int socket) {
  using SetOptions = void (*)(int);
  static const auto own =
      reinterpret_cast<SetOptions>(dlsym(RTLD_NEXT, "mca_btl_tcp_set_socket_options"));
  const int on = 1;
  if (own != nullptr)
    own(socket);
  else
    setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  dscomm::note_socket(socket);
}

// A greeting is one packet, so it has arrived completely or not at all.
__attribute__((visibility("default"))) int mca_btl_tcp_recv_blocking(int socket, void* data,
                                                                     size_t size) {
  const dscomm::Token* const token = dscomm::required.load(std::memory_order_acquire);
  if (token == &dscomm::kRefuse) return 0;
  std::vector<char> got(size + (token == nullptr ? 0 : token->size()));
  ssize_t count;
  do count = recv(socket, got.data(), got.size(), MSG_DONTWAIT);
  while (count < 0 && errno == EINTR);
  if (count != static_cast<ssize_t>(got.size())) return 0;
  if (token != nullptr) {
    int differs = 0;  // compares in constant time
    for (size_t i = 0; i < token->size(); ++i) differs |= got[size + i] ^ (*token)[i];
    if (differs != 0) return 0;
  }
  std::memcpy(data, got.data(), size);
  return static_cast<int>(size);
}

__attribute__((visibility("default"))) int mca_btl_tcp_send_blocking(int socket, const void* data,
                                                                     size_t size) {
  const dscomm::Token* const token = dscomm::required.load(std::memory_order_acquire);
  std::vector<char> sent(static_cast<const char*>(data), static_cast<const char*>(data) + size);
  if (token != nullptr) sent.insert(sent.end(), token->begin(), token->end());
  ssize_t count;
  do count = send(socket, sent.data(), sent.size(), MSG_NOSIGNAL);
  while (count < 0 && errno == EINTR);
  return count == static_cast<ssize_t>(sent.size()) ? static_cast<int>(size) : -1;
}

}  // extern "C"
