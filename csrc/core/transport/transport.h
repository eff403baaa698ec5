// Transport: carries collectives and messages between hosts. A process has one, made when one of
// its groups first spans hosts; the members of that group are its ranks. The core knows no MPI: the
// implementation is a module of its own (csrc/mpi), loaded then.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/base/arena_id.h"
#include "core/base/deadline.h"
#include "core/base/settings.h"
#include "core/base/status.h"
#include "core/messages/endpoint.h"
#include "core/store/store.h"
#include "core/team/team.h"

namespace dscomm {

class FailureDetector;

// A process that takes part, as the group that brings the transport up learned of it.
struct TransportMember {
  ArenaId id;             // names the process
  int host = 0;           // which host: members with the same number share memory
  int global_rank = -1;   // in the job, for messages; -1 when not known
  int64_t pid = 0;        // as its own PID namespace numbers it
  std::string host_name;  // for messages
  // Networks of its interfaces that are up, loopback left out, as "address/prefix": what it
  // can be reached at.
  std::vector<std::string> networks;
};

struct TransportRequest {
  uint64_t id = 0;                       // random, the same on all members: names this transport
  std::string name;                      // of the group that brings it up, for messages
  int rank = 0;                          // this process's, in `members`
  std::vector<TransportMember> members;  // by rank
  std::string prefix;                    // of the keys in the store
  Settings settings;
  int usable_cores = 1;  // of this host
};

// A Team to be made; the same on all of its ranks.
struct TransportTeam {
  std::vector<int> ranks;  // at least two; a rank's position is its number in the Team
  uint64_t id = 0;         // no other Team's
  std::string name;        // of the group, for messages
  std::vector<int> group;  // all of its ranks, in its order: who may be at fault for a wait
  // Its calls are gathers, scatters and all_to_alls between ranks of different hosts alone, with
  // the hosts as CallOptions::domains.
  bool is_direct = false;
  // Whether float16 and bfloat16 travel as float32 to be reduced, and are rounded once.
  bool halves_as_float32 = false;
};

class Transport {
 public:
  virtual ~Transport() = default;

  // The rank of a process, or -1 when it is not one of the members.
  virtual int rank_of(const ArenaId& id) const = 0;

  // Collective over the ranks of the Team, this one among them.
  virtual Result<std::unique_ptr<Team>> make_team(const TransportTeam& team,
                                                  const Deadline& deadline) = 0;

  // A process on another host as point-to-point sees it.
  virtual std::shared_ptr<Endpoint> endpoint(int rank) = 0;
  // Through which its processes hear of each other.
  virtual FailureDetector& detector() = 0;

  // A group of this process has such a timeout: a network that is cut for less ends nothing while
  // nobody communicates. Does not block.
  virtual void outlast(std::chrono::milliseconds timeout) = 0;

  // The process ends in order: says so to the others. Idempotent; bounded by a few seconds, or by
  // the longest of those timeouts where a launcher wants all processes to end together and nothing
  // `has_failed` here.
  virtual void leave(bool has_failed) = 0;

  // In a forked child: closes what it inherited. Nothing else works on this object there.
  virtual void close_descriptors() = 0;
};

// Collective over the members. kUnsupported when what it needs is not installed, with what to
// install; otherwise the status names the step, the host and the rank.
using TransportFactory = std::function<Result<std::shared_ptr<Transport>>(
    const TransportRequest& request, std::shared_ptr<Store> store, const Deadline& deadline)>;

}  // namespace dscomm
