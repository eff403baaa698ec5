// The machine that a world's ranks see.
#pragma once

#include <string>

namespace dscomm::schedule {

// Sets the cpus of processes made from now on, as a list: "0-1".
void set_cpus(const std::string& list);

}  // namespace dscomm::schedule
