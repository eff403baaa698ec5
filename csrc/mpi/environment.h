// The environment that MPI reads: the variables of the launcher and the user, and those that dscomm
// sets while MPI starts.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace dscomm {

// Empty if the variable is not set.
std::string environment_value(const std::string& name);
// The whole environment, for a new program.
char** whole_environment();

// Sets variables for a starting MPI. The destructor restores all variables with the constructor's
// prefixes, because those that this object and MPI have set would make a child process believe that
// it is a rank. Like setenv(), not safe while other threads read the environment.
class EnvironmentForStart {
 public:
  // `prefixes`: of the names that belong to MPI and its launchers. Pass set() only such names.
  explicit EnvironmentForStart(std::vector<std::string> prefixes);
  ~EnvironmentForStart();
  EnvironmentForStart(const EnvironmentForStart&) = delete;
  EnvironmentForStart& operator=(const EnvironmentForStart&) = delete;

  void set(const std::string& assignment, bool overwrite = true);  // "NAME=VALUE"
  // Does nothing if the variable is set.
  void set_default(const std::string& assignment) { set(assignment, /*overwrite=*/false); }
  // Unsets those variables with the constructor's prefixes whose names is_wanted() selects.
  void unset_if(const std::function<bool(std::string_view name)>& is_wanted);

 private:
  std::map<std::string, std::string> variables() const;

  const std::vector<std::string> prefixes_;
  const std::map<std::string, std::string> before_;
};

}  // namespace dscomm
