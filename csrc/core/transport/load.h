// Finds and loads the module that carries groups between hosts. There is one for each MPI library
// that dscomm was built with: the setting DSCOMM_MPI says which one it shall be.
#pragma once

#include <memory>

#include "core/transport/transport.h"

namespace dscomm {

// A TransportFactory: loads a module that lies beside the code that calls this, or in the folder
// above, once, and lets it make the transport. kUnsupported when there is none or what it needs is
// missing, with what to install.
Result<std::shared_ptr<Transport>> load_transport(const TransportRequest& request,
                                                  std::shared_ptr<Store> store,
                                                  const Deadline& deadline);

// What the module exports under the name below. Both sides are built from one source at one time;
// the version is compared all the same.
struct TransportModule {
  const char* version;
  Result<std::shared_ptr<Transport>> (*make)(const TransportRequest& request,
                                             std::shared_ptr<Store> store, const Deadline& deadline,
                                             const std::string& folder);
};
inline constexpr const char* kTransportSymbol = "dscomm_transport_module";
inline constexpr const char* kTransportVersion = "2";

}  // namespace dscomm
