// Formation: how the ranks of a group meet, prove that they share memory, and agree on parameters.
//
//   1. every rank publishes the addresses of its arena and mailbox, and its cpu binding;
//   2. rank 0 makes the member table of these entries, with the group's id (see Modex);
//   3. every rank attaches to the arenas of the others on its host, and reports the result;
//   4. rank 0 combines the reports into one verdict for all ranks (see StoreExchange).
//
// If the ranks of a host know each other before they meet, one of them, the leader, uses the store
// for all (see LocalExchange).
//
// A rank that fails reports the cause before it raises, so all soon raise the first cause. A group
// that was formed leaves nothing in the store.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/base/deadline.h"
#include "core/base/give_up_check.h"
#include "core/base/settings.h"
#include "core/formation/local_exchange.h"
#include "core/formation/modex.h"
#include "core/shm/mailbox/mailboxes.h"
#include "core/shm/memory/directory.h"
#include "core/shm/shm_team.h"
#include "core/store/store.h"
#include "core/topology/topology.h"

namespace dscomm {

// The contribution of a process to every group that it forms.
struct FormingProcess {
  std::shared_ptr<Arena> arena;
  std::shared_ptr<TensorPool> pool;  // may be null
  Directory* directory = nullptr;
  const PeerAddress* address = nullptr;
  const Settings* settings = nullptr;
  const Topology* topology = nullptr;
  std::string host_identity;          // see host_identity()
  std::vector<std::string> networks;  // "address/prefix", at which other hosts may reach it
  uint64_t transport_id = 0;          // of the process's transport; 0: none yet
};

struct FormationRequest {
  std::string prefix;  // of the keys in the store
  std::string name;    // of the group, for messages
  int rank = 0;
  int size = 1;
  std::vector<int> global_ranks;  // may be empty
  uint32_t message_port = 0;      // of this rank, see PointToPoint::open_port(); 0: none
  LocalRanks local;               // the ranks of this host, if known
  GiveUpCheck gone = [] { return Status(); };    // kPeerDied or kPeerLeft of a member, or OK
  GiveUpCheck formed = [] { return Status(); };  // others formed the group without this one, or OK
  int64_t began_ns = process_began_ns();         // see ModexRequest
};

// Lists are by rank.
struct Formation {
  uint64_t group_id = 0;
  std::vector<int> hosts;  // by rank: its host's number, in order of first appearance
  int host_count = 1;
  std::vector<PeerAddress> addresses;
  std::vector<MailboxMember> members;              // peer is null if the member is on another host
  std::vector<CpuBinding> bindings;                // where the member is bound
  std::vector<std::vector<std::string>> networks;  // see FormingProcess
  std::vector<uint64_t> transport_ids;             // see FormingProcess
  std::vector<uint32_t> message_ports;             // see FormationRequest
  std::string hierarchy;                           // rank 0's DSCOMM_HIERARCHY
  bool halves_as_float32 = false;                  // fp16/bf16 cross hosts as fp32; rank 0's choice
  bool reads_pools = false;  // whether every rank can read all pools of its host
  ShmTuning tuning;
  WaitPolicy wait_policy;
};

// Collective over the group; blocks until all are there or the deadline passes. On success, this
// rank's mailbox is allocated and open, and a ShmTeam must take it over.
Result<Formation> form_group(const FormingProcess& process, Store& store,
                             const FormationRequest& request, const Deadline& deadline);

// Call instead of form_group() if this rank cannot take part: the others soon raise `cause`.
void decline_group(Store& store, const FormationRequest& request, const Status& cause,
                   const Deadline& deadline);

}  // namespace dscomm
