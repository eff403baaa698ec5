// Restricts MPICH's listening sockets to the job's hosts. MPICH does not expose these sockets, so
// they are searched for among the process's descriptors.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace dscomm {

// The process's TCP sockets that began to listen on a single address after this object was made.
// (Another thread of the program may open one too, but usually listens on all addresses.)
class NewListeners {
 public:
  NewListeners();

  // From now on only `addresses` can reach the sockets that are new since the last call.
  void restrict_new(const std::vector<std::string>& addresses);
  // Number of sockets found so far.
  int count() const { return count_; }

 private:
  std::set<uint64_t> known_;  // by the kernel's cookie
  int count_ = 0;
};

}  // namespace dscomm
