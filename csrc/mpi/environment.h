// The environment as Open MPI reads it: what a launcher or the user has said there, and what is put
// there while MPI starts.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "mpi/mca_files.h"

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
  // `files`: see parameters_of_mca_files(); it must outlive this.
  explicit EnvironmentForStart(const McaParameters& files);
  ~EnvironmentForStart();

  void set(const std::string& assignment);  // "NAME=VALUE"
  // Unless it is in the environment.
  void set_over_files(const std::string& assignment);
  // Unless it is in the environment, or an MCA parameter that a file sets.
  void set_default(const std::string& assignment);
  // Puts aside what a launcher further up has told this process about its place in another job.
  void put_launcher_aside();

 private:
  const McaParameters& files_;
  std::map<std::string, std::string> before_;  // of what belongs to MPI and its launchers
};

}  // namespace dscomm
