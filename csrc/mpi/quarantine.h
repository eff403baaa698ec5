// Quarantine: memory that MPI may still access is never freed. A pending request cannot be
// cancelled, and MPI may continue it in any later call, of any Team.
#pragma once

#include <cstddef>
#include <memory>

namespace dscomm {

// Any thread. Null is allowed.
void quarantine(std::unique_ptr<std::byte[]> memory);

}  // namespace dscomm
