// The environment as MPI reads it: what a launcher or the user has said there, and what is put
// there while MPI starts.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace dscomm {

// Empty where there is none.
std::string environment_value(const std::string& name);
// All of it, as a new program takes it.
char** whole_environment();

// What is set through this is gone again when it ends, and so is what MPI itself has set meanwhile:
// a child process that came up with it would take itself for a rank. Not safe against threads that
// read the environment at the same time; nothing is.
class EnvironmentForStart {
 public:
  // `prefixes` of the names that belong to MPI and its launchers: all that is set begins with one.
  explicit EnvironmentForStart(std::vector<std::string> prefixes);
  ~EnvironmentForStart();
  EnvironmentForStart(const EnvironmentForStart&) = delete;
  EnvironmentForStart& operator=(const EnvironmentForStart&) = delete;

  void set(const std::string& assignment);  // "NAME=VALUE"
  // Unless it is in the environment.
  void set_default(const std::string& assignment);
  // Those that are told so, by name.
  void put_aside(const std::function<bool(std::string_view name)>& is_wanted);

 private:
  std::map<std::string, std::string> variables() const;

  const std::vector<std::string> prefixes_;
  const std::map<std::string, std::string> before_;
};

}  // namespace dscomm
