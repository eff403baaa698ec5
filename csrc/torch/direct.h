// Direct calls: functions of the extension that take Python objects, without torch.distributed's
// layers and without pybind11, whose argument conversion takes longer than a small all-reduce.
#pragma once

#include <pybind11/pybind11.h>

namespace dscomm {

void add_direct_calls(pybind11::module_& module);

}  // namespace dscomm
