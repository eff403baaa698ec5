// Transport: carries collectives and messages between hosts. A process has one transport, made when
// one of its groups first spans hosts; the members of that group are the transport's ranks. The
// core knows no MPI: the implementation is a module (csrc/mpi).
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
#include "core/messages/peer_process.h"
#include "core/store/store.h"
#include "core/team/team.h"

namespace dscomm {

class FailureDetector;

// A process in the transport, as known by the group that brings the transport up.
struct TransportMember {
  ArenaId id;             // names the process
  int host = 0;           // members with the same number share memory
  int global_rank = -1;   // in the job, for errors; -1: unknown
  int64_t pid = 0;        // in its own PID namespace
  std::string host_name;  // from gethostname()
  // Networks of its interfaces that are up, without loopback, as "address/prefix".
  std::vector<std::string> networks;
};

struct TransportRequest {
  uint64_t id = 0;                       // random, the same on all members: names this transport
  std::string name;                      // of the group that brings it up, for errors
  int rank = 0;                          // of this process, in `members`
  std::vector<TransportMember> members;  // by rank
  std::string prefix;                    // of the keys in the store
  Settings settings;
  int usable_cores = 1;  // see Topology::usable_cores()
};

// A Team to make; the same on all of its ranks.
struct TransportTeam {
  std::vector<int> ranks;  // transport ranks, in the Team's order; at least two
  uint64_t id = 0;         // unique
  std::string name;        // of the group, for errors
  std::vector<int> group;  // all of the group, in its order: any may be the cause of a wait
  // The Team only makes gathers, scatters and all_to_alls between ranks of different hosts, with
  // the hosts as CallOptions::domains.
  bool only_for_blocks = false;
  // Whether float16 and bfloat16 are sent as float32 for a reduction, and rounded once.
  bool halves_as_float32 = false;
};

class Transport {
 public:
  virtual ~Transport() = default;

  // The rank of a process, or -1 if it is not a member.
  virtual int rank_of(const ArenaId& id) const = 0;

  // Collective over the ranks of the Team, including this one.
  virtual Result<std::unique_ptr<Team>> make_team(const TransportTeam& team,
                                                  const Deadline& deadline) = 0;

  // A process on another host, for point-to-point messages.
  virtual std::shared_ptr<PeerProcess> peer_process(int rank) = 0;
  // The failure detector of the members.
  virtual FailureDetector& detector() = 0;

  // Call it with the timeout of each group. A network outage that is shorter than the longest of
  // these timeouts then does not end an idle group. Does not block.
  virtual void tolerate_silence(std::chrono::milliseconds timeout) = 0;

  // Call it when the process ends in order: tells the other members. Idempotent. Takes up to a few
  // seconds; or, if a launcher wants all processes to end together and no failure is known here, up
  // to the longest timeout of tolerate_silence().
  virtual void leave(bool has_failed) = 0;

  // In a forked child: closes inherited descriptors. No other call works there.
  virtual void close_descriptors() = 0;
};

// Collective over the members. kUnsupported, with what to install, if something that it needs is
// missing; other errors name the step, the host and the rank.
using TransportFactory = std::function<Result<std::shared_ptr<Transport>>(
    const TransportRequest& request, std::shared_ptr<Store> store, const Deadline& deadline)>;

}  // namespace dscomm
