// The plan that makes the members of a transport one MPI job; rank 0 makes it from their entries.
// Entries have the same format for every MPI library, so that a mismatch can be reported.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "core/base/status.h"
#include "core/transport/transport.h"
#include "pmix/messages.h"

namespace dscomm {

// What starts MPI.
enum class MpiOrigin : uint64_t {
  kDscomm,    // dscomm prepares MPI_Init_thread and calls it (start.h)
  kLauncher,  // mpirun, srun or flux has prepared it; dscomm calls it
  kProgram,   // the program has called it already
};

// One rank's entry.
struct MpiMemberEntry {
  std::string server_scope;  // equal for ranks that can share a PMIx server and MPI's shared memory
  RankProcess process;
  std::string cpu_list;
  uint64_t quota_millicpus = 0;  // 0: none
  std::string mpi_version;
  bool initialised = false;
  std::vector<std::string> addresses;  // of its network namespace
  // From the launcher's variables; empty without a launcher.
  std::string name_space, launcher_rank;
  uint64_t launcher_size = 0;  // 0: unknown

  static constexpr std::tuple kFields{
      &MpiMemberEntry::server_scope,  &MpiMemberEntry::process,
      &MpiMemberEntry::cpu_list,      &MpiMemberEntry::quota_millicpus,
      &MpiMemberEntry::mpi_version,   &MpiMemberEntry::initialised,
      &MpiMemberEntry::addresses,     &MpiMemberEntry::name_space,
      &MpiMemberEntry::launcher_rank, &MpiMemberEntry::launcher_size};
};

struct StartPlan {
  MpiOrigin origin = MpiOrigin::kDscomm;
  std::vector<MpiHost> hosts;
  std::vector<std::string> addresses;  // allowed sources of MPI's connections

  // The index in `hosts` of a rank's host.
  size_t host_of(int rank) const;

  static constexpr std::tuple kFields{&StartPlan::origin, &StartPlan::hosts, &StartPlan::addresses};
};

// The entry of this process, which is `rank`, without the parts that MpiStart::describe() adds.
MpiMemberEntry own_entry(int rank);

// `entries` by rank of the request. kUnsupported if they do not match.
Result<StartPlan> make_plan(const TransportRequest& request,
                            const std::vector<MpiMemberEntry>& entries);

}  // namespace dscomm
