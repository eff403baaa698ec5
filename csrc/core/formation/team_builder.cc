#include "core/formation/team_builder.h"

#include <algorithm>
#include <numeric>

#include "core/base/format.h"
#include "core/detector/failure_detector.h"
#include "core/formation/domain_teams.h"
#include "core/team/hierarchical_team.h"

namespace dscomm {
namespace {

// How long a rank that is cut off from all others still waits for notices that they sent before.
constexpr int64_t kCutOffGraceNs = 500'000'000;

// Forms the Teams of one group. All steps are collective over the members.
class TeamBuilder {
 public:
  TeamBuilder(const FormingProcess& process, Store& store, const FormationRequest& request,
              const TransportFinder& find_transport, std::chrono::milliseconds timeout)
      : process_(process),
        store_(store),
        request_(request),
        find_transport_(find_transport),
        timeout_(timeout),
        deadline_(Deadline::after(timeout)) {
    deadline_.expired();  // starts the clock
  }

  Result<FormedGroup> run() {
    DSCOMM_ASSIGN_OR_RETURN(formation_, form_group(process_, store_, request_, deadline_));
    result_.in_place = {formation_.reads_pools ? process_.pool : nullptr,
                        process_.settings->in_place_bytes};
    DSCOMM_ASSIGN_OR_RETURN(std::unique_ptr<Team> here, make_team_of_host());
    if (formation_.host_count == 1)
      result_.team = std::move(here);
    else
      DSCOMM_RETURN_IF_ERROR(join_hosts(std::move(here)));
    result_.formation = std::move(formation_);
    return std::move(result_);
  }

 private:
  // The Team of the members on this host, whose ranks are the members' positions: one ShmTeam or,
  // if they are bound to several NUMA nodes or L3 caches, a HierarchicalTeam of ShmTeams.
  Result<std::unique_ptr<Team>> make_team_of_host() {
    std::vector<CpuBinding> bindings;
    std::vector<MailboxMember> members;
    std::vector<int> here;  // their ranks in the group
    int rank_here = 0;
    for (int rank = 0; rank < request_.size; ++rank) {
      const MailboxMember& member = formation_.members[static_cast<size_t>(rank)];
      if (member.peer == nullptr) continue;
      if (rank == request_.rank) rank_here = static_cast<int>(here.size());
      here.push_back(rank);
      members.push_back(member);
      members.back().group_rank = rank;
      bindings.push_back(formation_.bindings[static_cast<size_t>(rank)]);
    }
    auto flat = std::make_unique<ShmTeam>(process_.arena, formation_.group_id, request_.name,
                                          rank_here, members, formation_.wait_policy,
                                          formation_.tuning, result_.in_place);
    result_.of_host = flat.get();
    Domains domains = make_domains(bindings, formation_.hierarchy);
    if (domains.ranks.size() == 1) return std::unique_ptr<Team>(std::move(flat));
    result_.flat = std::move(flat);
    DomainTeamsRequest request;
    request.arena = process_.arena;
    request.group_id = formation_.group_id;
    request.group_name = request_.name;
    request.rank = rank_here;
    request.members = std::move(members);
    request.domains = std::move(domains.ranks);
    request.names = names_of(here);
    request.wait_policy = formation_.wait_policy;
    request.tuning = formation_.tuning;
    request.in_place = result_.in_place;
    Result<std::unique_ptr<Team>> team = make_domain_teams(request, *result_.flat, deadline_);
    if (team.ok()) return team;
    return make_status(team.status().code(), "forming group '{}': {}", request_.name,
                       team.status().message());
  }

  // Makes the Team of the whole group, from this host's Team and the transport.
  Status join_hosts(std::unique_ptr<Team> here) {
    Result<std::shared_ptr<Transport>> found = find_transport();
    if (!found.ok()) {
      here->abort(found.status());
      return found.status();
    }
    result_.transport = found.value();
    result_.transport->tolerate_silence(timeout_);
    std::vector<std::vector<int>> hosts(static_cast<size_t>(formation_.host_count));
    for (int rank = 0; rank < request_.size; ++rank)
      hosts[static_cast<size_t>(formation_.hosts[static_cast<size_t>(rank)])].push_back(rank);

    TeamFactory inner = [&here](std::span<const int>, const std::string&) {
      return Result<std::unique_ptr<Team>>(std::move(here));
    };
    TeamFactory outer = [this](std::span<const int> ranks, const std::string& name) {
      TransportTeam team;
      for (int rank : ranks) team.ranks.push_back(transport_rank(rank));
      team.id = team_id(name);
      team.name = request_.name;
      for (int rank = 0; rank < request_.size; ++rank) team.group.push_back(transport_rank(rank));
      team.only_for_blocks = name.ends_with(HierarchicalTeam::kDirect);
      team.halves_as_float32 = formation_.halves_as_float32;
      return result_.transport->make_team(team, deadline_);
    };
    std::vector<int> everyone(static_cast<size_t>(request_.size));
    std::iota(everyone.begin(), everyone.end(), 0);
    if (hosts.size() == everyone.size() || formation_.hierarchy == "flat") {
      Result<std::unique_ptr<Team>> team = outer(everyone, "hosts");
      if (!team.ok()) {
        here->abort(team.status());
        return team.status();
      }
      result_.team = std::move(team).value();
      DSCOMM_CHECK(result_.flat == nullptr, "one rank of a host, or a flat group, has no domains");
      result_.flat.reset(static_cast<ShmTeam*>(here.release()));
      return {};
    }
    HierarchyOptions hierarchy{.name = "hosts"};
    hierarchy.group = request_.name;
    hierarchy.halves_as_float32 = formation_.halves_as_float32;
    hierarchy.send_notice = [transport = result_.transport, id = team_id("hosts")](
                                const Status& cause, uint64_t unfinished_call) {
      transport->detector().end(id, cause, unfinished_call);
    };
    // A rank that is cut off from all others does not hear that a rank gave up, and may wait for
    // that rank. So any death that this rank knows of then ends the wait.
    std::vector<int> in_transport;
    for (int rank : everyone) in_transport.push_back(transport_rank(rank));
    hierarchy.received_notice = [transport = result_.transport, id = team_id("hosts"),
                                 in_transport](uint64_t call) {
      if (transport->detector().count() == 0) return Status();
      DSCOMM_RETURN_IF_ERROR(transport->detector().ended(id, call));
      return transport->detector().death_if_cut_off(in_transport, kCutOffGraceNs);
    };
    // Runs when the Team, and with it note_call, is destroyed.
    std::shared_ptr<void> forget_at_end(
        nullptr, [transport = result_.transport, id = team_id("hosts")](void*) {
          transport->detector().forget(id);
        });
    hierarchy.note_call =
        [transport = result_.transport, id = team_id("hosts"), forget_at_end,
         caller = CallerName{names_of({&request_.rank, 1}).front(), request_.name}](
            const CallRecord& call, bool) { transport->detector().note_call(id, call, caller); };
    hierarchy.compare_calls = [transport = result_.transport, id = team_id("hosts")](bool always) {
      transport->detector().compare_calls(id, always);
    };
    DSCOMM_ASSIGN_OR_RETURN(result_.team, HierarchicalTeam::make(request_.rank, hosts, inner, outer,
                                                                 std::move(hierarchy)));
    return {};
  }

  std::vector<std::string> names_of(std::span<const int> ranks) const {
    std::vector<std::string> names;
    for (int rank : ranks) {
      const auto k = static_cast<size_t>(rank);
      const PeerAddress& address = formation_.addresses[k];
      names.push_back(
          MailboxMember::name(rank, formation_.members[k].global_rank, address.describe()));
    }
    return names;
  }

  int transport_rank(int rank) const {
    return result_.transport->rank_of(formation_.addresses[static_cast<size_t>(rank)].arena);
  }

  uint64_t team_id(const std::string& name) const {
    uint64_t id = formation_.group_id;
    for (char letter : name) id = (id ^ static_cast<unsigned char>(letter)) * 0x100000001b3ull;
    return id;
  }

  // The process's transport; the first group that spans hosts brings it up among its members.
  Result<std::shared_ptr<Transport>> find_transport() {
    uint64_t known = formation_.transport_ids.front();
    for (size_t rank = 1; rank < formation_.transport_ids.size(); ++rank)
      if (formation_.transport_ids[rank] != known) return outside(0, static_cast<int>(rank));
    TransportRequest request;
    request.id = known != 0 ? known : formation_.group_id;
    request.name = request_.name;
    request.rank = request_.rank;
    request.prefix = format_text("{}transport/{}/", request_.prefix, formation_.group_id);
    request.settings = *process_.settings;
    request.usable_cores = process_.topology->usable_cores();
    for (size_t rank = 0; rank < formation_.members.size(); ++rank) {
      const PeerAddress& address = formation_.addresses[rank];
      TransportMember member;
      member.id = address.arena;
      member.host = formation_.hosts[rank];
      member.global_rank = formation_.members[rank].global_rank;
      member.pid = address.pid;
      member.host_name = address.host_name();
      member.networks = formation_.networks[rank];
      request.members.push_back(std::move(member));
    }
    Result<std::shared_ptr<Transport>> transport = find_transport_(request, deadline_);
    if (!transport.ok())
      return make_status(transport.status().code(), "forming group '{}': {}", request_.name,
                         transport.status().message());
    return transport;
  }

  // MPI's world is made once, so a process outside it cannot join later.
  Status outside(int one, int other) const {
    return make_status(
        Code::kUnsupported,
        "forming group '{}': it spans hosts, but rank {} and rank {} were not both in "
        "the first group that spanned hosts, and ranks cannot be added later; first "
        "make a group of all ranks that will ever talk between hosts",
        request_.name, one, other);
  }

  const FormingProcess& process_;
  Store& store_;
  const FormationRequest& request_;
  const TransportFinder& find_transport_;
  const std::chrono::milliseconds timeout_;
  const Deadline deadline_;
  Formation formation_;
  FormedGroup result_;
};

}  // namespace

Result<FormedGroup> build_teams(const FormingProcess& process, Store& store,
                                const FormationRequest& request,
                                const TransportFinder& find_transport,
                                std::chrono::milliseconds timeout) {
  return TeamBuilder(process, store, request, find_transport, timeout).run();
}

}  // namespace dscomm
