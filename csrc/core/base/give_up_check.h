// GiveUpCheck: a callback with which a wait checks whether to give up before its deadline. The wait
// itself checks the deadline (deadline.h).
#pragma once

#include <functional>

#include "core/base/status.h"

namespace dscomm {

// Called again and again during a wait. Returns a reason to give up, or OK.
using GiveUpCheck = std::function<Status()>;

}  // namespace dscomm
