// Domain teams: a HierarchicalTeam inside one host, and the ShmTeams that it is made of.
//
// The ranks already have a flat ShmTeam, one of all members without domains. Through it each rank
// tells the others where its mailboxes for the new Teams lie. After that, no rank waits for another
// or for the store. So a rank that has made its Teams may leave while others still make theirs.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/base/deadline.h"
#include "core/base/status.h"
#include "core/shm/memory/arena.h"
#include "core/shm/shm_team.h"
#include "core/team/team.h"

namespace dscomm {

struct DomainTeamsRequest {
  std::shared_ptr<Arena> arena;
  uint64_t group_id = 0;
  std::string group_name;
  int rank = 0;                           // position among the ranks of this host
  std::vector<MailboxMember> members;     // by position; group_rank is set
  std::vector<std::vector<int>> domains;  // partition of the positions
  std::vector<std::string> names;         // by position, for messages
  WaitPolicy wait_policy;
  ShmTuning tuning;
  InPlace in_place;
};

// Collective over the members. `flat` is a Team of the members in which no call has been made. On
// failure, `flat` has ended with the same cause on all members.
Result<std::unique_ptr<Team>> make_domain_teams(const DomainTeamsRequest& request, ShmTeam& flat,
                                                const Deadline& deadline);

}  // namespace dscomm
