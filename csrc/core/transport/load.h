// Loads the module that carries groups between hosts: libdscomm_NAME.so for the transport NAME.
// libdscomm_NAME.txt is beside it, even if the module was not built, with these lines:
//
//   title: the transport's name in errors
//   library: the sonames of its MPI library, separated by spaces; a process can load only one MPI
//   to_build, to_run: the packages to install for building and for loading the module
//
// DSCOMM_MPI selects the transport by its name.
#pragma once

#include <memory>

#include "core/transport/transport.h"

namespace dscomm {

// A TransportFactory: loads a module, once per process, from the folder of this library or its
// parent, and lets the module make the transport. Thread-safe. kUnsupported, with what to install,
// if there is no module or something that it needs is missing.
Result<std::shared_ptr<Transport>> load_transport(const TransportRequest& request,
                                                  std::shared_ptr<Store> store,
                                                  const Deadline& deadline);

// A module exports this as kTransportSymbol. A module with another kTransportVersion is refused.
struct TransportModule {
  const char* version;
  Result<std::shared_ptr<Transport>> (*make)(const TransportRequest& request,
                                             std::shared_ptr<Store> store, const Deadline& deadline,
                                             const std::string& folder);
};
inline constexpr const char* kTransportSymbol = "dscomm_transport_module";
inline constexpr const char* kTransportVersion = "2";

}  // namespace dscomm
