// SealedMemory: memory that this process writes and its peers can only read.
//
// A memfd, mapped writable once and then sealed against shrinking and further writable mappings.
// reserve() takes only address space. back() takes memory from the kernel; page faults never do, so
// a shortage is an error, not a SIGBUS. The kernel takes nothing back while the process lives.
#pragma once

#include <sys/resource.h>

#include <cstdint>

#include "core/base/owned.h"
#include "core/base/status.h"

namespace dscomm {

class MemoryReservation;

class SealedMemory {
 public:
  // `name` shows in /proc; `bytes` are whole pages, at most RLIMIT_FSIZE (more raises a signal).
  static Result<SealedMemory> reserve(const char* name, size_t bytes);

  int fd() const { return fd_.get(); }
  std::byte* data() const { return mapping_.data(); }
  size_t size() const { return mapping_.size(); }

  // Takes memory for [begin, end), which the caller has reserved, from the kernel. kResource if the
  // kernel still refuses.
  Status back(uint64_t begin, uint64_t end, MemoryReservation* reservation);

  // Maps backed pages now, if the kernel can, because a page fault at the first touch costs a call
  // about a microsecond.
  void map_now(uint64_t begin, uint64_t end);

  void close_descriptor() { fd_.reset(); }
  // In a forked child: keeps the first `bytes` readable at the same address, with private writes;
  // unmaps the rest and closes the descriptor.
  void keep_in_child(size_t bytes);

 private:
  UniqueFd fd_;
  Mapping mapping_;
};

// This process's limit on a resource, such as RLIMIT_FSIZE; RLIM_INFINITY if there is none.
rlim_t resource_limit(int resource);

// Maps the first `bytes` of another process's SealedMemory for reading. kUnsupported if that memory
// could shrink or is too small, kResource if mmap fails.
Result<Mapping> map_for_reading(int fd, size_t bytes);

}  // namespace dscomm
