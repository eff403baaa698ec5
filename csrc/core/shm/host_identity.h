// Which host a process is on. It only says whom to try: that two ranks share memory is proved by
// attaching.
#pragma once

#include <string>

namespace dscomm {

// Equal in two processes where an abstract Unix socket of one can be reached by the other: the
// kernel's boot id and the network namespace. At most 95 characters.
std::string host_identity();

}  // namespace dscomm
