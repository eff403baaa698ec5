#include "core/formation/table_relay.h"

namespace dscomm {

std::vector<RelayPlace> relay_places(const std::vector<std::string>& addresses) {
  std::vector<RelayPlace> places(addresses.size());
  std::vector<size_t> tree;  // the leaders in the tree, in order
  for (size_t leader = 0; leader < addresses.size(); ++leader) {
    if (addresses[leader].empty()) continue;
    tree.push_back(leader);
    if (tree.size() == 1) continue;
    const size_t child = tree.size() - 2;  // index among all children of the tree
    const size_t parent = tree[child / kRelayChildren];
    RelayPlace& place = places[leader];
    place.parent = addresses[parent];
    place.number = static_cast<int>(child % kRelayChildren) + 1;
    place.depth = places[parent].depth + 1;
    places[parent].children.push_back(place.number);
  }
  return places;
}

}  // namespace dscomm
