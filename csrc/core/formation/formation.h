// Formation: how the ranks of a group meet, prove that they share memory, and agree on what all of
// them must share.
//
//   1. every rank says how its arena is found, where its lines lie, and where it is bound;
//   2. rank 0 makes the member table of it, with the group's id (see Meeting);
//   3. every rank attaches to the arena of every other rank of its host and says whether it could;
//   4. rank 0 decides on the verdict, which is the same for all (see StoreExchange).
//
// If the ranks of a host know each other before they meet, one of them, the leader, uses the store
// for all (see LocalExchange).
//
// A rank that fails says why before it raises, so all raise the first cause, soon. Nothing of a
// group that was formed stays in the store.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/base/deadline.h"
#include "core/base/look.h"
#include "core/base/settings.h"
#include "core/formation/local_exchange.h"
#include "core/formation/meeting.h"
#include "core/shm/directory.h"
#include "core/shm/lines.h"
#include "core/shm/shm_team.h"
#include "core/store/store.h"
#include "core/topology/topology.h"

namespace dscomm {

// What one process brings to every group that it forms.
struct FormationParty {
  std::shared_ptr<Arena> arena;
  std::shared_ptr<TensorPool> pool;  // null where there is none
  Directory* directory = nullptr;
  const PeerAddress* address = nullptr;
  const Settings* settings = nullptr;
  const Topology* topology = nullptr;
  std::string host_identity;          // see host_identity()
  std::vector<std::string> networks;  // at which other hosts may reach it: "address/prefix"
  uint64_t transport_id = 0;          // of the transport that the process has; 0: none yet
};

struct FormationRequest {
  std::string prefix;  // of the keys in the store
  std::string name;    // of the group, for messages
  int rank = 0;
  int size = 1;
  std::vector<int> global_ranks;  // may be empty
  uint32_t message_port = 0;      // under which this rank receives messages of the group; 0: none
  LocalRanks local;               // the ranks of this host, if known before
  Look gone = [] { return Status(); };    // that a member is known to have died, or OK
  Look formed = [] { return Status(); };  // that others have formed it without this rank, or OK
  int64_t began_ns = process_began_ns();  // see MeetingRequest
};

// By member where it is a list.
struct Formation {
  uint64_t group_id = 0;
  std::vector<int> hosts;  // which host it is on, numbered in the order in which they first appear
  int host_count = 1;
  std::vector<PeerAddress> addresses;
  std::vector<LinesMember> members;                // peer is null where it is on another host
  std::vector<Place> places;                       // where it is bound
  std::vector<std::vector<std::string>> networks;  // as its party has them
  std::vector<uint64_t> transport_ids;             // of the transport it has; 0: none
  std::vector<uint32_t> message_ports;             // as its request has it
  std::string hierarchy;                           // rank 0's DSCOMM_HIERARCHY
  bool halves_as_float32 = false;                  // between hosts, as rank 0 has it
  bool reads_pools = false;  // whether every rank can read the pools of all others of its host
  ShmTuning tuning;
  WaitPolicy wait_policy;
};

// Collective over the group; blocks until all are there or the deadline passes. The lines of this
// rank are allocated and open when it succeeds: ShmTeam takes them over.
Result<Formation> form_group(const FormationParty& party, Store& store,
                             const FormationRequest& request, const Deadline& deadline);

// In place of form_group(), by a rank that cannot even begin: the others raise `cause` soon.
void decline_group(Store& store, const FormationRequest& request, const Status& cause,
                   const Deadline& deadline);

}  // namespace dscomm
