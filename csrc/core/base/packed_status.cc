#include "core/base/packed_status.h"

namespace dscomm {

void pack_status(Packer& packer, const Status& status) {
  packer.number(static_cast<uint64_t>(status.code())).text(status.message());
}

bool unpack_status(Unpacker& unpacker, Status* status) {
  const uint64_t code = unpacker.number();
  const std::string text = unpacker.text();
  if (code > static_cast<uint64_t>(Code::kInternal)) return false;
  *status = code == 0 ? Status() : Status(static_cast<Code>(code), text);
  return true;
}

}  // namespace dscomm
