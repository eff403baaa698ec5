// SocketSleep: a sleep that ends when one of several sockets has something to do.
//
// Some libraries, such as Open MPI, move data only inside their calls. A waiting thread then polls,
// and takes a core from the ranks that it waits for. If the library's sockets are known, the thread
// can sleep until one has data to read, or room for unsent data. The sleep does not end if another
// thread makes the library read the data first.
//
// The sockets belong to the library, which closes them when it likes. Every SocketSleep has its own
// epoll descriptors, since the kernel reports room once to each.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "core/base/owned.h"

namespace dscomm {

// The sockets of a library. Any thread.
class SocketList {
 public:
  // A socket of TCP, which may not be connected yet, or will listen.
  void add(int socket);

 private:
  friend class SocketSleep;
  struct Entry {
    uint64_t number;  // ascending
    int socket;
    uint64_t cookie;  // of the kernel, which gives no two sockets the same
  };

  std::mutex mutex_;
  std::vector<Entry> entries_;
  // The last entry's number. Written under the mutex. SocketSleep::follow() loads it without the
  // mutex, and takes the mutex if it has changed. Relaxed: the next call sees a missed change.
  std::atomic<uint64_t> last_{0};
};

// One thread at a time. The list outlives it.
class SocketSleep {
 public:
  // Calls of the library before a sleep. One that reads data reports what has come only in the next
  // call, and a collective of MPI needs several to go on.
  static constexpr int kPollsBefore = 8;

  explicit SocketSleep(SocketList& list) : list_(list) {}

  // Until a socket has data to read or a connection to accept, or has room again after it was full,
  // or the descriptor `other` has data (-1: none), or most_ns have passed, or spuriously; at once
  // if unread data is present. Returns false, without sleep, if the list has had no connection yet,
  // or if the system lacks descriptors or memory. If almost all of the last 1000 sleeps have ended
  // at once, the library seems to leave a socket unread, and the next sleep disregards the sockets.
  bool sleep(int64_t most_ns, int other = -1);

 private:
  // Takes in new sockets. False if some cannot be watched.
  bool follow();

  SocketList& list_;
  // Epoll descriptors. Data is reported as long as it is there, room only when it appears.
  UniqueFd data_, room_;
  uint64_t seen_ = 0;  // SocketList::last_
  bool has_connection_ = false, has_failed_ = false;
  int ends_at_once_ = 0;  // each other end makes up for ten
};

}  // namespace dscomm
