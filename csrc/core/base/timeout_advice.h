// The advice at the end of messages about timeouts.
#pragma once

#include <string>

namespace dscomm {

// "; if rank 1 is only slow, raise the timeout (...)", for `slow`: "rank 1 is".
std::string raise_the_timeout(const std::string& slow);
// How to continue the stopped processes in `awaited`; without any, raise_the_timeout(). `awaited`:
// "rank 1 (pid 5 on host a), which is sleeping (state S); rank 2 (pid 6 on host a)".
std::string timeout_advice(const std::string& awaited);

}  // namespace dscomm
