// Encodes a Status for another process.
#pragma once

#include "core/base/packer.h"
#include "core/base/status.h"

namespace dscomm {

void pack_status(Packer& packer, const Status& status);

// False if the next fields of `unpacker` are not a Status; `status` is then unchanged.
bool unpack_status(Unpacker& unpacker, Status* status);

}  // namespace dscomm
