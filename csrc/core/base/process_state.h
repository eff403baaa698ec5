// The state and the age of a process, as the kernel reports them.
#pragma once

#include <cstdint>
#include <string>

namespace dscomm {

// The letter of the state; 0: unknown. `pid` is a number in this process's pid namespace, of a
// process or of a thread.
char process_state(int64_t pid);
inline constexpr const char* kStopped = "stopped (state T)";
// The state in words, to follow "which is": "sleeping (state S)".
std::string process_state_text(char letter);

// When the process started, in clock ticks since the boot; 0 if it does not exist or is a zombie.
uint64_t process_start_time(int64_t pid);

}  // namespace dscomm
