#include "core/formation/team_builder.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "core/detector/failure_detector.h"
#include "core/formation/domain_teams.h"
#include "core/team/hierarchical_team.h"

namespace dscomm {
namespace {

// How long messages from before a cut may still be on their way.
constexpr int64_t kCutOffGraceNs = 500'000'000;

// Forms the Teams of one group. All of it is collective over the members.
class TeamBuilder {
 public:
  TeamBuilder(const FormationParty& party, Store& store, const FormationRequest& request,
              const TransportFinder& find_transport, std::chrono::milliseconds timeout)
      : party_(party),
        store_(store),
        request_(request),
        find_transport_(find_transport),
        timeout_(timeout),
        deadline_(Deadline::after(timeout)) {
    deadline_.expired();  // starts the clock
  }

  Result<GroupTeams> run() {
    DSCOMM_ASSIGN_OR_RETURN(whole_, form_group(party_, store_, request_, deadline_));
    made_.in_place = {whole_.reads_pools ? party_.pool : nullptr, party_.settings->in_place_bytes};
    DSCOMM_ASSIGN_OR_RETURN(std::unique_ptr<Team> here, make_team_of_host());
    if (whole_.host_count == 1)
      made_.team = std::move(here);
    else
      DSCOMM_RETURN_IF_ERROR(join_hosts(std::move(here)));
    made_.formation = std::move(whole_);
    return std::move(made_);
  }

 private:
  // The Team of the members on this host, whose ranks are their positions: one ShmTeam or, if they
  // are bound to several NUMA nodes or L3 caches, a HierarchicalTeam of ShmTeams.
  Result<std::unique_ptr<Team>> make_team_of_host() {
    std::vector<Place> places;
    std::vector<MailboxMember> members;
    std::vector<int> here;  // their ranks in the group
    int rank_here = 0;
    for (int rank = 0; rank < request_.size; ++rank) {
      const MailboxMember& member = whole_.members[static_cast<size_t>(rank)];
      if (member.peer == nullptr) continue;
      if (rank == request_.rank) rank_here = static_cast<int>(here.size());
      here.push_back(rank);
      members.push_back(member);
      members.back().group_rank = rank;
      places.push_back(whole_.places[static_cast<size_t>(rank)]);
    }
    auto flat =
        std::make_unique<ShmTeam>(party_.arena, whole_.group_id, request_.name, rank_here, members,
                                  whole_.wait_policy, whole_.tuning, made_.in_place);
    made_.of_host = flat.get();
    Domains domains = make_domains(places, whole_.hierarchy);
    if (domains.ranks.size() == 1) return std::unique_ptr<Team>(std::move(flat));
    made_.flat = std::move(flat);
    DomainTeamsRequest request;
    request.arena = party_.arena;
    request.group_id = whole_.group_id;
    request.group_name = request_.name;
    request.rank = rank_here;
    request.members = std::move(members);
    request.domains = std::move(domains.ranks);
    request.names = names_of(here);
    request.wait_policy = whole_.wait_policy;
    request.tuning = whole_.tuning;
    request.in_place = made_.in_place;
    Result<std::unique_ptr<Team>> team = make_domain_teams(request, *made_.flat, deadline_);
    if (team.ok()) return team;
    return Status(team.status().code(),
                  fmt::format("forming group '{}': {}", request_.name, team.status().message()));
  }

  // Makes the Team of the whole group, from this host's Team and the transport.
  Status join_hosts(std::unique_ptr<Team> here) {
    Result<std::shared_ptr<Transport>> found = find_transport();
    if (!found.ok()) {
      here->abort(found.status());
      return found.status();
    }
    made_.transport = found.value();
    made_.transport->outlast(timeout_);
    std::vector<std::vector<int>> hosts(static_cast<size_t>(whole_.host_count));
    for (int rank = 0; rank < request_.size; ++rank)
      hosts[static_cast<size_t>(whole_.hosts[static_cast<size_t>(rank)])].push_back(rank);

    TeamFactory inner = [&here](std::span<const int>, const std::string&) {
      return Result<std::unique_ptr<Team>>(std::move(here));
    };
    TeamFactory outer = [this](std::span<const int> ranks, const std::string& name) {
      TransportTeam team;
      for (int rank : ranks) team.ranks.push_back(transport_rank(rank));
      team.id = team_id(name);
      team.name = request_.name;
      for (int rank = 0; rank < request_.size; ++rank) team.group.push_back(transport_rank(rank));
      team.is_direct = name.ends_with(HierarchicalTeam::kDirect);
      team.halves_as_float32 = whole_.halves_as_float32;
      return made_.transport->make_team(team, deadline_);
    };
    std::vector<int> everyone(static_cast<size_t>(request_.size));
    std::iota(everyone.begin(), everyone.end(), 0);
    if (hosts.size() == everyone.size() || whole_.hierarchy == "flat") {
      Result<std::unique_ptr<Team>> team = outer(everyone, "hosts");
      if (!team.ok()) {
        here->abort(team.status());
        return team.status();
      }
      made_.team = std::move(team).value();
      DSCOMM_CHECK(made_.flat == nullptr, "one rank of a host, or a flat group, has no domains");
      made_.flat.reset(static_cast<ShmTeam*>(here.release()));
      return {};
    }
    HierarchyOptions hierarchy{.name = "hosts"};
    hierarchy.group = request_.name;
    hierarchy.halves_as_float32 = whole_.halves_as_float32;
    hierarchy.tell = [transport = made_.transport, id = team_id("hosts")](
                         const Status& cause, uint64_t unfinished_call) {
      transport->detector().end(id, cause, unfinished_call);
    };
    // A rank that is cut off may wait for one that has died or given up since, and is not told.
    std::vector<int> in_transport;
    for (int rank : everyone) in_transport.push_back(transport_rank(rank));
    hierarchy.heard = [transport = made_.transport, id = team_id("hosts"),
                       in_transport](uint64_t call) {
      if (transport->detector().count() == 0) return Status();
      DSCOMM_RETURN_IF_ERROR(transport->detector().ended(id, call));
      return transport->detector().cut_off(in_transport, kCutOffGraceNs);
    };
    // Runs when the Team, and with it note_call, is destroyed.
    std::shared_ptr<void> forget_at_end(
        nullptr, [transport = made_.transport, id = team_id("hosts")](void*) {
          transport->detector().forget(id);
        });
    hierarchy.note_call = [transport = made_.transport, id = team_id("hosts"), forget_at_end,
                           caller = Caller{names_of({&request_.rank, 1}).front(), request_.name}](
                              const CallRecord& call, bool) {
      transport->detector().note_call(id, call, caller);
    };
    hierarchy.compare_calls = [transport = made_.transport, id = team_id("hosts")](bool always) {
      transport->detector().compare_calls(id, always);
    };
    DSCOMM_ASSIGN_OR_RETURN(made_.team, HierarchicalTeam::make(request_.rank, hosts, inner, outer,
                                                               std::move(hierarchy)));
    return {};
  }

  std::vector<std::string> names_of(std::span<const int> ranks) const {
    std::vector<std::string> names;
    for (int rank : ranks) {
      const auto k = static_cast<size_t>(rank);
      const PeerAddress& address = whole_.addresses[k];
      names.push_back(MailboxMember::name(rank, whole_.members[k].global_rank, address.describe()));
    }
    return names;
  }

  int transport_rank(int rank) const {
    return made_.transport->rank_of(whole_.addresses[static_cast<size_t>(rank)].arena);
  }

  uint64_t team_id(const std::string& name) const {
    uint64_t id = whole_.group_id;
    for (char letter : name) id = (id ^ static_cast<unsigned char>(letter)) * 0x100000001b3ull;
    return id;
  }

  // The process's transport; the first group that spans hosts brings it up among its members.
  Result<std::shared_ptr<Transport>> find_transport() {
    uint64_t known = whole_.transport_ids.front();
    for (size_t rank = 1; rank < whole_.transport_ids.size(); ++rank)
      if (whole_.transport_ids[rank] != known) return outside(0, static_cast<int>(rank));
    TransportRequest request;
    request.id = known != 0 ? known : whole_.group_id;
    request.name = request_.name;
    request.rank = request_.rank;
    request.prefix = fmt::format("{}transport/{}/", request_.prefix, whole_.group_id);
    request.settings = *party_.settings;
    request.usable_cores = party_.topology->usable_cores();
    for (size_t rank = 0; rank < whole_.members.size(); ++rank) {
      const PeerAddress& address = whole_.addresses[rank];
      TransportMember member;
      member.id = address.arena;
      member.host = whole_.hosts[rank];
      member.global_rank = whole_.members[rank].global_rank;
      member.pid = address.pid;
      member.host_name = address.host_name();
      member.networks = whole_.networks[rank];
      request.members.push_back(std::move(member));
    }
    Result<std::shared_ptr<Transport>> transport = find_transport_(request, deadline_);
    if (!transport.ok())
      return Status(transport.status().code(), fmt::format("forming group '{}': {}", request_.name,
                                                           transport.status().message()));
    return transport;
  }

  // MPI's world is made once, so a process outside it cannot join later.
  Status outside(int one, int other) const {
    return Status(Code::kUnsupported,
                  fmt::format("forming group '{}': it spans hosts, and rank {} and rank {} were "
                              "not together in the first group that did; let the first such "
                              "group have all ranks that will ever talk between hosts",
                              request_.name, one, other));
  }

  const FormationParty& party_;
  Store& store_;
  const FormationRequest& request_;
  const TransportFinder& find_transport_;
  const std::chrono::milliseconds timeout_;
  const Deadline deadline_;
  Formation whole_;
  GroupTeams made_;
};

}  // namespace

Result<GroupTeams> build_teams(const FormationParty& party, Store& store,
                               const FormationRequest& request,
                               const TransportFinder& find_transport,
                               std::chrono::milliseconds timeout) {
  return TeamBuilder(party, store, request, find_transport, timeout).run();
}

}  // namespace dscomm
