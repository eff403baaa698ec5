// Topology: packages, NUMA nodes, L3 caches and cores, as hwloc sees this host or as a file or
// hwloc's synthetic description declares another one; and the domains that follow from where ranks
// are bound.
//
// What is declared here is believed and never measured: ranks compose their Teams by it, so that
// the order of their arithmetic is a property of the placement and not of a timing.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/status.h"

struct hwloc_topology;

namespace dscomm {

// Where a rank is bound: the logical index of the one NUMA node and of the one L3 that hold all its
// cpus, or -1 when it spans several or there is none.
struct Place {
  int numa = -1;
  int l3 = -1;

  friend bool operator==(const Place&, const Place&) = default;
};

class Topology {
 public:
  // `description` is the value of DSCOMM_TOPOLOGY: empty (this host), a path to hwloc XML (it
  // contains a slash or ends in .xml), or hwloc's synthetic description, such as
  // "pack:2 [numa] l3:4 core:8 pu:2". kInvalidArgument says what was wrong with it.
  //
  // Takes milliseconds: I/O devices and the small caches are not looked for.
  static Result<std::unique_ptr<Topology>> load(const std::string& description);
  ~Topology();

  Topology(const Topology&) = delete;
  Topology& operator=(const Topology&) = delete;

  int package_count() const { return package_count_; }
  int numa_count() const { return numa_count_; }  // nodes with cpus of their own
  int l3_count() const { return l3_count_; }
  int core_count() const { return core_count_; }

  // The cpus that this process may run on, as the kernel writes lists: "0-3,8". Always this host's,
  // whatever topology is believed.
  const std::string& cpu_list() const { return cpu_list_; }

  // How many threads of this process can run at once: usable_cores() of its own cpus and quota.
  int usable_cores() const { return usable_cores_; }

  // Where this process is bound, and where a process with these cpus would be. A list that does not
  // parse, or is empty, is bound to nothing.
  Place place() const { return place_of(cpu_list_); }
  Place place_of(const std::string& cpu_list) const;

  // Asks the kernel to take the memory of this mapping from the NUMA node to which this process is
  // bound, and from others where that is full, whichever thread touches it first. Before any of it
  // is allocated. Left as it is where the process is bound to no single node, where its own memory
  // policy names nodes (numactl --membind, --preferred), or where another topology is believed.
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
// but no more than the quota (in cpus, rounded up; infinite when there is none), and at least 1.
// Hardware threads count as cores, as they do for the kernel's quota. Where ranks are bound to a
// core each, pass the lists of all of them: one rank's list says nothing about the others' cores.
int usable_cores(std::span<const std::string> cpu_lists, double quota);

// The cpus that any thread of this process may run on, as a list. All threads count because OpenMP
// runtimes bind the main thread to one core of many.
std::string process_cpu_list();

// The smallest cpu quota of the cgroups, v1 or v2, that this process is in, in cpus; infinite when
// there is none or none is visible. `file_root` is put before every path that is read (for tests).
double cgroup_cpu_quota(const std::string& file_root = "");

// The ranks of one host, in the order in which they compose.
struct Domains {
  std::vector<std::vector<int>> ranks;  // each ascending; ordered by their lowest rank
  std::string reason;                   // why, for the log
};

// Splits the ranks 0..n-1 of one host by where they are bound. A pure function of what every rank
// has published, so that all derive the same domains.
//
//   "flat"        one domain
//   "numa", "l3"  one domain for each NUMA node or L3 that ranks are bound to, where there are at
//                 least two and one of them has at least two ranks; else one domain
//   "auto"        by NUMA node if at least two domains have at least two ranks each, else by L3 on
//                 the same condition, else one domain
//
// A rank that is bound to none leaves one domain: where its data lies is not known.
Domains make_domains(std::span<const Place> places, std::string_view hierarchy);

}  // namespace dscomm
