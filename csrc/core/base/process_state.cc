#include "core/base/process_state.h"

#include <fstream>
#include <utility>

namespace dscomm {

char process_state(int64_t pid) {
  std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(stat, line);
  // The state is the letter after the last parenthesis: the program's name may contain others.
  const size_t close = line.rfind(')');
  return close == std::string::npos || close + 2 >= line.size() ? 0 : line[close + 2];
}

std::string process_state_text(char letter) {
  constexpr std::pair<char, const char*> kTexts[] = {{0, "in an unknown state"},
                                                     {'T', kStopped},
                                                     {'t', "stopped by a debugger (state t)"},
                                                     {'R', "running (state R)"},
                                                     {'S', "sleeping (state S)"},
                                                     {'D', "waiting for a device (state D)"},
                                                     {'Z', "dead (state Z)"}};
  for (const auto& [known, text] : kTexts)
    if (known == letter) return text;
  return std::string("in state ") + letter;
}

}  // namespace dscomm
