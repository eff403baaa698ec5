#include "core/topology/topology.h"

#include <hwloc.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>

#include "core/base/format.h"
#include "core/base/log.h"

namespace dscomm {
namespace {

struct BitmapDeleter {
  void operator()(hwloc_bitmap_s* bitmap) const { hwloc_bitmap_free(bitmap); }
};
using Bitmap = std::unique_ptr<hwloc_bitmap_s, BitmapDeleter>;

// Empty if the list does not parse.
Bitmap parse_cpu_list(const std::string& cpu_list) {
  Bitmap bitmap(hwloc_bitmap_alloc());
  if (cpu_list.empty()) return bitmap;
  if (hwloc_bitmap_list_sscanf(bitmap.get(), cpu_list.c_str()) != 0)
    hwloc_bitmap_zero(bitmap.get());
  return bitmap;
}

bool is_path(const std::string& description) {
  return description.find('/') != std::string::npos || description.ends_with(".xml");
}

// Keeps only what binding_of() and the counts need.
bool filter_types(hwloc_topology_t topology) {
  if (hwloc_topology_set_all_types_filter(topology, HWLOC_TYPE_FILTER_KEEP_NONE) != 0) return false;
  for (hwloc_obj_type_t type : {HWLOC_OBJ_PACKAGE, HWLOC_OBJ_L3CACHE, HWLOC_OBJ_CORE})
    if (hwloc_topology_set_type_filter(topology, type, HWLOC_TYPE_FILTER_KEEP_ALL) != 0)
      return false;
  return true;
}

// The objects of this type, without NUMA nodes that repeat cpus of others. In hwloc, a node of far
// memory has the cpus of its parent object, so those of several nodes. A node of fast memory has
// those of the ordinary node beside it, which comes earlier.
std::vector<hwloc_obj_t> objects_of(hwloc_topology_t topology, hwloc_obj_type_t type) {
  std::vector<hwloc_obj_t> all, chosen;
  for (hwloc_obj_t object = hwloc_get_next_obj_by_type(topology, type, nullptr); object != nullptr;
       object = hwloc_get_next_obj_by_type(topology, type, object))
    if (!hwloc_bitmap_iszero(object->cpuset)) all.push_back(object);
  for (hwloc_obj_t object : all) {
    auto replaces = [&](hwloc_obj_t other) {
      if (hwloc_bitmap_isequal(other->cpuset, object->cpuset))
        return other->logical_index < object->logical_index;
      return hwloc_bitmap_isincluded(other->cpuset, object->cpuset) != 0;
    };
    if (std::none_of(all.begin(), all.end(), replaces)) chosen.push_back(object);
  }
  return chosen;
}

// The index of the object of this type whose cpus include all of `cpus`, or -1.
int index_including(hwloc_topology_t topology, hwloc_obj_type_t type, hwloc_const_bitmap_t cpus) {
  for (hwloc_obj_t object : objects_of(topology, type))
    if (hwloc_bitmap_isincluded(cpus, object->cpuset))
      return static_cast<int>(object->logical_index);
  return -1;
}

int count_of(hwloc_topology_t topology, hwloc_obj_type_t type) {
  return static_cast<int>(objects_of(topology, type).size());
}

// Whether the memory policy of this thread binds memory to certain nodes, or prefers them.
// Interleaving does not count, nor does the default policy (the node of the thread).
bool names_nodes() {
  constexpr int kPreferred = 1, kBind = 2, kPreferredMany = 5, kModes = 0xff;  // linux/mempolicy.h
  int mode = 0;
  if (syscall(SYS_get_mempolicy, &mode, nullptr, 0, nullptr, 0) != 0) return false;
  mode &= kModes;
  return mode == kPreferred || mode == kBind || mode == kPreferredMany;
}

std::string counted(int count, const char* what) {
  return format_text("{} {}{}", count, what, count == 1 ? "" : "s");
}

}  // namespace

Result<std::unique_ptr<Topology>> Topology::load(const std::string& description) {
  hwloc_topology_t topology;
  if (hwloc_topology_init(&topology) != 0)
    return make_status(Code::kResource, "hwloc could not start");
  // Owns `topology` from here on, also on failure.
  std::unique_ptr<Topology> loaded(new Topology(topology));

  int rc = 0;
  if (is_path(description)) {
    rc = hwloc_topology_set_xml(topology, description.c_str());
  } else if (!description.empty()) {
    rc = hwloc_topology_set_synthetic(topology, description.c_str());
  }
  if (rc == 0 && !filter_types(topology))
    return make_status(Code::kInternal, "hwloc refused the type filter");
  if (rc == 0) rc = hwloc_topology_load(topology);
  if (rc != 0) {
    const char* reason = std::strerror(errno);
    if (description.empty())
      return make_status(Code::kResource, "hwloc could not read this host's topology: {}", reason);
    return make_status(Code::kInvalidArgument,
                       "DSCOMM_TOPOLOGY={}: hwloc could not read it as {} ({}); give a path to "
                       "hwloc XML (lstopo writes it), a synthetic description such as \"pack:2 "
                       "[numa] core:4 pu:1\", or nothing for this host",
                       description, is_path(description) ? "XML" : "a description", reason);
  }

  loaded->package_count_ = count_of(topology, HWLOC_OBJ_PACKAGE);
  loaded->numa_count_ = count_of(topology, HWLOC_OBJ_NUMANODE);
  loaded->l3_count_ = count_of(topology, HWLOC_OBJ_L3CACHE);
  loaded->core_count_ = count_of(topology, HWLOC_OBJ_CORE);
  loaded->cpu_list_ = process_cpu_list();
  loaded->usable_cores_ = dscomm::usable_cores({&loaded->cpu_list_, 1}, cgroup_cpu_quota());
  return loaded;
}

Topology::Topology(hwloc_topology* topology) : topology_(topology) {}

Topology::~Topology() { hwloc_topology_destroy(topology_); }

CpuBinding Topology::binding_of(const std::string& cpu_list) const {
  Bitmap cpus = parse_cpu_list(cpu_list);
  if (hwloc_bitmap_iszero(cpus.get())) return {};
  return {index_including(topology_, HWLOC_OBJ_NUMANODE, cpus.get()),
          index_including(topology_, HWLOC_OBJ_L3CACHE, cpus.get())};
}

void Topology::place_memory(void* data, size_t bytes) const {
  if (hwloc_topology_is_thissystem(topology_) == 0) return;
  const int node = binding().numa;
  hwloc_obj_t object =
      node < 0 ? nullptr
               : hwloc_get_obj_by_type(topology_, HWLOC_OBJ_NUMANODE, static_cast<unsigned>(node));
  if (object == nullptr || names_nodes()) return;
  // Without HWLOC_MEMBIND_STRICT the node is only preferred, so a full node does not end a process.
  if (hwloc_set_area_membind(topology_, data, bytes, object->nodeset, HWLOC_MEMBIND_BIND,
                             HWLOC_MEMBIND_BYNODESET) != 0)
    log_line(LogLevel::kInfo, "shared memory was not bound to NUMA node {}: {}", node,
             std::strerror(errno));
}

std::string Topology::describe() const {
  return format_text("{}, {}, {}, {}; {} usable", counted(package_count_, "package"),
                     counted(numa_count_, "NUMA node"), counted(l3_count_, "L3"),
                     counted(core_count_, "core"), usable_cores_);
}

int usable_cores(std::span<const std::string> cpu_lists, double quota) {
  Bitmap all(hwloc_bitmap_alloc());
  for (const std::string& cpu_list : cpu_lists) {
    Bitmap cpus = parse_cpu_list(cpu_list);
    hwloc_bitmap_or(all.get(), all.get(), cpus.get());
  }
  // hwloc returns -1 for an infinite set ("0-"), which no process has.
  double cores = std::max(hwloc_bitmap_weight(all.get()), 1);
  return static_cast<int>(std::max(std::min(cores, std::ceil(quota)), 1.0));
}

}  // namespace dscomm
