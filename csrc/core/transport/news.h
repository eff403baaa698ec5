// News: what the ranks of a transport hear of each other beside the data: who died or left, and
// which Teams have ended, and why.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "core/base/status.h"
#include "core/team/departure.h"

namespace dscomm {

// Thread-safe. Ranks are those of the transport.
class News {
 public:
  virtual ~News() = default;

  // Grows with every piece of news. Cheap enough for every turn of a wait: one atomic load.
  virtual uint64_t count() const = 0;

  // kPeerDied ("rank 3 (pid 7 on host b) died or exited without leaving") when a rank has died,
  // kPeerLeft when it ended in order, OK while neither is known.
  virtual Status gone(int rank) const = 0;
  // How, of a rank of which gone() says kPeerLeft: in order, unless its process noted its end.
  virtual Departure departure(int rank) const = 0;
  // This process is about to end without having left its groups; see Team::note_end(). The others
  // hear of it when it says goodbye. The first note stays.
  virtual void note_end(const std::string& exception) = 0;

  // The death after which what others end is no longer heard of: that of the rank through which all
  // news go, once it has been known for `grace_ns`. OK while there is none.
  virtual Status cut_off(int64_t grace_ns = 0) const = 0;
  // The rank through which all news go.
  virtual int hub() const = 0;

  // The first cause for which somebody ended the Team, or OK.
  virtual Status ended(uint64_t team_id) const = 0;

  // Tells everybody that the Team has ended and why. Does not block. The first cause that a process
  // hears of stays.
  virtual void end(uint64_t team_id, const Status& cause) = 0;
};

}  // namespace dscomm
