#include "mpi/guarded.h"

#include <atomic>
#include <mutex>

#include "core/team/first_cause.h"
#include "mpi/call_watch.h"

namespace dscomm {
namespace {

// Relaxed: a thread that reads an old value calls MPI as it could have just before MPI gave up.
std::atomic<bool> gave_up{false};
std::mutex words_mutex;
std::string words;
FirstCause& death = *new FirstCause;  // never destroyed: other threads may outlive main()

}  // namespace

bool mpi_gave_up() { return gave_up.load(std::memory_order_relaxed); }

std::string mpi_abort_message() {
  std::lock_guard lock(words_mutex);
  return words;
}

Status first_death() { return death.get(); }

void note_first_death(const Status& cause) { static_cast<void>(death.keep(cause)); }

void note_mpi_gave_up() { gave_up.store(true, std::memory_order_relaxed); }

namespace guard {

void give_up(const char* why) {
  {
    std::lock_guard lock(words_mutex);
    words = why;
  }
  note_mpi_gave_up();
  watch_calls();  // other threads may wait for locks that are never released
  throw GaveUp();
}

}  // namespace guard
}  // namespace dscomm
