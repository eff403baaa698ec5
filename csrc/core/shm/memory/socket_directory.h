// SocketDirectory: processes hand each other their arenas over abstract Unix sockets.
//
// A process listens on a socket whose name is 128 random bits. A peer that read the name in the
// store connects, sends the arena's id, and receives descriptors: the arena's memfd; a pidfd of the
// owner (from the owner, because a peer in another PID namespace could not open one); and the memfd
// of the tensor pool. Only the first is required. Both sides check that the other runs as the same
// user. Processes in different network namespaces never meet.
//
// One service thread per process answers its peers, and holds the arena's life mutex.
#pragma once

#include <latch>
#include <map>
#include <mutex>
#include <thread>

#include "core/shm/memory/directory.h"

namespace dscomm {

class SocketDirectory : public Directory {
 public:
  ~SocketDirectory() override;  // ends the service thread

  Result<PeerAddress> publish(std::shared_ptr<Arena> arena, std::shared_ptr<TensorPool> pool,
                              const ArenaId& doorbell) override;
  Attached attach(const PeerAddress& address, const Deadline& deadline) override;
  void close_descriptors() override;

 private:
  void serve();
  void answer(int connection);
  static Attached fetch(const PeerAddress& address, const Deadline& deadline);

  std::shared_ptr<Arena> arena_;
  std::shared_ptr<TensorPool> pool_;  // may be null
  PeerAddress address_;
  UniqueFd listener_, stop_, own_pidfd_;
  std::thread service_;
  std::latch is_born_{1};  // counted down once the service thread holds the arena's life mutex

  std::mutex mutex_;
  std::map<ArenaId, std::weak_ptr<Peer>> peers_;  // shared by all groups of the process
};

// The address of this process, without its sockets.
PeerAddress describe_this_process(const Arena& arena);

}  // namespace dscomm
