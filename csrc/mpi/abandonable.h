// A call into a library that may never return.
#pragma once

#include <functional>

#include "core/base/deadline.h"
#include "core/base/look.h"
#include "core/base/status.h"

namespace dscomm {

// Runs `body` on a thread of its own and waits for it. At the deadline, or when `look` has a
// reason, the thread is left behind: what `body` touches must live as long as it does, so it
// captures by value. OK once `body` has returned; kTimeout ("timed out: MPI_Init_thread did not
// return within 1 s").
Status run_abandonable(const char* what, std::function<void()> body, const Deadline& deadline,
                       const Look& look);

// MPI has refused something, for which `look` may have a reason a moment later: a connection that
// breaks is often the first sign of a death. That reason, or `refused`. `end` bounds the wait.
Status reason_or(const Status& refused, const Deadline& end, const Look& look);

}  // namespace dscomm
