#include "core/transport/load.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "core/base/format.h"
#include "core/base/settings.h"
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

// A transport, and the text beside its module; see load.h.
struct Choice {
  std::string name, path;  // of the module and the text, without suffix
  std::string title = name, to_build = name, to_run = name, libraries = "";

  bool has(const char* suffix) const { return access((path + suffix).c_str(), F_OK) == 0; }
  bool is_built() const { return has(".so"); }
  bool is_loaded() const {
    std::istringstream words(libraries);
    for (std::string library; words >> library;)
      if (void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_NOLOAD); handle != nullptr)
        return dlclose(handle) == 0;
    return false;
  }
};

// The transports that DSCOMM_MPI allows, in the order in which auto tries them, plus `wanted`.
std::vector<Choice> choices_in(const std::string& folder, const std::string& wanted) {
  std::vector<Choice> choices;
  std::string names;
  for (const SettingRow& row : setting_rows())
    if (row.name == "DSCOMM_MPI") names = row.allowed;
  if (("|" + names + "|").find("|" + wanted + "|") == std::string::npos) names += "|" + wanted;
  std::istringstream words(names.substr(names.find('|') + 1));  // leaves out auto
  for (std::string name; std::getline(words, name, '|');) {
    Choice& choice = choices.emplace_back(Choice{name, folder + "/libdscomm_" + name});
    std::ifstream text(choice.path + ".txt");
    std::map<std::string, std::string*> fields = {{"title", &choice.title},
                                                  {"library", &choice.libraries},
                                                  {"to_build", &choice.to_build},
                                                  {"to_run", &choice.to_run}};
    for (std::string key, value;
         std::getline(text, key, ':') && std::getline(text >> std::ws, value);)
      if (fields.contains(key)) *fields[key] = value;
  }
  return choices;
}

// The modules' folder: that of this code or, in a wheel for several torch versions, its parent.
std::string module_folder(const std::string& wanted) {
  const std::string own = own_folder(), above = own + "/..";
  auto has_one = [&](const std::string& folder) {
    return std::ranges::any_of(choices_in(folder, wanted), [](const Choice& choice) {
      return choice.is_built() || choice.has(".txt");
    });
  };
  return !has_one(own) && has_one(above) ? above : own;
}

Status unsupported(const std::string& reason) {
  return Status(Code::kUnsupported, "the group spans hosts, which needs " + reason);
}

// Null if the module cannot be loaded; `reason` then says why.
void* load_module(const Choice& choice, Status* reason) {
  // RTLD_GLOBAL: plugins of Open MPI look for symbols of Open MPI in the global scope.
  void* module = dlopen((choice.path + ".so").c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (module != nullptr) return module;
  const char* words = dlerror();
  *reason =
      unsupported(format_text("{}, and it cannot be loaded ({}): install it ({})", choice.title,
                              words == nullptr ? "no reason given" : words, choice.to_run));
  return nullptr;
}

// The transports to try, in order.
Result<std::vector<Choice>> choose(const std::string& folder, const std::string& wanted) {
  const std::vector<Choice> all = choices_in(folder, wanted);
  const bool has_rivals = std::ranges::any_of(all, [&](const Choice& choice) {
    return choice.name == wanted && !choice.libraries.empty();
  });
  std::vector<Choice> chosen;
  for (const Choice& choice : all) {
    if (has_rivals && choice.name != wanted && choice.is_loaded())
      return unsupported(
          format_text("an MPI library: DSCOMM_MPI={} is set, but the program has loaded {}; set "
                      "DSCOMM_MPI={} or auto",
                      wanted, choice.title, choice.name));
    if (wanted == "auto" && choice.is_loaded()) return std::vector<Choice>{choice};
    if (wanted == choice.name || (wanted == "auto" && choice.is_built())) chosen.push_back(choice);
  }
  if (chosen.empty()) chosen.push_back(all.front());
  return chosen;
}

Result<const TransportModule*> load_any(const std::string& folder, const std::string& wanted) {
  DSCOMM_ASSIGN_OR_RETURN(const std::vector<Choice> chosen, choose(folder, wanted));
  Status first;
  for (const Choice& choice : chosen) {
    if (!choice.is_built())
      return unsupported(format_text(
          "{}, and this dscomm was built without it: install {} and install deepspeed_comm again",
          choice.title, choice.to_build));
    Status reason;
    void* loaded = load_module(choice, &reason);
    if (first.ok()) first = reason;
    if (loaded == nullptr) continue;
    const auto* module = static_cast<const TransportModule*>(dlsym(loaded, kTransportSymbol));
    if (module != nullptr && std::strcmp(module->version, kTransportVersion) == 0) return module;
    return Status(Code::kUnsupported,
                  choice.path + ".so is of another build; install deepspeed_comm again");
  }
  return first;
}

}  // namespace

Result<std::shared_ptr<Transport>> load_transport(const TransportRequest& request,
                                                  std::shared_ptr<Store> store,
                                                  const Deadline& deadline) {
  static std::mutex mutex;
  static auto& modules = *new std::map<std::string, const TransportModule*>;  // by DSCOMM_MPI
  const TransportModule* module = nullptr;
  const std::string folder = module_folder(request.settings.mpi);
  {
    std::lock_guard lock(mutex);
    const TransportModule*& known = modules[request.settings.mpi];
    if (known == nullptr) {
      Result<const TransportModule*> loaded = load_any(folder, request.settings.mpi);
      if (!loaded.ok()) {
        // Declines, because members that have loaded their module would wait for this one.
        const Status cause(loaded.status().code(), name_member(request.members, request.rank) +
                                                       ": " + loaded.status().message());
        decline_transport(request, *store, cause);
        return cause;
      }
      known = loaded.value();
    }
    module = known;
  }
  return module->make(request, std::move(store), deadline, folder);
}

}  // namespace dscomm
