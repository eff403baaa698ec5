#include "core/base/process_state.h"

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <utility>

namespace dscomm {

namespace {

// The fields of /proc/<pid>/stat from the third one, the state; empty if there is no process.
std::string fields_from_state(int64_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(file, text, '\0');
  // The state follows the last ')': the program's name, before it, may contain parentheses, too.
  const size_t close = text.rfind(')');
  return close == std::string::npos || close + 2 >= text.size() ? "" : text.substr(close + 2);
}

}  // namespace

char process_state(int64_t pid) { return fields_from_state(pid)[0]; }

uint64_t process_start_time(int64_t pid) {
  std::istringstream fields(fields_from_state(pid));
  std::string field;
  fields >> field;
  if (field == "Z" || field == "X") return 0;
  for (int number = 4; number <= 22; ++number) fields >> field;
  return std::strtoull(field.c_str(), nullptr, 10);
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
