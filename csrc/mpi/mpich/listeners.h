// MPICH's listening sockets without strangers. MPICH tells nobody which they are: they are found
// among the descriptors of the process.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace dscomm {

// The sockets of TCP that have begun to listen in this process since this was made, at one address
// (another thread of the program may open one meanwhile, which most often is at all).
class NewListeners {
 public:
  NewListeners();

  // From now on only `addresses` reach those that are new since the last call.
  void guard_new(const std::vector<std::string>& addresses);
  // How many there have been.
  int count() const { return count_; }

 private:
  std::set<uint64_t> known_;  // by the kernel's cookie
  int count_ = 0;
};

}  // namespace dscomm
