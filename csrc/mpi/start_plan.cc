#include "mpi/start_plan.h"

#include <mpi.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <set>
#include <utility>

#include "core/base/format.h"
#include "core/base/process_state.h"
#include "core/topology/topology.h"
#include "core/transport/members.h"
#include "core/transport/networks.h"

namespace dscomm {
namespace {

std::string name_space_inode(const char* name) {
  struct stat status{};
  if (stat((std::string("/proc/self/ns/") + name).c_str(), &status) != 0) return "?";
  return std::to_string(status.st_ino);
}

std::string own_server_scope() {
  std::string server_scope = std::to_string(geteuid());
  for (const char* name : {"net", "pid", "mnt", "ipc", "user"})
    server_scope.append(" ").append(name_space_inode(name));
  return server_scope;
}

// A name that libpmix's host lists can carry: letters, digits, points and dashes.
std::string plain_name(const std::string& name) {
  std::string plain;
  for (char letter : name)
    plain += std::isalnum(static_cast<unsigned char>(letter)) || letter == '.' ? letter : '-';
  return plain.empty() ? "host" : plain;
}

// Whether a launcher made one MPI job of exactly these members. Workers of a torchrun that a
// launcher started once per host all inherit one rank; and MPI_Init_thread waits for all ranks of
// the launcher's job, so the job must have no others.
bool launcher_made_job(const std::vector<MpiMemberEntry>& entries) {
  std::set<std::string> ranks;
  for (const MpiMemberEntry& entry : entries) {
    if (entry.name_space.empty() || entry.name_space != entries[0].name_space) return false;
    if (entry.launcher_size != 0 && entry.launcher_size != entries.size()) return false;
    ranks.insert(entry.launcher_rank);
  }
  return ranks.size() == entries.size();
}

bool crowded(const std::vector<MpiMemberEntry>& entries, const std::vector<size_t>& ranks) {
  std::vector<std::string> cpu_lists;
  double quota = 1e9;
  for (size_t rank : ranks) {
    cpu_lists.push_back(entries[rank].cpu_list);
    if (entries[rank].quota_millicpus != 0)
      quota = std::min(quota, static_cast<double>(entries[rank].quota_millicpus) / 1000);
  }
  return static_cast<int>(ranks.size()) > usable_cores(cpu_lists, quota);
}

std::vector<MpiHost> make_hosts(const TransportRequest& request,
                                const std::vector<MpiMemberEntry>& entries) {
  std::vector<MpiHost> hosts;
  std::map<std::pair<int, std::string>, size_t> known;
  std::map<int, std::vector<size_t>> ranks_by_host;
  std::set<std::string> names;
  for (size_t rank = 0; rank < entries.size(); ++rank) {
    const MpiMemberEntry& entry = entries[rank];
    const TransportMember& member = request.members[rank];
    ranks_by_host[member.host].push_back(rank);
    auto [found, is_new] = known.try_emplace({member.host, entry.server_scope}, hosts.size());
    if (is_new) {
      std::string plain = plain_name(member.host_name), unique = plain;
      for (int count = 2; !names.insert(unique).second; ++count)
        unique = format_text("{}-{}", plain, count);
      hosts.emplace_back().name = unique;
    }
    hosts[found->second].ranks.push_back(entry.process);
  }
  for (MpiHost& host : hosts) {
    const size_t leader = host.ranks.front().rank;
    host.crowded = crowded(entries, ranks_by_host[request.members[leader].host]);
  }
  return hosts;
}

}  // namespace

MpiMemberEntry own_entry(int rank) {
  MpiMemberEntry entry;
  entry.server_scope = own_server_scope();
  entry.process = {static_cast<uint32_t>(rank), getpid(), process_start_time(getpid()), geteuid(),
                   getegid()};
  entry.cpu_list = process_cpu_list();
  double quota = cgroup_cpu_quota();
  if (quota < 1e6) entry.quota_millicpus = static_cast<uint64_t>(std::max(quota * 1000, 1.0));
  int initialised = 0;
  MPI_Initialized(&initialised);
  entry.initialised = initialised != 0;
  entry.addresses = own_addresses();
  return entry;
}

Result<StartPlan> make_plan(const TransportRequest& request,
                            const std::vector<MpiMemberEntry>& entries) {
  const auto name = [&](int rank) { return name_member(request.members, rank); };
  for (int rank = 1; rank < static_cast<int>(entries.size()); ++rank) {
    const MpiMemberEntry& one = entries[0];
    const MpiMemberEntry& other = entries[static_cast<size_t>(rank)];
    if (one.mpi_version != other.mpi_version)
      return make_status(Code::kUnsupported,
                         "{} has {} and {} has {}; install the same MPI on all hosts", name(0),
                         one.mpi_version, name(rank), other.mpi_version);
    if (one.initialised != other.initialised)
      return make_status(
          Code::kUnsupported,
          "MPI has been initialised already in {} but not in {}; initialise it in all "
          "ranks before the first group that spans hosts, or in none",
          name(one.initialised ? 0 : rank), name(one.initialised ? rank : 0));
  }
  StartPlan plan;
  plan.origin = entries[0].initialised       ? MpiOrigin::kProgram
                : launcher_made_job(entries) ? MpiOrigin::kLauncher
                                             : MpiOrigin::kDscomm;
  plan.hosts = make_hosts(request, entries);
  std::set<std::string> addresses;
  for (const MpiMemberEntry& entry : entries)
    addresses.insert(entry.addresses.begin(), entry.addresses.end());
  plan.addresses.assign(addresses.begin(), addresses.end());
  return plan;
}

size_t StartPlan::host_of(int rank) const {
  for (size_t host = 0; host < hosts.size(); ++host)
    for (const RankProcess& member : hosts[host].ranks)
      if (member.rank == static_cast<uint32_t>(rank)) return host;
  return 0;
}

}  // namespace dscomm
