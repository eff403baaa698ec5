// Calls into a library that may never return.
#pragma once

#include <functional>

#include "core/base/deadline.h"
#include "core/base/give_up_check.h"
#include "core/base/status.h"

namespace dscomm {

// Runs `body` on a new thread and waits for it. At the deadline, or when `check` fails, abandons
// the thread: so `body` must own all that it touches, captured by value. Returns OK once `body` has
// returned; else `check`'s status, or kTimeout ("timed out: MPI_Init_thread did not return within 1
// s").
Status run_abandonable(const char* what, std::function<void()> body, const Deadline& deadline,
                       const GiveUpCheck& check);

// Returns the reason for `refused`, an error of MPI: polls `check` for 0.4 s, but not beyond `end`,
// because a broken connection is often the first sign of a death. Returns the first failure of
// `check` or, if it stays OK, append_first_death(refused).
Status reason_or(const Status& refused, const Deadline& end, const GiveUpCheck& check);

}  // namespace dscomm
