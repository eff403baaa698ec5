#include "core/topology/topology.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <stdlib.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>

namespace dscomm {
namespace {

using Lists = std::vector<std::vector<int>>;

std::unique_ptr<Topology> load_or_fail(const std::string& description) {
  Result<std::unique_ptr<Topology>> topology = Topology::load(description);
  EXPECT_TRUE(topology.ok()) << topology.status().message();
  return std::move(topology).value();
}

// A temporary directory.
class Scratch {
 public:
  Scratch() {
    std::string pattern = std::filesystem::temp_directory_path() / "topology_test.XXXXXX";
    path_ = mkdtemp(pattern.data());
  }
  ~Scratch() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }
  void write(const std::string& file, const std::string& text) {
    std::filesystem::path whole = path_ + file;
    std::filesystem::create_directories(whole.parent_path());
    std::ofstream(whole) << text;
  }

 private:
  std::string path_;
};

TEST(Topology, SyntheticDescriptionGivesObjectCounts) {
  auto topology = load_or_fail("pack:2 [numa] l3:2 core:4 pu:2");
  EXPECT_EQ(topology->package_count(), 2);
  EXPECT_EQ(topology->numa_count(), 2);
  EXPECT_EQ(topology->l3_count(), 4);
  EXPECT_EQ(topology->core_count(), 16);
  std::string expected = "2 packages, 2 NUMA nodes, 4 L3s, 16 cores; ";
  EXPECT_EQ(topology->describe().substr(0, expected.size()), expected);
}

TEST(Topology, DescriptionOfOneObjectUsesSingular) {
  std::string described = load_or_fail("pack:1 [numa] l3:1 core:1 pu:1")->describe();
  EXPECT_EQ(described.rfind("1 package, 1 NUMA node, 1 L3, 1 core; ", 0), 0u) << described;
}

TEST(Topology, CpuListsGiveNumaNodeAndL3OnSyntheticMachine) {
  // cpus 0-7 are in node 0 (0-3 and 4-7 have an L3 each), 8-15 in node 1.
  auto topology = load_or_fail("pack:2 [numa] l3:2 core:2 pu:2");
  EXPECT_EQ(topology->binding_of("0"), (CpuBinding{0, 0}));
  EXPECT_EQ(topology->binding_of("1-3"), (CpuBinding{0, 0}));
  EXPECT_EQ(topology->binding_of("4-7"), (CpuBinding{0, 1}));
  EXPECT_EQ(topology->binding_of("3,4"), (CpuBinding{0, -1}));
  EXPECT_EQ(topology->binding_of("8-11"), (CpuBinding{1, 2}));
  EXPECT_EQ(topology->binding_of("12,15"), (CpuBinding{1, 3}));
  EXPECT_EQ(topology->binding_of("0-15"), (CpuBinding{-1, -1}));
  EXPECT_EQ(topology->binding_of("99"), (CpuBinding{-1, -1}));
  EXPECT_EQ(topology->binding_of(""), (CpuBinding{-1, -1}));
  EXPECT_EQ(topology->binding_of("nonsense"), (CpuBinding{-1, -1}));
}

TEST(Topology, MachineWithoutL3ReportsNoL3) {
  auto topology = load_or_fail("[numa] core:4 pu:1");
  EXPECT_EQ(topology->l3_count(), 0);
  EXPECT_EQ(topology->binding_of("1"), (CpuBinding{0, -1}));
}

// Two packages of one core, each with ordinary and fast memory, and far memory without a core.
TEST(Topology, NumaNodesThatRepeatCpusOfOthersAreNotCounted) {
  Scratch scratch;
  scratch.write("/machine.xml", R"(<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE topology SYSTEM "hwloc2.dtd">
<topology version="2.0">
 <object type="Machine" os_index="0" cpuset="0x3" complete_cpuset="0x3" allowed_cpuset="0x3"
         nodeset="0x1f" complete_nodeset="0x1f" allowed_nodeset="0x1f">
  <object type="NUMANode" os_index="4" cpuset="0x3" complete_cpuset="0x3"
          nodeset="0x10" complete_nodeset="0x10" local_memory="1048576"/>
  <object type="Package" os_index="0" cpuset="0x1" complete_cpuset="0x1"
          nodeset="0x5" complete_nodeset="0x5">
   <object type="NUMANode" os_index="0" cpuset="0x1" complete_cpuset="0x1"
           nodeset="0x1" complete_nodeset="0x1" local_memory="1048576"/>
   <object type="NUMANode" os_index="2" cpuset="0x1" complete_cpuset="0x1"
           nodeset="0x4" complete_nodeset="0x4" local_memory="1048576"/>
   <object type="Core" os_index="0" cpuset="0x1" complete_cpuset="0x1"
          nodeset="0x5" complete_nodeset="0x5">
    <object type="PU" os_index="0" cpuset="0x1" complete_cpuset="0x1"
          nodeset="0x5" complete_nodeset="0x5"/>
   </object>
  </object>
  <object type="Package" os_index="1" cpuset="0x2" complete_cpuset="0x2"
          nodeset="0xa" complete_nodeset="0xa">
   <object type="NUMANode" os_index="1" cpuset="0x2" complete_cpuset="0x2"
           nodeset="0x2" complete_nodeset="0x2" local_memory="1048576"/>
   <object type="NUMANode" os_index="3" cpuset="0x2" complete_cpuset="0x2"
           nodeset="0x8" complete_nodeset="0x8" local_memory="1048576"/>
   <object type="Core" os_index="1" cpuset="0x2" complete_cpuset="0x2"
          nodeset="0xa" complete_nodeset="0xa">
    <object type="PU" os_index="1" cpuset="0x2" complete_cpuset="0x2"
          nodeset="0xa" complete_nodeset="0xa"/>
   </object>
  </object>
 </object>
</topology>
)");
  auto topology = load_or_fail(scratch.path() + "/machine.xml");
  EXPECT_EQ(topology->package_count(), 2);
  EXPECT_EQ(topology->core_count(), 2);
  EXPECT_EQ(topology->numa_count(), 2);
  EXPECT_GE(topology->binding_of("0").numa, 0);
  EXPECT_GE(topology->binding_of("1").numa, 0);
  EXPECT_NE(topology->binding_of("0").numa, topology->binding_of("1").numa);
  EXPECT_EQ(topology->binding_of("0-1").numa, -1);
}

TEST(Topology, UnreadableDescriptionIsAnInvalidArgument) {
  for (const char* description : {"/no/such/file.xml", "missing.xml", "pack:two", "core:"}) {
    Result<std::unique_ptr<Topology>> topology = Topology::load(description);
    ASSERT_FALSE(topology.ok()) << description;
    EXPECT_EQ(topology.status().code(), Code::kInvalidArgument);
    EXPECT_NE(topology.status().message().find(description), std::string::npos)
        << topology.status().message();
  }
}

TEST(Topology, TopologyOfThisHostIsPlausible) {
  auto topology = load_or_fail("");
  EXPECT_GE(topology->package_count(), 1);
  EXPECT_GE(topology->numa_count(), 1);
  EXPECT_GE(topology->core_count(), 1);
  EXPECT_GE(topology->usable_cores(), 1);
  EXPECT_FALSE(topology->cpu_list().empty());
  EXPECT_EQ(topology->binding(), topology->binding_of(process_cpu_list()));
}

TEST(Topology, UsableCoresFollowTheAffinity) {
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  int cpu = 0;
  while (!CPU_ISSET(cpu, &before)) ++cpu;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(cpu, &one);
  // This test has no other thread, so its affinity is the process's.
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  EXPECT_EQ(process_cpu_list(), std::to_string(cpu));
  EXPECT_EQ(load_or_fail("")->usable_cores(), 1);
  ASSERT_EQ(sched_setaffinity(0, sizeof before, &before), 0);
}

TEST(UsableCores, AreTheUnionOfMembersWithinTheQuota) {
  constexpr double kNone = std::numeric_limits<double>::infinity();
  EXPECT_EQ(usable_cores(std::vector<std::string>{"0-3"}, kNone), 4);
  EXPECT_EQ(usable_cores(std::vector<std::string>{"0", "1", "2-3", "3"}, kNone), 4);
  EXPECT_EQ(usable_cores(std::vector<std::string>{"0-3"}, 2.0), 2);
  EXPECT_EQ(usable_cores(std::vector<std::string>{"0-3"}, 1.01), 2);
  EXPECT_EQ(usable_cores(std::vector<std::string>{"0-3"}, 0.1), 1);
  EXPECT_EQ(usable_cores(std::vector<std::string>{""}, kNone), 1);
}

TEST(CgroupQuota, SmallestQuotaOfVersion2AncestorsApplies) {
  Scratch scratch;
  scratch.write("/proc/self/cgroup", "0::/a/b\n");
  scratch.write("/proc/self/mountinfo", "29 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
  scratch.write("/sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
  EXPECT_TRUE(std::isinf(cgroup_cpu_quota(scratch.path())));
  scratch.write("/sys/fs/cgroup/a/cpu.max", "250000 100000\n");
  EXPECT_DOUBLE_EQ(cgroup_cpu_quota(scratch.path()), 2.5);
  scratch.write("/sys/fs/cgroup/a/b/cpu.max", "150000 100000\n");
  EXPECT_DOUBLE_EQ(cgroup_cpu_quota(scratch.path()), 1.5);
}

TEST(CgroupQuota, Version2QuotaOfContainerRootApplies) {
  Scratch scratch;
  scratch.write("/proc/self/cgroup", "0::/\n");
  scratch.write("/proc/self/mountinfo", "29 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
  scratch.write("/sys/fs/cgroup/cpu.max", "300000 100000\n");
  EXPECT_DOUBLE_EQ(cgroup_cpu_quota(scratch.path()), 3.0);
}

TEST(CgroupQuota, Version1QuotaOfPartialMountIsFound) {
  Scratch scratch;
  scratch.write("/proc/self/cgroup", "5:memory:/other\n4:cpu,cpuacct:/docker/abc/inner\n");
  scratch.write("/proc/self/mountinfo",
                "30 29 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
                "31 29 0:28 /docker/abc /sys/fs/cgroup/cpu rw shared:9 - cgroup cgroup "
                "rw,cpu,cpuacct\n");
  scratch.write("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  scratch.write("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  EXPECT_TRUE(std::isinf(cgroup_cpu_quota(scratch.path())));
  scratch.write("/sys/fs/cgroup/cpu/inner/cpu.cfs_quota_us", "50000\n");
  scratch.write("/sys/fs/cgroup/cpu/inner/cpu.cfs_period_us", "100000\n");
  EXPECT_DOUBLE_EQ(cgroup_cpu_quota(scratch.path()), 0.5);
}

TEST(CgroupQuota, ProcessWithoutVisibleCgroupHasNoQuota) {
  Scratch scratch;
  EXPECT_TRUE(std::isinf(cgroup_cpu_quota(scratch.path())));
}

TEST(Domains, AutoSplitsIfTwoDomainsHaveTwoRanks) {
  std::vector<CpuBinding> bindings{{0, 0}, {0, 0}, {1, 1}, {1, 1}};
  EXPECT_EQ(make_domains(bindings, "auto").ranks, (Lists{{0, 1}, {2, 3}}));
  EXPECT_EQ(make_domains(bindings, "flat").ranks, (Lists{{0, 1, 2, 3}}));
}

TEST(Domains, DomainsAreOrderedByLowestRankNotByIndex) {
  std::vector<CpuBinding> bindings{{7, 0}, {2, 0}, {7, 0}, {2, 0}, {5, 0}};
  EXPECT_EQ(make_domains(bindings, "auto").ranks, (Lists{{0, 2}, {1, 3}, {4}}));
}

TEST(Domains, AutoPrefersNumaToL3) {
  std::vector<CpuBinding> bindings{{0, 0}, {0, 0}, {0, 1}, {0, 1}, {1, 2}, {1, 2}, {1, 3}, {1, 3}};
  EXPECT_EQ(make_domains(bindings, "auto").ranks, (Lists{{0, 1, 2, 3}, {4, 5, 6, 7}}));
  EXPECT_EQ(make_domains(bindings, "l3").ranks, (Lists{{0, 1}, {2, 3}, {4, 5}, {6, 7}}));
  for (CpuBinding& binding : bindings) binding.numa = 0;
  EXPECT_EQ(make_domains(bindings, "auto").ranks, (Lists{{0, 1}, {2, 3}, {4, 5}, {6, 7}}));
}

TEST(Domains, AutoStaysFlatWithFewerThanTwoDomainsOfTwoRanks) {
  EXPECT_EQ(make_domains(std::vector<CpuBinding>{{0, 0}, {1, 1}}, "auto").ranks, (Lists{{0, 1}}));
  std::vector<CpuBinding> one_and_two{{0, 0}, {1, 1}, {1, 1}};
  EXPECT_EQ(make_domains(one_and_two, "auto").ranks, (Lists{{0, 1, 2}}));
  EXPECT_EQ(make_domains(std::vector<CpuBinding>{{0, 0}, {0, 0}}, "auto").ranks, (Lists{{0, 1}}));
  EXPECT_EQ(make_domains(std::vector<CpuBinding>{{0, 0}}, "auto").ranks, (Lists{{0}}));
}

TEST(Domains, ExplicitSettingSplitsIfOneDomainHasTwoRanks) {
  std::vector<CpuBinding> bindings{{0, 0}, {1, 1}, {1, 1}};
  EXPECT_EQ(make_domains(bindings, "numa").ranks, (Lists{{0}, {1, 2}}));
  EXPECT_EQ(make_domains(std::vector<CpuBinding>{{0, 0}, {1, 1}}, "numa").ranks, (Lists{{0, 1}}));
}

TEST(Domains, UnboundRankPreventsSplitAndIsNamed) {
  std::vector<CpuBinding> bindings{{0, 0}, {0, 0}, {1, -1}, {1, 1}};
  EXPECT_EQ(make_domains(bindings, "auto").ranks, (Lists{{0, 1}, {2, 3}}));  // by NUMA node
  Domains by_l3 = make_domains(bindings, "l3");
  EXPECT_EQ(by_l3.ranks, (Lists{{0, 1, 2, 3}}));
  EXPECT_EQ(by_l3.reason,
            "DSCOMM_HIERARCHY is l3, but rank 2 of this host is bound to no single L3");
}

}  // namespace
}  // namespace dscomm
