// Arenas of different processes meet over abstract Unix sockets.
//
// A process listens on a socket whose name is 128 random bits. A peer that learned the name through
// the store connects, shows the arena's id, and gets descriptors: the arena's memfd, a pidfd of its
// owner (its own, because a peer in another PID namespace could not make one), and the memfd of its
// pool of tensors. The first it must have, the others help. Both sides
// check that the other runs as the same user. Nothing has a name in a file system, so nothing can
// be left behind, guessed or collide, and two hosts (network namespaces) never meet.
//
// One service thread per process answers and holds the arena's life mutex.
#pragma once

#include <thread>

#include "core/shm/directory.h"

namespace dscomm {

class SocketDirectory : public Directory {
 public:
  SocketDirectory() = default;
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
  std::shared_ptr<TensorPool> pool_;  // null: there is none
  PeerAddress address_;
  UniqueFd listener_, stop_, own_pidfd_;
  std::thread service_;

  std::mutex mutex_;
  std::map<ArenaId, std::weak_ptr<Peer>> peers_;  // shared by all groups of the process
};

// What a process says of itself, but for its sockets.
PeerAddress describe_this_process(const Arena& arena);

}  // namespace dscomm
