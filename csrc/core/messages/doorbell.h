// Doorbell: one abstract datagram socket per process, which wakes whoever waits for several peers.
//
// A futex waits on one word; point-to-point waits for messages from any peer and for room in any
// ring. It sleeps here instead, and a peer that sees ArenaHeader::doorbell_sleepers sends one byte.
// A byte carries no meaning: who wakes looks at every channel. A full socket is as good as one
// byte, and a stranger who guesses the 128-bit name can cause nothing but an early look.
#pragma once

#include <cstdint>
#include <memory>

#include "core/base/arena_id.h"
#include "core/base/owned.h"
#include "core/base/status.h"

namespace dscomm {

class Doorbell {
 public:
  // Binds the socket and says how it is named. A peer may ring from now on, so publish the token
  // (PeerAddress::doorbell) only afterwards.
  static Result<std::unique_ptr<Doorbell>> create(ArenaId* token);

  const ArenaId& token() const { return token_; }

  // Sends a byte to the doorbell of that name. Never blocks; any thread. Failures are not errors:
  // full means that it will wake anyway, gone means that there is nobody to wake.
  void ring(const ArenaId& token) const;

  // Readable after a ring.
  int descriptor() const { return socket_.get(); }
  // Sleeps until somebody rings, or timeout_ns have passed (negative: no limit), or for no reason.
  void sleep(int64_t timeout_ns) const;

  // Takes the bytes that have come, so that the next sleep waits for a new one. Call it before
  // looking at the channels: what is published later rings again.
  void clear() const;

  // In a forked child: closes what it inherited. Nothing else works on this object there.
  void close_descriptors() { socket_.reset(); }

 private:
  Doorbell(UniqueFd socket, const ArenaId& token) : socket_(std::move(socket)), token_(token) {}

  UniqueFd socket_;
  ArenaId token_;
};

}  // namespace dscomm
