// Arena: the memory of one rank that its peers read.
//
// Sealed, so that peers cannot write it. Memory is taken from the kernel as it is handed out, and
// is reused but never given back while the process lives.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/base/status.h"
#include "core/shm/layout.h"
#include "core/shm/sealed_memory.h"

namespace dscomm {

class Arena {
 public:
  // arena_bytes is address space; RLIMIT_AS and RLIMIT_FSIZE may make it smaller.
  static Result<std::shared_ptr<Arena>> create(size_t arena_bytes);
  ~Arena();

  int fd() const { return memory_.fd(); }
  ArenaId id() const { return header().id; }
  std::byte* data() const { return memory_.data(); }
  size_t size() const { return memory_.size(); }
  ArenaHeader& header() const { return *reinterpret_cast<ArenaHeader*>(memory_.data()); }

  // Bytes (rounded up to pages) of zeroed or reused memory, as an offset. kResource with both
  // numbers when a limit cannot hold it. Any thread.
  Result<uint64_t> allocate(size_t bytes);
  // Gives memory back for reuse. No peer may read it any more.
  void release(uint64_t offset, size_t bytes);

  // Memory that peers may still read: `is_free` is asked now and then (at allocations) and the
  // memory is released once it says yes.
  void release_when(std::function<bool()> is_free, std::vector<std::pair<uint64_t, size_t>> pieces);

  // OK when `bytes` more could be taken by each of `ranks` ranks of this host, else kResource with
  // both numbers.
  static Status check_limits(size_t bytes, int ranks);

  // Holds the life mutex on the calling thread; a thread that calls it must live as long as the
  // process (or call end_life before it ends).
  void begin_life();
  // Also drops what waits to be released: its questions hold peers, which may hold this arena.
  void end_life();

  // In a forked child: closes what it inherited. Nothing else works on this object there.
  void close_descriptors() { memory_.close_descriptor(); }

  // Bytes taken from the kernel so far, and those of them that are handed out.
  size_t resident_bytes() const;
  size_t used_bytes() const;

 private:
  Arena() = default;
  void sweep_locked();
  void release_locked(uint64_t offset, size_t bytes);

  struct Pending {
    std::function<bool()> is_free;
    std::vector<std::pair<uint64_t, size_t>> pieces;
  };

  SealedMemory memory_;
  mutable std::mutex mutex_;
  uint64_t next_ = 0;    // first byte never handed out
  uint64_t backed_ = 0;  // bytes that fallocate has backed
  uint64_t used_ = 0;    // bytes handed out, those that wait in pending_ included
  std::map<size_t, std::vector<uint64_t>> free_;  // by size
  std::vector<Pending> pending_;
  bool ended_ = false;  // its life has: nothing is released any more
};

}  // namespace dscomm
