// How the members of a transport become one MPI job: what each says of itself, and what rank 0
// makes of it. The same for every MPI library, so that ranks with different ones learn of it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/status.h"
#include "core/transport/transport.h"

namespace dscomm {

// Who has made it possible to initialise MPI, or has done so.
enum class MpiOrigin {
  kDscomm,    // dscomm: see start.h
  kLauncher,  // mpirun, srun, flux
  kProgram,   // the program, before dscomm was asked to: MPI is its own
};

// What one rank says of itself.
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
  // What a launcher has said; empty without one.
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
