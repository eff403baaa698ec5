// The plan that makes the members of a transport one MPI job; rank 0 makes it from their entries.
// Entries have the same format for every MPI library, so that a mismatch can be reported.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/status.h"
#include "core/transport/transport.h"

namespace dscomm {

// What starts MPI.
enum class MpiOrigin {
  kDscomm,    // dscomm prepares MPI_Init_thread and calls it (start.h)
  kLauncher,  // mpirun, srun or flux has prepared it; dscomm calls it
  kProgram,   // the program has called it already
};

// One rank's entry.
struct MpiMemberEntry {
  std::string server_scope;  // equal for ranks that can share a PMIx server and MPI's shared memory
  int64_t pid = 0;
  uint64_t start_time = 0;
  uint32_t uid = 0, gid = 0;
  std::string cpu_list;
  uint64_t quota_millicpus = 0;  // 0: none
  std::string mpi_version;
  bool initialised = false;
  std::vector<std::string> addresses;  // of its network namespace
  // From the launcher's variables; empty without a launcher.
  std::string name_space, launcher_rank;
  uint64_t launcher_size = 0;  // 0: unknown
};

struct PlannedRank {
  uint32_t rank = 0;
  int64_t pid = 0;
  uint64_t start_time = 0;
  uint32_t uid = 0, gid = 0;
};

// A host as MPI sees it: ranks of one machine in different containers are on different hosts.
struct PlannedHost {
  std::string name;                // unique; letters, digits, points and dashes
  std::vector<PlannedRank> ranks;  // the first is the leader
  bool crowded = false;            // more ranks than cores
};

struct StartPlan {
  MpiOrigin origin = MpiOrigin::kDscomm;
  std::vector<PlannedHost> hosts;
  std::vector<std::string> addresses;  // allowed sources of MPI's connections

  // The index in `hosts` of a rank's host.
  size_t host_of(int rank) const;
};

// This process's entry, without the parts that MpiStart::describe() adds.
MpiMemberEntry own_entry();

// `entries` by rank of the request. kUnsupported if they do not match.
Result<StartPlan> make_plan(const TransportRequest& request,
                            const std::vector<MpiMemberEntry>& entries);

// Serialisation for the store.
std::string pack(const MpiMemberEntry& entry);
bool unpack(std::string_view text, MpiMemberEntry* entry);
std::string pack(const StartPlan& plan);
bool unpack(std::string_view text, StartPlan* plan);

}  // namespace dscomm
