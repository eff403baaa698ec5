// Loads the module that carries groups between hosts. The transport NAME is libdscomm_NAME.so.
// Beside it, also if it was not built, libdscomm_NAME.txt has a line for each of:
//
//   title: its name in messages
//   library: those that it loads, separated by spaces, of which a process can have only one
//   to_build, to_run: what to install so that it is built, and so that it can be loaded
//
// DSCOMM_MPI selects the transport by its name.
#pragma once

#include <memory>

#include "core/transport/transport.h"

namespace dscomm {

// A TransportFactory: loads a module, once per process, from the folder of the calling code or the
// one above, and lets it make the transport. Any thread. kUnsupported, with what to install, if
// there is no module or something that it needs is missing.
Result<std::shared_ptr<Transport>> load_transport(const TransportRequest& request,
                                                  std::shared_ptr<Store> store,
                                                  const Deadline& deadline);

// What a module exports as kTransportSymbol. Both are built together, but the version is checked.
struct TransportModule {
  const char* version;
  Result<std::shared_ptr<Transport>> (*make)(const TransportRequest& request,
                                             std::shared_ptr<Store> store, const Deadline& deadline,
                                             const std::string& folder);
};
inline constexpr const char* kTransportSymbol = "dscomm_transport_module";
inline constexpr const char* kTransportVersion = "2";

}  // namespace dscomm
