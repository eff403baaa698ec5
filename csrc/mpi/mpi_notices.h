// MpiNotices: ranks that wait long tell each other so, that a timeout can name who is missing.
//
// A reduction over all ranks does not show who has not come. So a rank that has waited for some
// time sends a notice of a few bytes to the other members, and whoever receives one while it waits
// in the same place answers with its own. A rank from which nothing was heard by the deadline has
// not made the call, or runs no more.
//
// There is one for a process. Its communicator outlives all Teams: a notice may still be on the way
// when a Team goes, and must not meet the next Team whose communicator gets the same number.
// Nothing here blocks. Any thread.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <list>
#include <map>
#include <mutex>
#include <span>
#include <utility>

namespace dscomm {

class MpiNotices {
 public:
  // Of all ranks of the transport, in their order; outlives this, and carries nothing else with
  // kNoticeTag.
  explicit MpiNotices(MPI_Comm comm);
  ~MpiNotices();
  MpiNotices(const MpiNotices&) = delete;
  MpiNotices& operator=(const MpiNotices&) = delete;

  // Tells `ranks` (of the transport) that this one waits at `position` of a Team. Positions grow.
  void say(uint64_t team_id, uint64_t position, std::span<const int> ranks);
  // Takes in what has come.
  void listen();
  // The furthest position at which a rank has said that it waits; 0 when it has said nothing.
  uint64_t heard(uint64_t team_id, int rank);
  // The Team has ended here.
  void forget(uint64_t team_id);

 private:
  struct Notice {
    uint64_t team_id;
    uint64_t position;
  };
  struct Sending {
    Notice notice;
    MPI_Request request;
  };

  void reap();

  const MPI_Comm comm_;
  std::mutex mutex_;
  bool broken_ = false;         // MPI has refused something: no more calls
  std::list<Sending> sending_;  // addresses stay: MPI reads the notices
  Notice coming_{};             // no local: MPI may give up while it writes
  std::map<std::pair<uint64_t, int>, uint64_t> heard_;
};

}  // namespace dscomm
