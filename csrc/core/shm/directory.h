// Directory: how arenas of one host meet.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "core/base/deadline.h"
#include "core/base/status.h"
#include "core/shm/peer.h"

namespace dscomm {

class Directory {
 public:
  virtual ~Directory() = default;

  // Makes this rank's arena and its pool, which may be null, available to others, and keeps the
  // arena's life mutex until the end. The doorbell (see Doorbell) becomes part of the address.
  virtual Result<PeerAddress> publish(std::shared_ptr<Arena> arena,
                                      std::shared_ptr<TensorPool> pool,
                                      const ArenaId& doorbell) = 0;

  // The arena behind an address, mapped and proved: its id was read back from memory. A null Peer
  // (not an error) when the address cannot be reached or its memory cannot be shared, with why.
  struct Attached {
    std::shared_ptr<Peer> peer;
    std::string why_not;
    // kPeerDied: it was reached, and ended before it answered. kTimeout: it did not answer.
    // kResource: a limit of this process.
    Code code = Code::kUnsupported;
  };
  virtual Attached attach(const PeerAddress& address, const Deadline& deadline) = 0;

  // In a forked child: closes what it inherited. Nothing else works on this object there.
  virtual void close_descriptors() {}
};

}  // namespace dscomm
