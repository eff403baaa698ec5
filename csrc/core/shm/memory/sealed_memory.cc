#include "core/shm/memory/sealed_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/base/memory_reservation.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

namespace dscomm {
namespace {

// Some hosts require MFD_NOEXEC_SEAL; older kernels do not know it.
int make_memfd(const char* name) {
  int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
  if (fd < 0 && errno == EINVAL) fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  return fd;
}

constexpr uint64_t kBackingStep = 4 << 20;

}  // namespace

Result<SealedMemory> SealedMemory::reserve(const char* name, size_t bytes) {
  SealedMemory memory;
  memory.fd_ = UniqueFd(make_memfd(name));
  if (!memory.fd_.valid() && (errno == EPERM || errno == EACCES || errno == ENOSYS))
    return Status(Code::kResource,
                  std::string("memfd_create failed: ") + std::strerror(errno) +
                      "; dscomm makes shared memory with it: allow it in the seccomp profile of "
                      "the container, as those of Docker and Podman do");
  if (!memory.fd_.valid()) return system_error("memfd_create");
  if (ftruncate(memory.fd(), static_cast<off_t>(bytes)) != 0)
    return system_error("ftruncate of shared memory");
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory.fd(), 0);
  if (address == MAP_FAILED) return system_error("mmap of shared memory");
  memory.mapping_ = Mapping(address, bytes);
  // Keep shared memory out of core dumps.
  madvise(address, bytes, MADV_DONTDUMP);
  // Kernels before 5.1 lack F_SEAL_FUTURE_WRITE: there, peers could map the memory writable.
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  if (fcntl(memory.fd(), F_ADD_SEALS, kSeals | F_SEAL_FUTURE_WRITE) != 0 &&
      fcntl(memory.fd(), F_ADD_SEALS, kSeals) != 0)
    return system_error("sealing shared memory");
  return memory;
}

Status SealedMemory::back(uint64_t begin, uint64_t end, MemoryReservation* reservation) {
  // Takes memory in steps: a signal undoes only the step that it interrupts, and each finished step
  // is deducted from the reservation.
  while (begin < end) {
    const uint64_t step = std::min<uint64_t>(end - begin, kBackingStep);
    if (fallocate(fd(), 0, static_cast<off_t>(begin), static_cast<off_t>(step)) == 0) {
      begin += step;
      reservation->taken(step);
    } else if (errno != EINTR) {
      return system_error("fallocate of shared memory");
    }
  }
  return {};
}

void SealedMemory::map_now(uint64_t begin, uint64_t end) {
#ifdef MADV_POPULATE_WRITE
  madvise(data() + begin, end - begin, MADV_POPULATE_WRITE);  // Linux 5.14
#else
  static_cast<void>(begin), static_cast<void>(end);
#endif
}

// Replaces the shared mapping by a private one. If that fails, unmaps all: the child then faults
// instead of writing into memory that its parent's peers read.
void SealedMemory::keep_in_child(size_t bytes) {
  if (bytes > 0 && mmap(data(), bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, fd(), 0) == MAP_FAILED)
    bytes = 0;
  if (bytes < size()) munmap(data() + bytes, size() - bytes);
  mapping_.forget();
  fd_.reset();
}

rlim_t resource_limit(int resource) {
  rlimit limit;
  return getrlimit(resource, &limit) == 0 ? limit.rlim_cur : RLIM_INFINITY;
}

Result<Mapping> map_for_reading(int fd, size_t bytes) {
  struct stat memory;
  int seals = fcntl(fd, F_GET_SEALS);
  if (fstat(fd, &memory) != 0 || static_cast<uint64_t>(memory.st_size) < bytes || seals < 0 ||
      (seals & F_SEAL_SHRINK) == 0)
    return Status(Code::kUnsupported,
                  "the memory it handed over is too small, or not sealed against shrinking");
  void* mapped = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
  if (mapped == MAP_FAILED)
    return make_status(Code::kResource,
                       "mapping its memory failed: {}; raise ulimit -v if it is limited",
                       std::strerror(errno));
  madvise(mapped, bytes, MADV_DONTFORK);
  madvise(mapped, bytes, MADV_DONTDUMP);
  return Mapping(mapped, bytes);
}

}  // namespace dscomm
