#include "mpi/environment.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace dscomm {

std::string environment_value(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value == nullptr ? "" : value;
}

char** whole_environment() { return environ; }

EnvironmentForStart::EnvironmentForStart(std::vector<std::string> prefixes)
    : prefixes_(std::move(prefixes)), before_(variables()) {}

EnvironmentForStart::~EnvironmentForStart() {
  const std::map<std::string, std::string> now = variables();
  for (const auto& [name, value] : now)
    if (!before_.contains(name)) unsetenv(name.c_str());
  for (const auto& [name, value] : before_)
    if (auto found = now.find(name); found == now.end() || found->second != value)
      setenv(name.c_str(), value.c_str(), 1);
}

void EnvironmentForStart::set(const std::string& assignment, bool overwrite) {
  const size_t equals = assignment.find('=');
  if (equals == std::string::npos) return;
  setenv(assignment.substr(0, equals).c_str(), assignment.c_str() + equals + 1, overwrite ? 1 : 0);
}

void EnvironmentForStart::unset_if(const std::function<bool(std::string_view name)>& is_wanted) {
  for (const auto& [name, value] : before_)
    if (is_wanted(name)) unsetenv(name.c_str());
}

std::map<std::string, std::string> EnvironmentForStart::variables() const {
  std::map<std::string, std::string> found;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const size_t equals = text.find('=');
    const bool is_ours = std::ranges::any_of(
        prefixes_, [&](const std::string& prefix) { return text.starts_with(prefix); });
    if (is_ours && equals != std::string_view::npos)
      found.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return found;
}

}  // namespace dscomm
