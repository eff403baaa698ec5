#include "mpi/guarded.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <mutex>

#include "core/team/first_cause.h"
#include "mpi/call_watch.h"

namespace dscomm {
namespace {

// Relaxed: who reads it late calls MPI once more, which is what happens anyway when the calls of
// two threads overlap.
std::atomic<bool> gave_up{false};
std::mutex words_mutex;
std::string words;
FirstCause& death = *new FirstCause;  // never destroyed: other threads may outlive main()

}  // namespace

bool mpi_gave_up() { return gave_up.load(std::memory_order_relaxed); }

std::string mpi_last_words() {
  std::lock_guard lock(words_mutex);
  return words;
}

Status first_death() { return death.get(); }

void note_first_death(const Status& cause) { static_cast<void>(death.keep(cause)); }

void note_mpi_gave_up() { gave_up.store(true, std::memory_order_relaxed); }

}  // namespace dscomm

// Found before libmpi's own: this object is ahead of libmpi in the order of lookups, in a program
// that is linked with it and in the module, which is loaded with RTLD_GLOBAL. Where MPI was loaded
// globally before (by mpi4py, say), libmpi's own is found and nothing changes.
extern "C" __attribute__((visibility("default"), noreturn)) void ompi_rte_abort(int code,
                                                                                char* format, ...) {
  char text[1024] = "";
  if (format != nullptr) {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
  }
  if (dscomm::guard::calls_of_thread().depth > 0) {
    {
      std::lock_guard lock(dscomm::words_mutex);
      dscomm::words = text;
    }
    dscomm::note_mpi_gave_up();
    throw dscomm::guard::GaveUp();
  }
  using Abort = void (*)(int, const char*, ...);
  const auto own = reinterpret_cast<Abort>(dlsym(RTLD_NEXT, "ompi_rte_abort"));
  if (own != nullptr) own(code, format == nullptr ? nullptr : "%s", text);
  std::abort();
}
