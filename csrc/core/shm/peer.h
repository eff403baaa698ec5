// Peer: another rank's arena as this process sees it: mapped read-only, with its owner's life.
#pragma once

#include <memory>
#include <string>

#include "core/base/owned.h"
#include "core/shm/arena.h"
#include "core/shm/endpoint.h"
#include "core/shm/layout.h"

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

  std::string describe() const;  // "pid 123 on host a"
};

class Peer final : public Endpoint, public std::enable_shared_from_this<Peer> {
 public:
  // A mapping of another process's memfd, with a pidfd of it where it could send one.
  Peer(const PeerAddress& address, Mapping mapping, UniqueFd pidfd);
  // An arena of this very process: its own, or in tests that of a rank on another thread.
  Peer(const PeerAddress& address, std::shared_ptr<Arena> arena);
  ~Peer() override;

  const PeerAddress& address() const { return address_; }
  const ArenaHeader& header() const { return *reinterpret_cast<const ArenaHeader*>(data_); }

  // Memory at an offset that came from the peer: null unless all of it lies in the arena, aligned.
  const std::byte* at(uint64_t offset, size_t bytes, size_t alignment = 8) const {
    if (offset > bytes_ || bytes > bytes_ - offset || offset % alignment != 0) return nullptr;
    return data_ + offset;
  }

  // Whether the owner's process still runs. The robust mutex says so at once; the pidfd is asked
  // only when `thoroughly`, for a kernel that could not walk the owner's robust list.
  bool alive(bool thoroughly = false) const override;

  // "pid 123 on host a"
  std::string describe() const override;
  std::string state_text() const override;  // "stopped (T)", "running (R)", "gone", "unknown"
  // By a signal or a debugger, as far as can be seen. Reads a file.
  bool is_stopped() const;

  const ArenaId& id() const override { return address_.arena; }
  const ArenaId* doorbell() const override { return &address_.doorbell; }
  bool sleeps() const override {
    return header().doorbell_sleepers.load(std::memory_order_relaxed) != 0;  // only a hint
  }
  std::unique_ptr<CellChannel> make_channel(const std::shared_ptr<Arena>& arena,
                                            ChannelDirectory& directory) override;

 private:
  char state() const;

  PeerAddress address_;
  Mapping mapping_;
  UniqueFd pidfd_;
  std::shared_ptr<Arena> arena_;
  const std::byte* data_;
  size_t bytes_;
};

}  // namespace dscomm
