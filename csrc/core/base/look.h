// Look: what a wait asks again and again.
#pragma once

#include <functional>

#include "core/base/status.h"

namespace dscomm {

// Asked every few milliseconds while something is waited for: a reason to give up, or OK.
using Look = std::function<Status()>;

}  // namespace dscomm
