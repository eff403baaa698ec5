// The direct calls: functions of the extension that take Python's own objects, without the layers
// of torch.distributed and without pybind11, which takes longer to convert the arguments of a call
// than a small all-reduce takes.
#pragma once

#include <pybind11/pybind11.h>

namespace dscomm {

void add_direct_calls(pybind11::module_& module);

}  // namespace dscomm
