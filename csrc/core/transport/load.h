// Loads the module that carries groups between hosts. There is one for each MPI library that dscomm
// was built with; DSCOMM_MPI selects it.
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
