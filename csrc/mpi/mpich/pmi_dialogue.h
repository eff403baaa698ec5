// PmiDialogue: what a rank of MPICH asks in PMI-1, the protocol between a launcher such as Hydra
// and the ranks that it starts, and what it is told. A question is a line "cmd=NAME KEY=VALUE ...".
//
// Ranks put values under keys, enter a barrier, and get what others have put before it.
//
// Source: MPICH 5.0, src/pmi/src/pmi_wire.c and pmi_v1.c.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace dscomm {

class PmiDialogue {
 public:
  // `node_map` says which ranks share a host, in PMI's notation: see node_map_of().
  PmiDialogue(int size, std::string node_map) : size_(size), node_map_(std::move(node_map)) {}

  // The answer to a line, which has no line end; it has one. Empty where none is due, or not yet.
  std::string answer(std::string_view line);

  bool is_in_barrier() const { return is_in_barrier_; }
  // What this rank has put since the last barrier, for the others.
  std::string take_put();
  // All ranks are in the barrier, and have put `said`: see take_put(). False where that is not
  // understood.
  bool learn(const std::vector<std::string>& said);
  // The answer that was due.
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

// "(vector,(0,1,2),(1,1,1))": the first host has the next two ranks, the second one the one after
// these. `hosts` by rank.
std::string node_map_of(const std::vector<size_t>& hosts);

}  // namespace dscomm
