#include "torch/direct.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "torch/backend.h"

namespace py = pybind11;

namespace dscomm {
namespace {

using WeakBackend = c10::weak_intrusive_ptr<DscommBackend>;

// What follows is guarded by the GIL. Nothing here keeps a group alive.

// A group and its backend. An address may be another group's by now, which the weak reference
// tells.
struct KnownGroup {
  py::object reference;
  WeakBackend backend;
};
// One of deepspeed_comm's or torch's operations, each of which is one object, and what torch calls
// it.
struct KnownOp {
  py::object object;
  c10d::ReduceOp op;
};
// Never destroyed: Python is gone when static destructors run.
auto& known_groups = *new std::unordered_map<PyObject*, KnownGroup>;
auto& known_ops = *new std::deque<KnownOp>;  // calls without the GIL hold what is in it

bool refers_to(PyObject* reference, PyObject* object) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* found = nullptr;
  if (PyWeakref_GetRef(reference, &found) < 0) PyErr_Clear();
  Py_XDECREF(found);  // it is `object`, which the caller holds, or of no more use
  return found == object;
#else
  return PyWeakref_GET_OBJECT(reference) == object;
#endif
}

// The callback of a group's reference.
PyObject* forget_group(PyObject*, PyObject* reference) {
  for (auto each = known_groups.begin(); each != known_groups.end(); ++each)
    if (each->second.reference.ptr() == reference) {
      const auto node = known_groups.extract(each);  // goes when the map is in order again
      break;
    }
  Py_RETURN_NONE;
}

py::object make_reference(const py::handle& group, PyMethodDef* callback) {
  py::object function;
  if (callback != nullptr)
    function = py::reinterpret_steal<py::object>(PyCFunction_New(callback, nullptr));
  PyObject* reference = PyWeakref_NewRef(group.ptr(), function.ptr());
  if (reference == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(reference);
}

void remember_group(const py::object& group, const c10::intrusive_ptr<DscommBackend>& backend) {
  static PyMethodDef callback = {"forget_group", &forget_group, METH_O, nullptr};
  KnownGroup known{make_reference(group, &callback), WeakBackend(backend)};
  known_groups.insert_or_assign(group.ptr(), std::move(known));
}

void remember_op(const py::object& op, const c10d::ReduceOp& torch_op) {
  if (op.ptr() == Py_None) throw py::type_error("dscomm: op: got None");
  known_ops.push_back({op, torch_op});
}

const c10d::ReduceOp* find_op(PyObject* op) {
  for (const KnownOp& known : known_ops)
    if (known.object.ptr() == op) return &known.op;
  return nullptr;
}

// Null where the group is not known, or gone.
c10::intrusive_ptr<DscommBackend> find_backend(PyObject* group) {
  const auto found = known_groups.find(group);
  if (found == known_groups.end() || !refers_to(found->second.reference.ptr(), group)) return {};
  return found->second.backend.lock();
}

// What torch's dispatcher would ask of a dense CPU tensor, and find nothing to do for; the negative
// and the conjugate bit are read by the backend itself. Any other key means that the tensor is not
// its memory: a wrapper of torch.func, a zero tensor, a sparse or a quantised one.
constexpr c10::DispatchKeySet kPlainKeys({c10::DispatchKey::CPU, c10::DispatchKey::AutogradCPU,
                                          c10::DispatchKey::AutocastCPU,
                                          c10::DispatchKey::ADInplaceOrView,
                                          c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});

// Whether somebody is to see this thread's calls of torch: a TorchDispatchMode, a transform of
// torch.func, a tracer (all of these include a key in the dispatch of every operator), or a
// TorchFunctionMode.
bool calls_are_seen() {
  const c10::DispatchKeySet included = c10::impl::tls_local_dispatch_key_set().included_;
  return !c10::default_included_set.has_all(included) ||
         at::impl::PythonTorchFunctionTLS::stack_len() > 0;
}

// The tensor if a call may go past torch's dispatcher with it, else null: it is no more than CPU
// memory (a subclass may mean something else by it), and nobody is to see the call.
const at::Tensor* plain_tensor(PyObject* object) {
  if (!THPVariable_CheckExact(object)) return nullptr;
  const at::Tensor& tensor = THPVariable_Unpack(object);
  const c10::DispatchKeySet keys = tensor.key_set();
  if (!keys.has_all(c10::DispatchKeySet(c10::DispatchKey::CPU)) || !kPlainKeys.has_all(keys))
    return nullptr;
  return calls_are_seen() ? nullptr : &tensor;
}

// Calls without the GIL, for others may need it to come to the call that is waited for. The result
// is a Work, None for a null one, or null with a Python exception set.
//
// The tensor is held by the caller's Python object alone, and torch keeps that alive for as long as
// C++ holds the tensor too: the first to do so, and the last to let go, takes the GIL. So that is
// done here, where it is at hand.
template <typename Call>
PyObject* call_without_gil(const at::Tensor& tensor, Call call) {
  const at::Tensor held = tensor;
  struct WithoutGil {
    PyThreadState* state = PyEval_SaveThread();
    ~WithoutGil() { PyEval_RestoreThread(state); }
  };
  try {
    c10::intrusive_ptr<c10d::Work> work;
    {
      const WithoutGil without_gil;
      work = call(held);
    }
    if (!work) Py_RETURN_NONE;
    return py::cast(std::move(work)).release().ptr();
  } catch (const std::exception&) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

bool has_four(const char* call, Py_ssize_t count) {
  if (count == 4) return true;
  PyErr_Format(PyExc_TypeError,
               "%s(): expected tensor, op, group and async_op by position, got %zd arguments", call,
               count);
  return false;
}

// -1 where an exception is set.
int truth(PyObject* object) {
  if (object == Py_False) return 0;
  return object == Py_True ? 1 : PyObject_IsTrue(object);
}

PyObject* direct_all_reduce(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (!has_four("direct_all_reduce", count)) return nullptr;
  const at::Tensor* tensor = plain_tensor(arguments[0]);
  const c10d::ReduceOp* op = find_op(arguments[1]);
  if (tensor == nullptr || op == nullptr) Py_RETURN_NOTIMPLEMENTED;
  const c10::intrusive_ptr<DscommBackend> backend = find_backend(arguments[2]);
  if (!backend) Py_RETURN_NOTIMPLEMENTED;
  const int asynchronous = truth(arguments[3]);
  if (asynchronous < 0) return nullptr;
  return call_without_gil(*tensor, [&](const at::Tensor& held) {
    return backend->all_reduce(held, *op, asynchronous != 0);
  });
}

// A call of all_reduce_caching(), which is repeated: what it was the first time.
struct Repeated {
  std::shared_ptr<const DscommBackend::AllReducePlan> plan;
  py::object op, group_reference;
  WeakBackend backend;
  std::vector<int64_t> sizes;
  at::ScalarType type;

  bool fits(const at::Tensor& tensor, PyObject* other_op, PyObject* group) const {
    return other_op == op.ptr() && tensor.scalar_type() == type && tensor.sizes() == sizes &&
           refers_to(group_reference.ptr(), group);
  }
};

PyObject* repeat_all_reduce(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (!has_four("repeat", count)) return nullptr;
  const auto* repeated = static_cast<const Repeated*>(PyCapsule_GetPointer(self, nullptr));
  const at::Tensor* tensor = plain_tensor(arguments[0]);
  if (tensor == nullptr || !repeated->fits(*tensor, arguments[1], arguments[2]))
    Py_RETURN_NOTIMPLEMENTED;
  const c10::intrusive_ptr<DscommBackend> backend = repeated->backend.lock();
  if (!backend) Py_RETURN_NOTIMPLEMENTED;
  const int asynchronous = truth(arguments[3]);
  if (asynchronous < 0) return nullptr;
  return call_without_gil(*tensor, [&, plan = repeated->plan](const at::Tensor& held) mutable {
    return backend->all_reduce_caching(held, std::move(plan), asynchronous != 0);
  });
}

template <typename Function>
PyCFunction as_method(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

py::object repeated_all_reduce(const at::Tensor& tensor, const py::object& op,
                               const c10d::ReduceOp& torch_op, const py::object& group,
                               const c10::intrusive_ptr<DscommBackend>& backend,
                               const std::string& match_id) {
  static PyMethodDef method = {"repeat", as_method(&repeat_all_reduce), METH_FASTCALL, nullptr};
  auto repeated = std::make_unique<Repeated>(
      Repeated{std::make_shared<const DscommBackend::AllReducePlan>(match_id, torch_op), op,
               make_reference(group, nullptr), WeakBackend(backend), tensor.sizes().vec(),
               tensor.scalar_type()});
  PyObject* capsule = PyCapsule_New(repeated.get(), nullptr, [](PyObject* self) {
    delete static_cast<Repeated*>(PyCapsule_GetPointer(self, nullptr));
  });
  if (capsule == nullptr) throw py::error_already_set();
  static_cast<void>(repeated.release());
  const auto owner = py::reinterpret_steal<py::object>(capsule);
  return py::reinterpret_steal<py::object>(PyCFunction_New(&method, capsule));
}

}  // namespace

void add_direct_calls(py::module_& module) {
  static PyMethodDef methods[] = {
      {"direct_all_reduce", as_method(&direct_all_reduce), METH_FASTCALL,
       "direct_all_reduce(tensor, op, group, async_op, /)\n\n"
       "all_reduce() of the backend of a group that remember_group() was told of, by an op that "
       "remember_op() was told of. NotImplemented, and nothing is done, where the group or the op "
       "is another one, or is_plain(tensor) is false."},
      {nullptr, nullptr, 0, nullptr}};
  if (PyModule_AddFunctions(module.ptr(), methods) != 0) throw py::error_already_set();
  module.def(
      "is_plain", [](const py::handle& tensor) { return plain_tensor(tensor.ptr()) != nullptr; },
      py::arg("tensor"),
      "Whether a call may go past torch's dispatcher with it: it is no more than CPU memory, and "
      "no "
      "mode, transform or tracer is to see the call.");
  module.def("remember_group", &remember_group, py::arg("group"), py::arg("backend"),
             "For direct_all_reduce(): the backend that the group uses, until the group is gone.");
  module.def("remember_op", &remember_op, py::arg("op"), py::arg("torch_op"),
             "For direct_all_reduce(): an object that stands for torch's operation.");
  module.def("repeated_all_reduce", &repeated_all_reduce, py::arg("tensor"), py::arg("op"),
             py::arg("torch_op"), py::arg("group"), py::arg("backend"), py::arg("match_id"),
             "A function (tensor, op, group, async_op), by position: all_reduce_caching() of the "
             "backend where they are those given here (of the tensor its shape and dtype), else "
             "NotImplemented.");
}

}  // namespace dscomm
