// What the kernel says a process is doing.
#pragma once

#include <cstdint>
#include <string>

namespace dscomm {

// The letter of its state; 0: unknown. `pid` is of this process's own pid namespace.
char process_state(int64_t pid);
// "stopped (state T)".
std::string process_state_text(char letter);

}  // namespace dscomm
