#include "mpi/environment.h"

#include <unistd.h>

#include <cstdlib>
#include <initializer_list>

namespace dscomm {
namespace {

bool starts_with_any(std::string_view name, std::initializer_list<std::string_view> prefixes) {
  for (std::string_view prefix : prefixes)
    if (name.starts_with(prefix)) return true;
  return false;
}

constexpr std::string_view kMcaPrefix = "OMPI_MCA_";

bool belongs_to_mpi(std::string_view name) {
  return starts_with_any(name, {"OMPI_", "OPAL_", "ORTE_", "PMIX_", "PRTE_", "JSM_"});
}

// What mpirun and PMIx servers set for a rank; a user sets other MCA parameters than these.
bool tells_a_place(std::string_view name) {
  if (name.starts_with("PMIX_MCA_")) return false;
  if (!name.starts_with(kMcaPrefix)) return starts_with_any(name, {"OMPI_", "PMIX_", "PRTE_"});
  return starts_with_any(
             name.substr(kMcaPrefix.size()),
             {"orte_", "ess", "initial_wdir", "mpi_oversubscribe", "shmem_RUNTIME_QUERY_hint"}) ||
         name == "OMPI_MCA_pmix";
}

std::map<std::string, std::string> variables_of_mpi() {
  std::map<std::string, std::string> found;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    std::string_view text(*entry);
    size_t equals = text.find('=');
    if (equals == std::string_view::npos || !belongs_to_mpi(text)) continue;
    found.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return found;
}

void assign(const std::string& assignment, bool overwrite) {
  size_t equals = assignment.find('=');
  if (equals == std::string::npos) return;
  setenv(assignment.substr(0, equals).c_str(), assignment.c_str() + equals + 1, overwrite ? 1 : 0);
}

}  // namespace

std::string environment_value(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value == nullptr ? "" : value;
}

char** whole_environment() { return environ; }

EnvironmentForStart::EnvironmentForStart(const McaParameters& files)
    : files_(files), before_(variables_of_mpi()) {}

EnvironmentForStart::~EnvironmentForStart() {
  const std::map<std::string, std::string> now = variables_of_mpi();
  for (const auto& [name, value] : now)
    if (before_.count(name) == 0) unsetenv(name.c_str());
  for (const auto& [name, value] : before_)
    if (auto found = now.find(name); found == now.end() || found->second != value)
      setenv(name.c_str(), value.c_str(), 1);
}

void EnvironmentForStart::set(const std::string& assignment) { assign(assignment, true); }

void EnvironmentForStart::set_over_files(const std::string& assignment) {
  assign(assignment, false);
}

void EnvironmentForStart::set_default(const std::string& assignment) {
  const std::string name = assignment.substr(0, assignment.find('='));
  if (name.starts_with(kMcaPrefix) && files_.contains(name.substr(kMcaPrefix.size()))) return;
  assign(assignment, false);
}

void EnvironmentForStart::put_launcher_aside() {
  for (const auto& [name, value] : before_)
    if (tells_a_place(name)) unsetenv(name.c_str());
}

}  // namespace dscomm
