// The machine that the ranks of a world see.
#pragma once

#include <string>

namespace dscomm::schedule {

// The cpus of the processes that are made from now on, as a list: "0-1".
void set_cpus(const std::string& list);

}  // namespace dscomm::schedule
