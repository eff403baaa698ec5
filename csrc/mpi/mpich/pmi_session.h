// PmiSession: answers the requests of one MPICH rank in PMI-1, the protocol between a launcher
// such as Hydra and its ranks. A request is a line "cmd=NAME KEY=VALUE ...".
//
// Ranks put values under keys, enter a barrier, and get the values put before the barrier.
//
// Source: MPICH 5.0, src/pmi/src/pmi_wire.c and pmi_v1.c.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace dscomm {

class PmiSession {
 public:
  // `node_map` says which ranks share a host, in PMI's notation: see node_map_of().
  PmiSession(int size, std::string node_map) : size_(size), node_map_(std::move(node_map)) {}

  // `line`: a request without line end. Returns the answer with line end; empty if none is due.
  std::string answer(std::string_view line);

  bool is_in_barrier() const { return is_in_barrier_; }
  // The values that this rank has put since the last barrier, for the other ranks.
  std::string take_values();
  // All ranks are in the barrier; `said` has each rank's take_values(). False if it is malformed.
  bool add_values(const std::vector<std::string>& said);
  // Returns the answer to the rank's request for the barrier.
  std::string leave_barrier();

 private:
  using Values = std::map<std::string, std::string, std::less<>>;

  std::string get(std::string_view key) const;

  const int size_;
  const std::string node_map_;
  Values put_, known_;
  bool is_in_barrier_ = false;
  bool is_in_long_question_ = false;
};

// "(vector,(0,1,2),(1,1,1))": ranks 0 and 1 are on the first host, 2 on the second. `hosts` by
// rank.
std::string node_map_of(const std::vector<size_t>& hosts);

}  // namespace dscomm
