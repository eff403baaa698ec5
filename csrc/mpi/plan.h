// The plan by which the members of a transport become one MPI job: rank 0 makes it from the
// members' entries. Entries are the same for every MPI library, so a mismatch of libraries is
// reported.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/status.h"
#include "core/transport/transport.h"

namespace dscomm {

// The starter of MPI.
enum class MpiOrigin {
  kDscomm,    // dscomm prepares MPI_Init_thread and calls it (start.h)
  kLauncher,  // mpirun, srun or flux has prepared it; dscomm calls it
  kProgram,   // the program has called it already
};

// One rank's entry.
struct MemberEntry {
  std::string place;  // equal where a PMIx server and MPI's shared memory work for both
  int64_t pid = 0;
  uint64_t start_time = 0;
  uint32_t uid = 0, gid = 0;
  std::string cpu_list;
  uint64_t quota_millicpus = 0;  // 0: none
  std::string mpi_version;
  bool initialised = false;
  std::vector<std::string> addresses;  // of its network namespace
  // The launcher's variables; empty without one.
  std::string name_space, launcher_rank;
  uint64_t launcher_size = 0;  // 0: not known
};

struct PlannedRank {
  uint32_t rank = 0;
  int64_t pid = 0;
  uint64_t start_time = 0;
  uint32_t uid = 0, gid = 0;
};

// A host as MPI shall see it: ranks of a host in different containers are on different ones.
struct PlannedHost {
  std::string name;                // unique; letters, digits, points and dashes
  std::vector<PlannedRank> ranks;  // the first is the leader
  bool crowded = false;            // more ranks than cores
};

struct Plan {
  MpiOrigin origin = MpiOrigin::kDscomm;
  std::vector<PlannedHost> hosts;
  std::vector<std::string> addresses;  // from which MPI's connections may come

  // Which of `hosts` a rank is on.
  size_t host_of(int rank) const;
};

// Of this process, but for what depends on the library (MpiStart::describe()).
MemberEntry own_entry();

// `entries` by rank of the request. kUnsupported where they do not fit together.
Result<Plan> make_plan(const TransportRequest& request, const std::vector<MemberEntry>& entries);

// For the store.
std::string pack(const MemberEntry& entry);
bool unpack(std::string_view text, MemberEntry* entry);
std::string pack(const Plan& plan);
bool unpack(std::string_view text, Plan* plan);

}  // namespace dscomm
