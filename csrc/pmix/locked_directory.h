// A directory below a shared one, such as /tmp, for the lifetime of the process that makes it.
//
// The process holds a lock on a file in the directory for its lifetime, and the kernel releases the
// lock however the process dies. So later processes recognise abandoned directories even where
// process ids mean nothing: in other containers and on other hosts that share the parent directory.
// The name, dscomm-pmix.<pid>.<start time>.<hexadecimal digits>, is for people.
#pragma once

#include <memory>
#include <string>

#include "core/base/owned.h"

namespace dscomm {

class LockedDirectory {
 public:
  // Null, with a sentence in *error, if it cannot be made.
  static std::unique_ptr<LockedDirectory> make(const std::string& parent, std::string* error);
  ~LockedDirectory();  // removes it with its contents

  const std::string& path() const { return path_; }

 private:
  LockedDirectory(std::string path, UniqueFd lock, UniqueFd directory)
      : path_(std::move(path)), lock_(std::move(lock)), directory_(std::move(directory)) {}
  std::string path_;
  UniqueFd lock_, directory_;
};

// Whether the path looks like a LockedDirectory's. lock_file_of(): the file that its owner locks.
bool is_own_directory(const std::string& path);
std::string lock_file_of(const std::string& path);
// Ignores errors: the next helper removes what remains.
void remove_tree(const std::string& path);

// Removes directories of this user's dead processes from `parent`.
void remove_abandoned_directories(const std::string& parent);
// Removes this directory, if it is this user's and its process is dead.
void remove_if_abandoned(const std::string& path);

}  // namespace dscomm
