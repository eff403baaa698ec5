// What the module gives to whoever loads it; see core/transport/load.h.
#include "core/transport/load.h"
#include "mpi/mpi_transport.h"

extern "C" __attribute__((visibility("default")))
const dscomm::TransportModule dscomm_transport_module = {dscomm::kTransportVersion,
                                                         &dscomm::MpiTransport::make};
