// The advice at the end of messages about timeouts.
#pragma once

#include <string>

namespace dscomm {

// `slow`: "rank 1 is".
std::string raise_the_timeout(const std::string& slow);
// `awaited`: "rank 1 (pid 5 on host a), which is sleeping (state S); rank 2 (pid 6 on host a)".
std::string timeout_advice(const std::string& awaited);

}  // namespace dscomm
