// Peer: another rank's arena and tensor pool, mapped read-only, and whether its process is alive.
#pragma once

#include <memory>
#include <string>

#include "core/base/owned.h"
#include "core/shm/mailbox/layout.h"
#include "core/shm/memory/arena.h"
#include "core/shm/memory/tensor_pool.h"

namespace dscomm {

// The address of a process, published through the store. Fixed binary format.
struct PeerAddress {
  uint64_t magic = kArenaMagic;
  uint32_t version = kLayoutVersion;
  uint32_t uid = 0;
  ArenaId arena;
  ArenaId socket;    // names the abstract socket that hands over the arena
  ArenaId doorbell;  // names the abstract datagram socket that wakes threads in send and recv
  int64_t pid = 0;   // in the owner's PID namespace; for errors
  char host[64] = {};

  std::string host_name() const;
  std::string describe() const;  // "pid 123 on host a"
};

class Peer final {
 public:
  // For a rank of another process: its arena, its pool, and its pidfd if it sent one.
  struct PoolView {
    Mapping mapping;       // empty if the process has no pool
    bool missing = false;  // it has a pool, but this process could not map it
  };
  Peer(const PeerAddress& address, Mapping mapping, UniqueFd pidfd, PoolView pool);
  // For a rank of this process: this rank or, in tests, another thread's. The pool may be null.
  Peer(const PeerAddress& address, std::shared_ptr<Arena> arena, std::shared_ptr<TensorPool> pool);

  const PeerAddress& address() const { return address_; }
  const ArenaHeader& header() const { return *reinterpret_cast<const ArenaHeader*>(data_); }

  // Memory at an offset that the peer sent; null unless it is aligned and lies in the arena.
  const std::byte* at(uint64_t offset, size_t bytes, size_t alignment = 8) const {
    if (offset > bytes_ || bytes > bytes_ - offset || offset % alignment != 0) return nullptr;
    return data_ + offset;
  }

  // Like at(), for the peer's pool and without alignment.
  const std::byte* at_in_pool(uint64_t offset, size_t bytes) const {
    if (offset > pool_bytes_ || bytes > pool_bytes_ - offset) return nullptr;
    return pool_data_ + offset;
  }
  // Whether the peer has a pool that this process could not map.
  bool lacks_pool() const { return pool_missing_; }

  // Whether the owner's process still runs. Loads the robust mutex; `thoroughly` also polls the
  // pidfd, in case the kernel could not walk the owner's robust list. Thread-safe.
  bool alive(bool thoroughly = false) const;

  // "pid 123 on host a"
  std::string describe() const { return address_.describe(); }
  std::string state_text() const;  // "stopped (T)", "running (R)", "gone", "unknown"
  // Whether a signal or a debugger has stopped the process, as far as /proc shows it here.
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
