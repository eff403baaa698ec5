// Doorbell: a process's abstract datagram socket, which wakes a thread that waits for any peer.
//
// A futex waits on one word, but point-to-point waits for messages from any peer and for room in
// any ring. A thread sleeps on the doorbell instead, and a peer that sees
// ArenaHeader::doorbell_sleepers sends one byte. The byte means nothing: the woken thread checks
// every channel. So a full socket is as good as one byte, and a stranger who guesses the 128-bit
// name causes only an early check.
#pragma once

#include <cstdint>
#include <memory>

#include "core/base/arena_id.h"
#include "core/base/owned.h"
#include "core/base/status.h"

namespace dscomm {

class Doorbell {
 public:
  // Binds the socket and returns its random name in *token. Peers may ring once they know the token
  // (PeerAddress::doorbell), so publish it only afterwards.
  static Result<std::unique_ptr<Doorbell>> create(ArenaId* token);

  const ArenaId& token() const { return token_; }

  // Sends a byte to the doorbell `token`. Never blocks. Thread-safe. Ignores failures: a full
  // socket wakes its owner anyway, and a missing one has no owner.
  void ring(const ArenaId& token) const;

  // Readable after a ring.
  int descriptor() const { return socket_.get(); }
  // Sleeps until a ring, or for timeout_ns (negative: no limit); may return early.
  void sleep(int64_t timeout_ns) const;

  // Discards the bytes that have come, so that the next sleep waits for a new byte. Call it before
  // checking the channels: a later publication rings again.
  void clear() const;

  // In a forked child: closes the inherited socket. No other call works there.
  void close_descriptors() { socket_.reset(); }

 private:
  Doorbell(UniqueFd socket, const ArenaId& token) : socket_(std::move(socket)), token_(token) {}

  UniqueFd socket_;
  ArenaId token_;
};

}  // namespace dscomm
