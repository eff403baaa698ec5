// The Python module deepspeed_comm._C.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/utils/pybind.h>

#include <cmath>

#include "core/base/settings.h"
#include "core/reduce/reduce.h"
#include "torch/backend.h"
#include "torch/direct.h"
#include "torch/exit.h"
#include "torch/pool_allocator.h"

#ifndef TORCH_EXTENSION_NAME
#define TORCH_EXTENSION_NAME _C
#endif

namespace py = pybind11;

namespace dscomm {
namespace {

// torch calls this for each process group of this backend.
c10::intrusive_ptr<DscommBackend> create_backend(const c10d::DistributedBackendOptions& options,
                                                 const py::object& pg_options) {
  // A group with one backend per device passes options made for another backend, too. Nothing of
  // the options is used: the group's timeout comes from torch's argument `timeout`.
  if (!pg_options.is_none() && !py::isinstance<BackendBase::Options>(pg_options))
    throw py::type_error("dscomm: pg_options: got " +
                         py::str(py::type::of(pg_options)).cast<std::string>() +
                         ", expected None or an Options object of a c10d backend");
  GroupOptions group;
  group.name = options.group_id;
  group.rank = options.group_rank;
  group.size = options.group_size;
  group.global_ranks.assign(options.global_ranks_in_group.begin(),
                            options.global_ranks_in_group.end());
  group.timeout = std::chrono::milliseconds(std::llround(double{options.timeout.count()} * 1000));
  if (py::isinstance<DscommBackend::Options>(pg_options) &&
      pg_options.cast<c10::intrusive_ptr<DscommBackend::Options>>()->timeout != group.timeout &&
      PyErr_WarnEx(PyExc_UserWarning,
                   "dscomm: pg_options: its timeout is not used; pass timeout= to "
                   "init_process_group() or new_group()",
                   1) != 0)
    throw py::error_already_set();
  auto store = options.store;
  py::gil_scoped_release without_gil;
  return DscommBackend::create(std::move(store), std::move(group));
}

py::list settings() {
  py::list rows;
  for (const SettingRow& row : setting_rows()) {
    rows.append(py::dict(py::arg("name") = row.name, py::arg("default") = row.default_value,
                         py::arg("allowed") = row.allowed, py::arg("unit") = row.unit,
                         py::arg("meaning") = row.meaning));
  }
  return rows;
}

// torch's operations are a RedOpType, or a ReduceOp if they have a factor. pybind11 alone would
// convert a RedOpType to a ReduceOp through a call into Python.
c10d::ReduceOp to_torch_op(const py::handle& op) {
  if (py::isinstance<c10d::ReduceOp::RedOpType>(op)) return op.cast<c10d::ReduceOp::RedOpType>();
  return op.cast<c10d::ReduceOp>();
}

c10::intrusive_ptr<c10d::Work> all_reduce(DscommBackend& backend, const at::Tensor& tensor,
                                          const py::object& op, bool async_op) {
  const c10d::ReduceOp torch_op = to_torch_op(op);
  py::gil_scoped_release without_gil;
  return backend.all_reduce(tensor, torch_op, async_op);
}

c10::intrusive_ptr<c10d::Work> all_reduce_caching(DscommBackend& backend, const at::Tensor& tensor,
                                                  const py::object& op, const std::string& match_id,
                                                  bool async_op) {
  auto plan = std::make_shared<const DscommBackend::AllReducePlan>(match_id, to_torch_op(op));
  py::gil_scoped_release without_gil;
  return backend.all_reduce_caching(tensor, std::move(plan), async_op);
}

py::object with_match_id(const DscommBackend& backend, const std::string& match_id,
                         const py::function& call) {
  const DscommBackend::WithMatchId named(backend, match_id);
  return call();
}

at::Tensor empty(const std::vector<int64_t>& size, const py::object& dtype) {
  if (!THPDtype_Check(dtype.ptr()))
    throw py::type_error("dtype: got " + py::str(py::type::of(dtype)).cast<std::string>() +
                         ", expected a torch.dtype");
  const at::ScalarType type = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
  py::gil_scoped_release without_gil;  // reserving the memory may block in the kernel
  return empty_in_pool(size, type);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::module_::import("torch.distributed");  // declares the base classes

  // Runs when the interpreter clears its modules.
  module.attr("_at_end") = py::capsule([] {
    const py::gil_scoped_release without_gil;
    leave_groups();
  });

  module.attr("torch_version") = TORCH_VERSION;
  module.def("create_backend", &create_backend, py::arg("distributed_backend_options"),
             py::arg("pg_options") = py::none());
  module.def("end_calls", &end_calls, py::call_guard<py::gil_scoped_release>(),
             py::arg("exception"), "When the process ends; see csrc/torch/exit.h.");
  module.def("end_child", &end_child, py::call_guard<py::gil_scoped_release>(),
             py::arg("exception"), py::arg("is_alone"),
             "When a child of multiprocessing ends; see csrc/torch/exit.h.");
  module.def("settings", &settings, "The table of DSCOMM_* settings: a dict for each.");
  module.def("reduce_target", &reduce_target_name,
             "The instruction set that reductions run on here.");

  module.def("empty", &empty, py::arg("size"), py::arg("dtype"),
             "An uninitialized tensor that peers of this host can read where it is.");
  module.def("is_in_pool", &is_in_pool, py::arg("tensor"),
             "Whether peers of this host can read the tensor where it is.");

  using Options = DscommBackend::Options;
  py::class_<DscommBackend, BackendBase, c10::intrusive_ptr<DscommBackend>> backend(
      module, "DscommBackend");
  py::class_<Options, BackendBase::Options, c10::intrusive_ptr<Options>>(backend, "Options")
      .def(py::init([](std::chrono::milliseconds timeout) {
             return c10::make_intrusive<Options>(timeout);
           }),
           py::arg("timeout") = std::chrono::milliseconds(30 * 60 * 1000))
      // split_group changes a copy of the parent's options.
      .def("__deepcopy__",
           [](const Options& self, const py::dict&) { return c10::make_intrusive<Options>(self); });
  backend.def_property_readonly("options", &DscommBackend::getBackendOptions)
      .def("describe", &DscommBackend::describe, "Which team carries the group, in one line.")
      .def("all_reduce", &all_reduce, py::arg("tensor"), py::arg("op"), py::arg("async_op"),
           "What torch.distributed.all_reduce() does, without its layers.")
      .def("all_reduce_caching", &all_reduce_caching, py::arg("tensor"), py::arg("op"),
           py::arg("match_id"), py::arg("async_op"),
           "The same for a call that is made again and again under one match_id.")
      .def("with_match_id", &with_match_id, py::arg("match_id"), py::arg("call"),
           "call(), in which all-reduces of torch.distributed over this backend are "
           "all_reduce_caching() under the match_id.")
      .def("_set_default_timeout", &DscommBackend::setTimeout, py::arg("timeout"),
           py::call_guard<py::gil_scoped_release>(),
           "Sets the group's timeout, as torch's own backends do.")
      .def("flight_record", &DscommBackend::flight_record,
           "The last operations of the group, oldest first, as JSON.");
#if DSCOMM_TORCH_2
  backend.def(
      "get_error", &DscommBackend::getError,
      "The ErrorType of what ended the group: TIMEOUT, REMOTE_ERROR for a rank that died or "
      "left, COMM_ERROR for anything else; SUCCESS while it lives.");
#endif
  add_direct_calls(module);
}

}  // namespace
}  // namespace dscomm
