#include "core/base/timeout_advice.h"

#include "core/base/process_state.h"

namespace dscomm {

std::string raise_the_timeout(const std::string& slow) {
  return "; if " + slow +
         " only slow, raise the timeout (timeout= of init_process_group or new_group)";
}

std::string timeout_advice(const std::string& awaited) {
  constexpr size_t kNone = std::string::npos;
  std::string text;
  for (size_t at = awaited.find(kStopped); at != kNone; at = awaited.find(kStopped, at + 1)) {
    const size_t begin = awaited.rfind("pid ", at) + 4;
    text += (text.empty() ? "; continue the stopped process: kill -CONT " : ", kill -CONT ") +
            awaited.substr(begin, awaited.find(')', begin) - begin);
  }
  if (!text.empty()) return text;
  const bool is_one = !awaited.empty() && awaited.find("; ") == kNone;
  const size_t end_of_rank = awaited.find_first_of(" ,", sizeof "rank " - 1);
  return raise_the_timeout(is_one ? awaited.substr(0, end_of_rank) + " is" : "these ranks are");
}

}  // namespace dscomm
