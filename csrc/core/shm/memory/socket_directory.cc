#include "core/shm/memory/socket_directory.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/base/log.h"
#include "core/base/thread.h"
#include "core/shm/memory/abstract_socket.h"

namespace dscomm {
namespace {

struct Request {
  uint64_t magic;
  uint32_t version;
  uint32_t reserved;
  ArenaId arena;
};
struct Reply {
  uint64_t magic;
  uint64_t arena_bytes;
  uint64_t pool_bytes;  // 0: it has no pool
  uint32_t has_pidfd;
  uint32_t reserved;
};
// Sent in this order: the arena, the pidfd, the pool.
constexpr int kMostDescriptors = 3;

Directory::Attached too_late() {
  return {nullptr, "timed out before it handed over its memory", Code::kTimeout};
}

// How long the service waits for the request of a connected peer, while other peers wait.
constexpr std::chrono::milliseconds kAnswerLimit{1000};

// The longest sleep here, so that time in which this process is stopped is noticed.
constexpr int64_t kDirectorySliceNs = 100'000'000;

// How long the next sleep lasts.
int64_t slice_of(TimeLeft& time_left) {
  return std::clamp<int64_t>(time_left.ns(), 1'000'000, kDirectorySliceNs);
}

// Waits in slices until the descriptor is readable or the deadline passes; at least one slice.
bool wait_readable(int fd, const Deadline& deadline, TimeLeft& time_left) {
  do {
    const int64_t slice_ns = slice_of(time_left), began_ns = monotonic_ns();
    pollfd entry{fd, POLLIN, 0};
    int ready = ::poll(&entry, 1, static_cast<int>(slice_ns / 1'000'000));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return false;
    deadline.note_slice(began_ns, slice_ns);
  } while (!time_left.is_over());
  return false;
}

bool send_with_descriptors(int socket, const Reply& reply, const int* descriptors, size_t count) {
  iovec data{const_cast<Reply*>(&reply), sizeof reply};
  alignas(cmsghdr) char control[CMSG_SPACE(kMostDescriptors * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = CMSG_SPACE(count * sizeof(int));
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(count * sizeof(int));
  std::memcpy(CMSG_DATA(header), descriptors, count * sizeof(int));
  return sendmsg(socket, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof reply);
}

// Receives up to kMostDescriptors descriptors and returns their number (fewer than sent if this
// process may open no more), or -1 if the other end closed.
int receive_with_descriptors(int socket, Reply* reply, UniqueFd* descriptors) {
  iovec data{reply, sizeof *reply};
  alignas(cmsghdr) char control[CMSG_SPACE(kMostDescriptors * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  if (recvmsg(socket, &message, MSG_CMSG_CLOEXEC) != static_cast<ssize_t>(sizeof *reply)) return -1;
  int received = 0;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    int count = static_cast<int>((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    for (int i = 0; i < count && received < kMostDescriptors; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(header) + static_cast<size_t>(i) * sizeof(int), sizeof fd);
      descriptors[received++] = UniqueFd(fd);
    }
  }
  return received;
}

// Asks the peer once. If why_not is empty, *received is the number of descriptors; -1: it hung up.
Directory::Attached ask(const PeerAddress& address, const Deadline& deadline, TimeLeft& time_left,
                        Reply* reply, UniqueFd* descriptors, int* received) {
  UniqueFd connection(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!connection.valid())
    return {nullptr, std::string("no Unix socket (ulimit -n?): ") + std::strerror(errno),
            Code::kResource};
  const AbstractAddress name(address.socket);
  while (true) {
    // connect() blocks while the backlog of a stopped process is full, so it gets a time limit.
    const int64_t slice_ns = slice_of(time_left), began_ns = monotonic_ns();
    timeval slice{0, static_cast<suseconds_t>(slice_ns / 1000)};
    setsockopt(connection.get(), SOL_SOCKET, SO_SNDTIMEO, &slice, sizeof slice);
    if (connect(connection.get(), name.get(), name.bytes) == 0) break;
    const int error = errno;
    if (error == ECONNREFUSED) return {nullptr, "it has ended", Code::kPeerDied};
    if (error != EAGAIN && error != EINTR)
      return {nullptr, std::string("connecting to it failed: ") + std::strerror(error)};
    deadline.note_slice(began_ns, slice_ns);
    if (time_left.is_over()) return too_late();
  }
  if (!is_same_user(connection.get())) return {nullptr, "it runs as another user"};
  Request request{kArenaMagic, kLayoutVersion, 0, address.arena};
  if (send(connection.get(), &request, sizeof request, MSG_NOSIGNAL) !=
      static_cast<ssize_t>(sizeof request))
    return {};
  if (!wait_readable(connection.get(), deadline, time_left)) return too_late();
  *received = receive_with_descriptors(connection.get(), reply, descriptors);
  return {};
}

}  // namespace

PeerAddress describe_this_process(const Arena& arena) {
  PeerAddress address;
  address.uid = geteuid();
  address.arena = arena.id();
  address.pid = getpid();
  if (gethostname(address.host, sizeof address.host - 1) != 0) std::strcpy(address.host, "unknown");
  return address;
}

Result<PeerAddress> SocketDirectory::publish(std::shared_ptr<Arena> arena,
                                             std::shared_ptr<TensorPool> pool,
                                             const ArenaId& doorbell) {
  arena_ = std::move(arena);
  pool_ = std::move(pool);
  address_ = describe_this_process(*arena_);
  address_.doorbell = doorbell;
  if (getrandom(&address_.socket, sizeof address_.socket, 0) < 0) return system_error("getrandom");
  listener_ = UniqueFd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener_.valid()) return system_error("making a Unix socket");
  const AbstractAddress name(address_.socket);
  if (bind(listener_.get(), name.get(), name.bytes) != 0 || listen(listener_.get(), SOMAXCONN) != 0)
    return system_error("listening on an abstract Unix socket");
  stop_ = UniqueFd(eventfd(0, EFD_CLOEXEC));
  if (!stop_.valid()) return system_error("eventfd");
#ifdef SYS_pidfd_open
  own_pidfd_ = UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0)));
#endif
  Result<std::thread> service = start_thread("the service of shared memory", [this] {
    arena_->begin_life();
    is_born_.count_down();
    serve();
    arena_->end_life();
  });
  if (!service.ok()) return service.status();
  service_ = std::move(service).value();
  is_born_.wait();  // ends: the thread first locks only a mutex that no other has seen
  return address_;
}

SocketDirectory::~SocketDirectory() {
  if (!service_.joinable()) return;
  eventfd_write(stop_.get(), 1);
  service_.join();
}

void SocketDirectory::close_descriptors() {
  listener_.reset();
  stop_.reset();
  own_pidfd_.reset();
}

void SocketDirectory::serve() {
  while (true) {
    pollfd entries[2] = {{listener_.get(), POLLIN, 0}, {stop_.get(), POLLIN, 0}};
    if (::poll(entries, 2, -1) < 0) continue;  // ends: by the destructor or with the process
    if (entries[1].revents != 0) return;
    UniqueFd connection(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!connection.valid()) {
      // Out of descriptors: the peer stays in the backlog. Sleep instead of spinning.
      pollfd stopped{stop_.get(), POLLIN, 0};
      if (errno != EAGAIN) ::poll(&stopped, 1, 10);
      continue;
    }
    answer(connection.get());
  }
}

void SocketDirectory::answer(int connection) {
  // A peer of another user, or without the arena's id, gets nothing.
  Request request{};
  const Deadline deadline = Deadline::after(kAnswerLimit);
  TimeLeft time_left(deadline);
  if (!is_same_user(connection) || !wait_readable(connection, deadline, time_left) ||
      recv(connection, &request, sizeof request, 0) != static_cast<ssize_t>(sizeof request) ||
      request.magic != kArenaMagic || request.version != kLayoutVersion ||
      request.arena != arena_->id())
    return;
  Reply reply{kArenaMagic, arena_->size(), pool_ == nullptr ? 0 : pool_->size(), own_pidfd_.valid(),
              0};
  int descriptors[kMostDescriptors] = {arena_->fd()};
  size_t count = 1;
  if (own_pidfd_.valid()) descriptors[count++] = own_pidfd_.get();
  if (pool_ != nullptr) descriptors[count++] = pool_->fd();
  if (!send_with_descriptors(connection, reply, descriptors, count))
    log_line(LogLevel::kWarn, "sharing memory with a rank failed: {}", std::strerror(errno));
}

Directory::Attached SocketDirectory::attach(const PeerAddress& address, const Deadline& deadline) {
  if (address.magic != kArenaMagic || address.version != kLayoutVersion)
    return {nullptr, "it runs another version of dscomm; install the same everywhere"};
  if (address.arena == arena_->id()) return {std::make_shared<Peer>(address, arena_, pool_), ""};
  {
    std::lock_guard lock(mutex_);
    if (std::shared_ptr<Peer> peer = peers_[address.arena].lock()) return {std::move(peer), ""};
  }
  // Fetches the arena without the mutex, so that other groups can form while this thread waits.
  Attached attached = fetch(address, deadline);
  if (attached.peer == nullptr) return attached;
  std::lock_guard lock(mutex_);
  std::erase_if(peers_, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<Peer>& known = peers_[address.arena];
  // If two threads have fetched the same arena, the second uses the first one's Peer.
  if (std::shared_ptr<Peer> peer = known.lock()) return {std::move(peer), ""};
  known = attached.peer;
  return attached;
}

Directory::Attached SocketDirectory::fetch(const PeerAddress& address, const Deadline& deadline) {
  Reply reply{};
  UniqueFd descriptors[kMostDescriptors];
  // A live process answers, because the request has the arena id that it published; but it hangs up
  // on slow requests, so try again. A process that has ended refuses the next connection.
  TimeLeft time_left(deadline);
  int received = -1;
  while (true) {
    Attached refusal = ask(address, deadline, time_left, &reply, descriptors, &received);
    if (!refusal.why_not.empty()) return refusal;
    if (received >= 0) break;
    if (time_left.is_over()) return too_late();
    deadline.nap(kMs);
  }
  if (received == 0)
    return {nullptr, "no descriptor is left for its memory (ulimit -n)", Code::kResource};
  if (reply.magic != kArenaMagic) return {nullptr, "what it handed over is not its memory"};
  if (reply.arena_bytes < kPageBytes) return {nullptr, "the memory it handed over is too small"};
  Result<Mapping> mapped = map_for_reading(descriptors[0].get(), reply.arena_bytes);
  if (!mapped.ok()) return {nullptr, mapped.status().message(), mapped.status().code()};
  Mapping mapping = std::move(mapped).value();
  auto* header = reinterpret_cast<const ArenaHeader*>(mapping.data());
  // Proof of locality: the mapped memory contains the id that came through the store.
  if (header->magic != kArenaMagic || header->id != address.arena ||
      header->arena_bytes != reply.arena_bytes)
    return {nullptr, "the memory it handed over is not the arena it published"};
  UniqueFd pidfd = reply.has_pidfd != 0 ? std::move(descriptors[1]) : UniqueFd();
  // A peer whose pool cannot be mapped is still usable: its tensors are staged.
  Peer::PoolView pool;
  if (reply.pool_bytes > 0) {
    Result<Mapping> view =
        map_for_reading(descriptors[reply.has_pidfd != 0 ? 2 : 1].get(), reply.pool_bytes);
    pool.missing = !view.ok();
    if (view.ok()) pool.mapping = std::move(view).value();
  }
  return {std::make_shared<Peer>(address, std::move(mapping), std::move(pidfd), std::move(pool)),
          ""};
}

}  // namespace dscomm
