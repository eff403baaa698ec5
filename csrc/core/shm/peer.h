// Peer: another rank's arena, and its pool of tensors, as this process sees them: mapped read-only,
// with their owner's life.
#pragma once

#include <memory>
#include <string>

#include "core/base/owned.h"
#include "core/shm/arena.h"
#include "core/shm/layout.h"
#include "core/shm/tensor_pool.h"

namespace dscomm {

// How a process is found: what it publishes through the store. Fixed binary format.
struct PeerAddress {
  uint64_t magic = kArenaMagic;
  uint32_t version = kLayoutVersion;
  uint32_t uid = 0;
  ArenaId arena;
  ArenaId socket;    // names the abstract socket on which the arena is handed over
  ArenaId doorbell;  // names the abstract datagram socket that wakes the owner's point-to-point
  int64_t pid = 0;   // in the owner's own namespace; for messages
  char host[64] = {};

  std::string host_name() const;
  std::string describe() const;  // "pid 123 on host a"
};

class Peer final {
 public:
  // What another process handed over: its arena, its pool, and a pidfd of it where it could send
  // one.
  struct PoolView {
    Mapping mapping;       // empty where it has no pool
    bool missing = false;  // it has one, which could not be mapped here
  };
  Peer(const PeerAddress& address, Mapping mapping, UniqueFd pidfd, PoolView pool);
  // A rank of this very process: this one, or in tests that of another thread. The pool may be
  // null.
  Peer(const PeerAddress& address, std::shared_ptr<Arena> arena, std::shared_ptr<TensorPool> pool);
  ~Peer();

  const PeerAddress& address() const { return address_; }
  const ArenaHeader& header() const { return *reinterpret_cast<const ArenaHeader*>(data_); }

  // Memory at an offset that came from the peer: null unless all of it lies in the arena, aligned.
  const std::byte* at(uint64_t offset, size_t bytes, size_t alignment = 8) const {
    if (offset > bytes_ || bytes > bytes_ - offset || offset % alignment != 0) return nullptr;
    return data_ + offset;
  }

  // As at(), in its pool.
  const std::byte* at_in_pool(uint64_t offset, size_t bytes) const {
    if (offset > pool_bytes_ || bytes > pool_bytes_ - offset) return nullptr;
    return pool_data_ + offset;
  }
  // Whether it has a pool that this process cannot read.
  bool lacks_pool() const { return pool_missing_; }

  // Whether the owner's process still runs. The robust mutex says so at once; the pidfd is asked
  // only when `thoroughly`, for a kernel that could not walk the owner's robust list.
  bool alive(bool thoroughly = false) const;

  // "pid 123 on host a"
  std::string describe() const;
  std::string state_text() const;  // "stopped (T)", "running (R)", "gone", "unknown"
  // By a signal or a debugger, as far as can be seen. Reads a file.
  bool is_stopped() const;

 private:
  char state() const;

  PeerAddress address_;
  Mapping mapping_;
  UniqueFd pidfd_;
  std::shared_ptr<Arena> arena_;
  const std::byte* data_;
  size_t bytes_;

  Mapping pool_mapping_;
  std::shared_ptr<TensorPool> pool_;
  const std::byte* pool_data_ = nullptr;
  size_t pool_bytes_ = 0;
  bool pool_missing_ = false;
};

}  // namespace dscomm
