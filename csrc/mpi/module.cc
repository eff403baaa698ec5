// The entry point of the module; see core/transport/load.h.
#include "core/transport/load.h"
#include "mpi/mpi_transport.h"

extern "C" __attribute__((visibility("default")))
const dscomm::TransportModule dscomm_transport_module = {dscomm::kTransportVersion,
                                                         &dscomm::MpiTransport::make};
