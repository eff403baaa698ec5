// SealedMemory: memory of this process that its peers may read and nobody else may write.
//
// A memfd without a name, mapped writable once and then sealed against shrinking and against any
// further writable mapping. Reserving it takes address space alone. Memory is taken from the kernel
// by back(), never on a page fault, so that shortage is an error and not a SIGBUS; once sealed it
// cannot be given back while the process lives.
#pragma once

#include <cstdint>

#include "core/base/owned.h"
#include "core/base/status.h"

namespace dscomm {

class MemoryReservation;

class SealedMemory {
 public:
  SealedMemory() = default;
  // `name` shows in /proc; `bytes`, whole pages, must lie within file_size_limit().
  static Result<SealedMemory> reserve(const char* name, size_t bytes);

  int fd() const { return fd_.get(); }
  std::byte* data() const { return mapping_.data(); }
  size_t size() const { return mapping_.size(); }

  // Takes memory for [begin, end), which the caller has reserved. kResource where the kernel
  // refuses all the same.
  Status back(uint64_t begin, uint64_t end, MemoryReservation* reservation);

  // Maps what is backed before it is first used, as far as the kernel knows how: a page that is
  // mapped at its first touch costs the call that touches it about a microsecond.
  void map_now(uint64_t begin, uint64_t end);

  void close_descriptor() { fd_.reset(); }
  // In a forked child that inherited the mapping: its first `bytes` stay where they are, readable,
  // and what the child writes there is its own; the rest, the descriptor and this object's part in
  // it go.
  void keep_in_child(size_t bytes);

 private:
  UniqueFd fd_;
  Mapping mapping_;
};

// The largest file that this process may make: past RLIMIT_FSIZE it would get a signal.
size_t file_size_limit();

// The first `bytes` of another process's SealedMemory, for reading. kUnsupported where it could
// shrink or is too small, kResource where a limit of this process forbids.
Result<Mapping> map_for_reading(int fd, size_t bytes);

}  // namespace dscomm
