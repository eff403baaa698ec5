// Team builder: makes the Team of a group, from what its ranks have found out about each other, and
// all that messages between them need.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/base/deadline.h"
#include "core/base/status.h"
#include "core/formation/formation.h"
#include "core/shm/shm_team.h"
#include "core/store/store.h"
#include "core/team/team.h"
#include "core/transport/transport.h"

namespace dscomm {

struct GroupTeams {
  Formation formation;
  std::unique_ptr<Team> team;
  // Of the members on this host: point-to-point lives by its lines. Part of `team`, or `flat` where
  // the Team of this host is a hierarchical one or collectives go over the transport alone.
  ShmTeam* lines = nullptr;
  std::unique_ptr<ShmTeam> flat;
  std::shared_ptr<Transport> transport;  // null where all members are on one host
  InPlace in_place;                      // what of this rank the others read in place
};

// The transport of the process, brought up among the members of the request if there is none.
using TransportFinder = std::function<Result<std::shared_ptr<Transport>>(
    const TransportRequest& request, const Deadline& deadline)>;

// Collective over the members of the group, two at least. Blocks until all have called it. After
// `timeout`, kTimeout names the missing ranks.
Result<GroupTeams> build_teams(const FormationParty& party, Store& store,
                               const FormationRequest& request,
                               const TransportFinder& find_transport,
                               std::chrono::milliseconds timeout);

}  // namespace dscomm
