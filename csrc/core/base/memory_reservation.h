// MemoryReservation: reserves memory under the limits of the machine and of the cgroups before this
// process takes it, so that no other process plans with the same memory.
//
// If several processes read a limit at the same time and then allocate, they exceed it together and
// are killed. So a process announces its memory before it reads the limits. It may take what a
// limit leaves, minus what others have announced. Announcements are record locks of the kernel. For
// each limit, all processes can open one file or folder (MemoryLimit::path). A process that takes n
// pages holds a read lock on n bytes of this file, at a random offset, and shortens it as pages are
// charged; the others add up the lengths. The kernel removes the locks of a dead process.
//
// An flock on the same path serialises announcements, so that the first process gets the memory.
// Correctness does not depend on the flock: without it, two processes may see each other and both
// be refused.
//
// Other processes cannot delay this one for long. It waits for the flock for kLongestTurn at most,
// because the holder may be any process of the machine, even a stopped one, and the peers of this
// rank wait meanwhile. If announcements leave too little memory, this process waits while they
// change, for kLongestWait at most. Announcements that have not changed for kStaleAfter (of a
// stopped or hostile process) are ignored, with a log message. If a limit's path cannot be locked,
// that limit is read, but nothing is reserved under it. The first such path is logged.
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
  static constexpr std::chrono::milliseconds kLongestTurn{50};  // time for 100 announcements
  static constexpr std::chrono::milliseconds kStaleAfter{1000};
  static constexpr std::chrono::milliseconds kLongestWait{10000};

  // The bytes that must stay free for page tables and other processes when `bytes` are taken.
  static int64_t spare_bytes(size_t bytes);

  // Reserves `bytes`. kResource, with the available and needed bytes, if a limit, minus what others
  // have announced, leaves less than the sum of `bytes` and spare_bytes().
  static Result<MemoryReservation> make(size_t bytes, const std::string& proc = "/proc",
                                        const std::string& cgroup = "/sys/fs/cgroup");
  MemoryReservation(MemoryReservation&&) = default;
  ~MemoryReservation();  // withdraws the reservation of bytes not taken

  // Call when `bytes` more have been charged to this process: whole pages, except in the last call.
  void taken(size_t bytes);

 private:
  struct Entry {
    UniqueFd ledger;
    int64_t begin = 0, end = 0;  // the locked range
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
  std::vector<Entry> entries_;  // one for each limit; no descriptor if its path cannot be locked
};

}  // namespace dscomm
