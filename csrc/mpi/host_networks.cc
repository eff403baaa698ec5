#include "mpi/host_networks.h"

#include <algorithm>
#include <filesystem>

#include "core/transport/networks.h"

namespace dscomm {

bool has_fast_network() {
  std::error_code none;
  for (const char* kind : {"/sys/class/infiniband", "/sys/class/cxi", "/sys/class/bxi"})
    if (std::filesystem::directory_iterator(kind, none) != std::filesystem::directory_iterator())
      return true;
  return false;
}

std::vector<std::string> networks_between_hosts(const TransportRequest& request) {
  const std::vector<std::string> common = common_networks(request.members);
  return common.empty() ? distinct_networks(request.members, request.rank) : common;
}

std::vector<std::string> only_ipv4(std::vector<std::string> networks) {
  std::erase_if(networks,
                [](const std::string& network) { return network.find(':') != std::string::npos; });
  return networks;
}

std::vector<std::string> interfaces_in(const std::vector<std::string>& networks) {
  std::vector<std::string> names;
  const std::vector<Interface> own = own_interfaces();
  for (const std::string& network : networks)
    for (const Interface& interface : own)
      if (select_networks({interface}, network).ok() &&
          std::find(names.begin(), names.end(), interface.name) == names.end())
        names.push_back(interface.name);
  return names;
}

}  // namespace dscomm
