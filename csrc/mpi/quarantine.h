// Memory that MPI may still write to or read from is kept for ever: a request that is pending
// cannot be taken back, and MPI may go on working on it in any later call, of any Team.
#pragma once

#include <cstddef>
#include <memory>

namespace dscomm {

// Any thread. Null is allowed.
void quarantine(std::unique_ptr<std::byte[]> memory);

}  // namespace dscomm
