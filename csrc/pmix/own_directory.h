// A directory below one that all share, such as /tmp, which goes with the process that made it.
//
// The process holds a lock on a file in it for as long as it lives, and the kernel lets go of that
// when it dies, however it dies. So whoever comes later can tell what has been left behind, also
// where process numbers mean nothing: in other containers and on other hosts that share the
// directory. The name, dscomm-pmix.<pid>.<start time>.<hexadecimal digits>, is for people.
#pragma once

#include <memory>
#include <string>

#include "core/base/owned.h"

namespace dscomm {

class OwnDirectory {
 public:
  // Null, and a sentence that says why, when it cannot be made.
  static std::unique_ptr<OwnDirectory> make(const std::string& parent, std::string* error);
  ~OwnDirectory();  // removes it with all that is in it

  const std::string& path() const { return path_; }

 private:
  OwnDirectory(std::string path, UniqueFd lock, UniqueFd directory)
      : path_(std::move(path)), lock_(std::move(lock)), directory_(std::move(directory)) {}
  std::string path_;
  UniqueFd lock_, directory_;
};

// Whether a path has the name of one, and the file whose lock its process holds.
bool is_own_directory(const std::string& path);
std::string lock_file_of(const std::string& path);
// Ignores errors: the next helper removes what is left.
void remove_tree(const std::string& path);

// Removes what dead processes of this user have left in `parent`.
void remove_abandoned_directories(const std::string& parent);
// The same with one of them.
void remove_if_abandoned(const std::string& path);

}  // namespace dscomm
