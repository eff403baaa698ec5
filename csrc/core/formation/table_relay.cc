#include "core/formation/table_relay.h"

namespace dscomm {

std::vector<RelayNode> relay_nodes(const std::vector<std::string>& addresses) {
  std::vector<RelayNode> nodes(addresses.size());
  std::vector<size_t> tree;  // the leaders in the tree, in order
  for (size_t leader = 0; leader < addresses.size(); ++leader) {
    if (addresses[leader].empty()) continue;
    tree.push_back(leader);
    if (tree.size() == 1) continue;
    const size_t child = tree.size() - 2;  // index among all children of the tree
    const size_t parent = tree[child / kRelayChildren];
    RelayNode& node = nodes[leader];
    node.parent = addresses[parent];
    node.number = static_cast<int>(child % kRelayChildren) + 1;
    node.depth = nodes[parent].depth + 1;
    nodes[parent].children.push_back(node.number);
  }
  return nodes;
}

}  // namespace dscomm
