// Directory: how the processes of a host find and map each other's arenas.
#pragma once

#include <memory>

#include "core/base/deadline.h"
#include "core/base/status.h"
#include "core/shm/memory/peer.h"

namespace dscomm {

class Directory {
 public:
  virtual ~Directory() = default;

  // Makes this rank's arena and pool (may be null) available to peers. Until the Directory is
  // destroyed, it holds the arena's life mutex. `doorbell` (see Doorbell) becomes part of the
  // address. Called once.
  virtual Result<PeerAddress> publish(std::shared_ptr<Arena> arena,
                                      std::shared_ptr<TensorPool> pool,
                                      const ArenaId& doorbell) = 0;

  // Maps the arena behind an address, and proves that it is the right one by reading its id from
  // memory. If it fails, `peer` is null; `why_not` and `code` say why. Blocks. Thread-safe.
  struct Attached {
    std::shared_ptr<Peer> peer;
    std::string why_not;
    // kPeerDied: the process has ended. kTimeout: no answer. kResource: a limit of this process.
    Code code = Code::kUnsupported;
  };
  virtual Attached attach(const PeerAddress& address, const Deadline& deadline) = 0;

  // In a forked child: closes inherited descriptors. No other call works there.
  virtual void close_descriptors() {}
};

}  // namespace dscomm
