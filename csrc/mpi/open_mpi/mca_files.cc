#include "mpi/open_mpi/mca_files.h"

#include <dlfcn.h>
#include <mpi.h>
#include <sys/utsname.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "mpi/environment.h"

namespace dscomm {
namespace {

constexpr const char* kSiteFile = "openmpi-mca-params.conf";
constexpr const char* kOverrideFile = "openmpi-mca-params-override.conf";

std::string trimmed(const std::string& text) {
  constexpr const char* kBlanks = " \t\r";
  const size_t first = text.find_first_not_of(kBlanks);
  if (first == std::string::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlanks) - first + 1);
}

bool is_there(const std::filesystem::path& path) {
  std::error_code none;
  return std::filesystem::exists(path, none);
}

// The folder of the administrator's files for the Open MPI of this library; empty if none exists.
std::filesystem::path configuration_folder(const std::string& library) {
  if (std::string folder = environment_value("OPAL_SYSCONFDIR"); !folder.empty()) return folder;
  if (std::string prefix = environment_value("OPAL_PREFIX"); !prefix.empty())
    return std::filesystem::path(prefix) / "etc";
  std::error_code none;
  std::filesystem::path real = std::filesystem::weakly_canonical(library, none);
  std::vector<std::filesystem::path> folders;
  if (real.string().starts_with("/usr/") &&
      !real.string().starts_with("/usr/local/")) {  // Debian's folder, then Fedora's
    utsname system{};
    uname(&system);
    folders = {"/etc/openmpi", std::string("/etc/openmpi-") + system.machine};
  }
  // The library is in lib, lib/openmpi/lib or lib/x86_64-linux-gnu/openmpi/lib below the prefix.
  std::filesystem::path above = real.parent_path();
  for (int i = 0; i < 4; ++i) {
    above = above.parent_path();
    if (!above.has_relative_path()) break;  // the root
    folders.push_back(above / "etc");
    folders.push_back(above / "etc" / "openmpi");
  }
  for (const std::filesystem::path& folder : folders)
    if (is_there(folder / kSiteFile) || is_there(folder / kOverrideFile)) return folder;
  return {};
}

}  // namespace

McaParameters parse_mca_file(std::istream& file) {
  McaParameters parameters;
  for (std::string line; std::getline(file, line);) {
    const size_t equals = line.find('=');
    if (equals == std::string::npos || line.find('#') < equals || line.find("//") < equals)
      continue;
    const std::string name = trimmed(line.substr(0, equals));
    if (!name.empty()) parameters[name] = trimmed(line.substr(equals + 1));
  }
  return parameters;
}

std::vector<std::string> mca_file_names(const std::string& library) {
  const std::filesystem::path folder = configuration_folder(library);
  std::vector<std::string> names;
  if (!folder.empty()) names.push_back(folder / kOverrideFile);
  for (const char* setting : {"OMPI_MCA_mca_base_param_files", "OMPI_MCA_mca_param_files"}) {
    const std::string list = environment_value(setting);
    if (list.empty()) continue;
    if (list == "none") return {};
    // Debian's Open MPI separates names with commas; others use colons.
    for (size_t begin = 0, end = 0; begin < list.size(); begin = end + 1) {
      end = std::min(list.find_first_of(":,", begin), list.size());
      if (end > begin) names.push_back(list.substr(begin, end - begin));
    }
    return names;
  }
  if (std::string home = environment_value("HOME"); !home.empty())
    names.push_back(home + "/.openmpi/mca-params.conf");
  if (!folder.empty()) names.push_back(folder / kSiteFile);
  return names;
}

McaParameters parameters_of_mca_files() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&MPI_Init_thread), &info) == 0 || info.dli_fname == nullptr)
    return {};
  McaParameters found;
  for (const std::string& name : mca_file_names(info.dli_fname)) {
    std::ifstream file(name);
    found.merge(parse_mca_file(file));  // files read earlier have precedence
  }
  return found;
}

}  // namespace dscomm
