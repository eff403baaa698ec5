// SocketSleep: a sleep that ends when one of several sockets is ready.
//
// Some libraries, such as Open MPI, move data only inside their calls. A waiting thread must then
// poll, and takes CPU time from the ranks that it waits for. If the library's sockets are known,
// the thread can sleep until one has data to read, or room for unsent data. The sleep does not end
// if another thread makes the library read the data first.
//
// The sockets belong to the library, which may close them at any time. Each SocketSleep has its own
// epoll descriptors, because the kernel reports new room only once per descriptor.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "core/base/owned.h"

namespace dscomm {

// The sockets of a library. Any thread may add some.
class SocketList {
 public:
  // Adds a TCP socket, which may be unconnected, or become a listener.
  void add(int socket);

 private:
  friend class SocketSleep;
  struct Entry {
    uint64_t number;  // ascending
    int socket;
    uint64_t cookie;  // from the kernel, unique for each socket
  };

  std::mutex mutex_;
  std::vector<Entry> entries_;
  // The number of the entry added last. Written under the mutex. SocketSleep::follow() loads it
  // without the mutex, and takes the mutex after a change. Relaxed: the next call sees a missed
  // change.
  std::atomic<uint64_t> last_{0};
};

// Used by one thread at a time. The list must outlive it.
class SocketSleep {
 public:
  // How often to call the library before each sleep: a call that reads data may report it only in
  // the next call, and an MPI collective needs several calls to continue.
  static constexpr int kPollsBefore = 8;

  explicit SocketSleep(SocketList& list) : list_(list) {}

  // Sleeps until a socket has data to read or a connection to accept, or has room again after it
  // was full, or the descriptor `other` has data (-1: none), or most_ns have passed. May return
  // spuriously. Returns at once if unread data is present. Returns false, without sleep, if the
  // list has had no connection yet, or if the system lacks descriptors or memory. If almost all of
  // the last 1000 sleeps have ended at once, the library seems to leave a socket unread, and the
  // next sleep disregards the sockets.
  bool sleep(int64_t most_ns, int other = -1);

 private:
  // Adds new sockets. False if a socket cannot be watched.
  bool follow();

  SocketList& list_;
  // Epoll descriptors. Data is level-triggered, room is edge-triggered.
  UniqueFd data_, room_;
  uint64_t seen_ = 0;  // SocketList::last_ at the last follow()
  bool has_connection_ = false, has_failed_ = false;
  int ends_at_once_ = 0;  // sleeps that ended at once, less ten for each other sleep
};

}  // namespace dscomm
