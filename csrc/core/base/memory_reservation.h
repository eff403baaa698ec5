// MemoryReservation: memory that this process is about to take, reserved under the limits of the
// machine and of its cgroups, so that no other process counts on it.
//
// A process that reads a limit and then allocates is killed if others do the same at the same time,
// because all take what each has read. So a process announces memory before it reads the limits. It
// may take what a limit leaves, less what others have announced. The ledger of announcements is the
// kernel's table of record locks: under each limit, all processes can open one file or folder
// (MemoryLimit::path), and a process that takes n pages holds a read lock on n bytes of it, which
// it shortens as pages are charged. Nothing is written, and the kernel removes the locks of a
// process that dies.
//
// An flock on the same path orders those who announce, so that the first get the memory. Nothing
// depends on it: without it, two may see each other and both be refused.
//
// No other process can hold this one up for long. The order is waited for kLongestTurn at most: its
// holder may be any process of the machine, of less weight or stopped, while the peers of this one
// wait for it, and none of them notices that a rank has died. If announcements leave too little,
// this process waits while they change, kLongestWait at most. Announcements that have not changed
// for kStaleAfter (a stopped process, or a hostile one) are ignored, and that is logged. Where a
// path cannot be locked, limits are read and nothing is reserved; that is logged too.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/base/memory_limit.h"
#include "core/base/owned.h"
#include "core/base/status.h"

namespace dscomm {

class MemoryReservation {
 public:
  static constexpr std::chrono::milliseconds kLongestTurn{50};  // some hundred turns
  static constexpr std::chrono::milliseconds kStaleAfter{1000};
  static constexpr std::chrono::milliseconds kLongestWait{10000};

  // What is left to the rest of the machine when `bytes` are taken, and to page tables.
  static int64_t spare_bytes(size_t bytes);

  // Reserves `bytes`. kResource with both numbers where the limits do not hold them and
  // spare_bytes().
  static Result<MemoryReservation> make(size_t bytes, const std::string& proc = "/proc",
                                        const std::string& cgroup = "/sys/fs/cgroup");
  MemoryReservation(MemoryReservation&&) = default;
  ~MemoryReservation();  // gives back what was not taken

  // So many more bytes have been charged to this process. Whole pages, but for the last time.
  void taken(size_t bytes);

 private:
  struct Entry {
    UniqueFd ledger;
    int64_t begin = 0, end = 0;  // what is locked of it
  };
  enum class Refusal { kNone, kLimit, kOthers };
  struct Others {
    std::string path;
    int64_t bytes = -1;
    friend bool operator==(const Others&, const Others&) = default;
  };

  explicit MemoryReservation(size_t bytes) : bytes_(bytes) {}
  MemoryReservation(const MemoryReservation&) = delete;
  MemoryReservation& operator=(const MemoryReservation&) = delete;

  Refusal try_once(const std::string& proc, const std::string& cgroup, Others* others, Status* why);
  void announce(Entry* entry, const std::string& path);
  void withdraw();

  size_t bytes_ = 0;
  std::vector<Entry> entries_;  // by limit: no descriptor where its path cannot be locked
};

}  // namespace dscomm
