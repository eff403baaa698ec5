// Team builder: forms a group (see formation.h), then makes its Team and all that point-to-point
// messages in it need.
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

struct FormedGroup {
  Formation formation;
  std::unique_ptr<Team> team;
  // The ShmTeam of the members on this host. Point-to-point messages use it, too, to see which
  // members have left. A part of `team`, or `flat` if this host's Team is hierarchical or
  // collectives use only the transport.
  ShmTeam* of_host = nullptr;
  std::unique_ptr<ShmTeam> flat;
  std::shared_ptr<Transport> transport;  // null if all members are on one host
  InPlace in_place;                      // which tensors of this rank the others read in place
};

// Returns the process's transport; brings it up among the request's members if there is none.
using TransportFinder = std::function<Result<std::shared_ptr<Transport>>(
    const TransportRequest& request, const Deadline& deadline)>;

// Collective over the members of the group, at least two. Blocks until all have called it. After
// `timeout`, kTimeout names the missing ranks.
Result<FormedGroup> build_teams(const FormingProcess& process, Store& store,
                                const FormationRequest& request,
                                const TransportFinder& find_transport,
                                std::chrono::milliseconds timeout);

}  // namespace dscomm
