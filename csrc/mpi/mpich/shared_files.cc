#include "mpi/mpich/shared_files.h"

#include <unistd.h>

#include <fstream>
#include <set>
#include <string>

namespace dscomm {
namespace {

constexpr const char* kNames = "/dev/shm/mpich_shm_";

}  // namespace

void remove_names_of_shared_files() {
  std::set<std::string> mapped;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);)
    if (const size_t begin = line.find(kNames); begin != std::string::npos)
      mapped.insert(line.substr(begin, line.find(' ', begin) - begin));
  for (const std::string& file : mapped) ::unlink(file.c_str());
}

}  // namespace dscomm
