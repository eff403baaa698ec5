// Topology: packages, NUMA nodes, L3 caches and cores. hwloc reports those of this host; a file, or
// hwloc's synthetic description, declares those of another machine. make_domains() computes domains
// from the bindings of ranks.
//
// Nothing here is measured: the topology determines the hierarchy of Teams, and the order of
// arithmetic must depend on the placement of ranks alone, not on timing.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/status.h"

struct hwloc_topology;

namespace dscomm {

// Where a rank is bound: the logical indices of the NUMA node and of the L3 that contain all its
// cpus; -1 if they span several or there is none.
struct CpuBinding {
  int numa = -1;
  int l3 = -1;

  friend bool operator==(const CpuBinding&, const CpuBinding&) = default;
};

class Topology {
 public:
  // `description` is the value of DSCOMM_TOPOLOGY: empty (this host), a path to hwloc XML (it
  // contains a slash or ends in .xml), or hwloc's synthetic description, such as "pack:2 [numa]
  // l3:4 core:8 pu:2". kInvalidArgument says what is wrong with it.
  //
  // Takes milliseconds, because I/O devices and small caches are not examined.
  static Result<std::unique_ptr<Topology>> load(const std::string& description);
  ~Topology();

  Topology(const Topology&) = delete;
  Topology& operator=(const Topology&) = delete;

  int package_count() const { return package_count_; }
  int numa_count() const { return numa_count_; }  // without nodes that repeat cpus of others
  int l3_count() const { return l3_count_; }
  int core_count() const { return core_count_; }

  // The cpus that this process may run on, as the kernel writes lists: "0-3,8". Always those of
  // this host, even if another topology is declared.
  const std::string& cpu_list() const { return cpu_list_; }

  // How many threads of this process can run at once: usable_cores() of its cpus and quota.
  int usable_cores() const { return usable_cores_; }

  // The binding of this process, and that of a process with these cpus. An empty or malformed list
  // counts as unbound.
  CpuBinding binding() const { return binding_of(cpu_list_); }
  CpuBinding binding_of(const std::string& cpu_list) const;

  // Asks the kernel to take the memory of a mapping from this process's NUMA node, or from others
  // if that node is full, independent of the thread that touches the memory first. Call it before
  // any of the memory is allocated. Does nothing if the process is bound to no single node, if its
  // memory policy names nodes (numactl --membind, --preferred), or if another topology is declared.
  void place_memory(void* data, size_t bytes) const;

  // "1 package, 1 NUMA node, 1 L3, 2 cores; 2 usable"
  std::string describe() const;

 private:
  explicit Topology(hwloc_topology* topology);

  hwloc_topology* topology_;  // owned
  int package_count_ = 0;
  int numa_count_ = 0;
  int l3_count_ = 0;
  int core_count_ = 0;
  std::string cpu_list_;
  int usable_cores_ = 1;
};

// How many threads of processes with these cpu lists can run at once: the cpus in any of the lists,
// limited by the quota (in cpus, rounded up; infinite if there is none), and at least 1. Hardware
// threads count as cores, as in the kernel's quota. If each rank is bound to one core, pass the
// lists of all ranks: the list of one rank does not contain the cores of the others.
int usable_cores(std::span<const std::string> cpu_lists, double quota);

// The cpus that any thread of this process may run on, as a list. All threads count because OpenMP
// runtimes bind the main thread to one core of many.
std::string process_cpu_list();

// The smallest quota, in cpus, of the cgroups (v1 or v2) of this process; infinite if no quota is
// set or visible. `file_root` is a prefix of each path that is read (for tests).
double cgroup_cpu_quota(const std::string& file_root = "");

// The ranks of one host, divided into domains.
struct Domains {
  std::vector<std::vector<int>> ranks;  // each ascending; ordered by their lowest rank
  std::string reason;                   // why these domains, for the log
};

// Splits the ranks 0..n-1 of one host by their bindings. A pure function of values that all ranks
// have published, so all ranks compute the same domains.
//
//   "flat", "hosts"  one domain
//   "numa", "l3"     one domain for each NUMA node or L3 that ranks are bound to, if these are at
//                    least two and one of them has at least two ranks; else one domain
//   "auto"           by NUMA node if at least two domains have at least two ranks each, else by L3
//                    on this condition, else one domain
//
// A level at which a rank is bound to no single NUMA node or L3 does not count: the place of the
// rank's data is unknown.
Domains make_domains(std::span<const CpuBinding> bindings, std::string_view hierarchy);

}  // namespace dscomm
