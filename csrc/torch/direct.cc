#include "torch/direct.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <climits>
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

// The GIL guards the two tables below. They keep no group alive.

// A group and its backend. `reference`, a weak one, shows whether the group still exists.
struct KnownGroup {
  py::object reference;
  WeakBackend backend;
  // For messages, whose callers pass global ranks: rank in the group by global rank (-1: not a
  // member), and the reverse. Empty until Python calls remember_ranks().
  std::vector<int> group_ranks, global_ranks;
};
// An operation object of deepspeed_comm, torch or DeepSpeed, found by its address, and torch's op.
struct KnownOp {
  py::object object;
  c10d::ReduceOp op;
};
// Never destroyed: Python is gone when static destructors run.
auto& known_groups = *new std::unordered_map<PyObject*, KnownGroup>;
auto& known_ops = *new std::deque<KnownOp>;  // a deque, so that references stay valid

bool refers_to(PyObject* reference, PyObject* object) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* found = nullptr;
  if (PyWeakref_GetRef(reference, &found) < 0) PyErr_Clear();
  Py_XDECREF(found);  // it is `object`, which the caller holds, or another object, which is not
                      // needed
  return found == object;
#else
  return PyWeakref_GET_OBJECT(reference) == object;
#endif
}

// Callback of a group's weak reference.
PyObject* forget_group(PyObject*, PyObject* reference) {
  for (auto each = known_groups.begin(); each != known_groups.end(); ++each)
    if (each->second.reference.ptr() == reference) {
      const auto node = known_groups.extract(each);  // destroyed when the map is consistent again
      break;
    }
  Py_RETURN_NONE;
}

// Null if the group is unknown or gone.
const KnownGroup* find_group(PyObject* group) {
  const auto found = known_groups.find(group);
  if (found == known_groups.end() || !refers_to(found->second.reference.ptr(), group))
    return nullptr;
  return &found->second;
}

void remember_direct_group(const py::object& group,
                           const c10::intrusive_ptr<DscommBackend>& backend) {
  static PyMethodDef callback = {"forget_group", &forget_group, METH_O, nullptr};
  const KnownGroup* current = find_group(group.ptr());
  if (current != nullptr && current->backend.lock() == backend) return;
  const auto forget = py::reinterpret_steal<py::object>(PyCFunction_New(&callback, nullptr));
  KnownGroup known{py::weakref(group, forget), WeakBackend(backend), {}, {}};
  known_groups.insert_or_assign(group.ptr(), std::move(known));
}

// ranks: the rank in the group, by global rank.
void remember_ranks(const py::object& group, const std::unordered_map<int, int>& ranks) {
  const auto found = known_groups.find(group.ptr());
  if (found == known_groups.end()) throw py::value_error("dscomm: remember_group() comes first");
  std::vector<int> group_ranks, global_ranks(ranks.size(), -1);
  for (const auto& [global_rank, rank] : ranks) {
    if (global_rank < 0 || rank < 0 || static_cast<size_t>(rank) >= ranks.size())
      raise_value_error("ranks: got {} of {} for global rank {}", rank, ranks.size(), global_rank);
    if (group_ranks.size() <= static_cast<size_t>(global_rank))
      group_ranks.resize(static_cast<size_t>(global_rank) + 1, -1);
    group_ranks[static_cast<size_t>(global_rank)] = rank;
    global_ranks[static_cast<size_t>(rank)] = global_rank;
  }
  found->second.group_ranks = std::move(group_ranks);
  found->second.global_ranks = std::move(global_ranks);
}

bool knows_ranks(const py::object& group) {
  const KnownGroup* known = find_group(group.ptr());
  return known != nullptr && !known->group_ranks.empty();
}

void remember_op(const py::object& op, const c10d::ReduceOp& torch_op) {
  if (op.ptr() == Py_None) throw py::type_error("dscomm: op: got None, expected an operator");
  known_ops.push_back({op, torch_op});
}

const c10d::ReduceOp* find_op(PyObject* op) {
  for (const KnownOp& known : known_ops)
    if (known.object.ptr() == op) return &known.op;
  return nullptr;
}

// Null if the group is unknown or gone.
c10::intrusive_ptr<DscommBackend> find_backend(PyObject* group) {
  const KnownGroup* known = find_group(group);
  return known == nullptr ? c10::intrusive_ptr<DscommBackend>() : known->backend.lock();
}

// The dispatch keys of a dense CPU tensor, for which torch's dispatcher has nothing to do; the
// backend itself handles the negative and conjugate bits. With any other key the tensor is more
// than its memory: a wrapper of torch.func, a zero, sparse or quantised tensor.
constexpr c10::DispatchKeySet kPlainKeys({c10::DispatchKey::CPU, c10::DispatchKey::AutogradCPU,
                                          c10::DispatchKey::AutocastCPU,
                                          c10::DispatchKey::ADInplaceOrView,
                                          c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});

// Whether something intercepts this thread's calls of torch: a TorchDispatchMode, a torch.func
// transform or a tracer (each adds a key to `included`), or a TorchFunctionMode.
bool calls_are_intercepted() {
  const c10::DispatchKeySet included = c10::impl::tls_local_dispatch_key_set().included_;
  return !c10::default_included_set.has_all(included) ||
         at::impl::PythonTorchFunctionTLS::stack_len() > 0;
}

// The tensor if a call may bypass torch's dispatcher, else null. It must be plain CPU memory, not
// of a subclass, which may redefine operations, and nothing may intercept the call.
const at::Tensor* plain_tensor(PyObject* object) {
  if (!THPVariable_CheckExact(object)) return nullptr;
  const at::Tensor& tensor = THPVariable_Unpack(object);
  const c10::DispatchKeySet keys = tensor.key_set();
  if (!keys.has_all(c10::DispatchKeySet(c10::DispatchKey::CPU)) || !kPlainKeys.has_all(keys))
    return nullptr;
  return calls_are_intercepted() ? nullptr : &tensor;
}

// Runs `call` without the GIL, which a peer in this process may need to make its call. Returns a
// Work, None for a null Work, or null with a Python exception set.
//
// Only Python holds the tensor so far. When C++ takes its first reference to it and when it drops
// its last one, torch takes the GIL. So this function does both while it holds the GIL anyway.
template <typename Call>
PyObject* call_without_gil(const at::Tensor& tensor, Call call) {
  const at::Tensor held = tensor;
  struct WithoutGil {  // unlike backend.cc's, needs no check: Python calls with the GIL held
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

bool has_four(const char* call, Py_ssize_t count,
              const char* expected = "tensor, op, group and async_op") {
  if (count == 4) return true;
  PyErr_Format(PyExc_TypeError, "%s(): expected %s by position, got %zd arguments", call, expected,
               count);
  return false;
}

PyObject* direct_all_reduce(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (!has_four("direct_all_reduce", count)) return nullptr;
  const at::Tensor* tensor = plain_tensor(arguments[0]);
  const c10d::ReduceOp* op = find_op(arguments[1]);
  if (tensor == nullptr || op == nullptr) Py_RETURN_NOTIMPLEMENTED;
  const c10::intrusive_ptr<DscommBackend> backend = find_backend(arguments[2]);
  if (!backend) Py_RETURN_NOTIMPLEMENTED;
  const int asynchronous = PyObject_IsTrue(arguments[3]);
  if (asynchronous < 0) return nullptr;
  return call_without_gil(*tensor, [&](const at::Tensor& held) {
    return backend->all_reduce(held, *op, asynchronous != 0);
  });
}

// A Python int from 0 to INT_MAX, else -1: the slow path, torch.distributed's, reports the mistake.
int non_negative_or_minus_one(PyObject* object) {
  if (!PyLong_CheckExact(object)) return -1;
  int overflow = 0;
  const long value = PyLong_AsLongAndOverflow(object, &overflow);
  return overflow != 0 || value < 0 || value > INT_MAX ? -1 : static_cast<int>(value);
}

// A blocking message, with the checks that both directions share.
struct Message {
  enum Direction { kSend, kReceive };

  // Returns false, without side effects, if the call has to take the slow path.
  bool parse(PyObject* const* arguments, Direction direction) {
    tensor = plain_tensor(arguments[0]);
    known = find_group(arguments[2]);
    tag = non_negative_or_minus_one(arguments[3]);
    if (tensor == nullptr || known == nullptr || known->group_ranks.empty() || tag < 0)
      return false;
    backend = known->backend.lock();
    if (!backend || !backend->may_block()) return false;
    // Complex tensors travel as pairs of real numbers, which the slow path makes; any other
    // tensor's memory must be exactly the message.
    if (tensor->is_complex() || !tensor->is_contiguous() || tensor->is_neg()) return false;
    if (direction == kReceive && arguments[1] == Py_None) return true;
    const int global_rank = non_negative_or_minus_one(arguments[1]);
    if (global_rank < 0 || static_cast<size_t>(global_rank) >= known->group_ranks.size())
      return false;
    peer = known->group_ranks[static_cast<size_t>(global_rank)];
    return peer >= 0 && peer != backend->getRank();
  }

  const at::Tensor* tensor = nullptr;
  const KnownGroup* known = nullptr;  // valid while the GIL is held
  c10::intrusive_ptr<DscommBackend> backend;
  int peer = -1;  // rank in the group; -1: any source
  int tag = 0;
};

PyObject* direct_send(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (!has_four("direct_send", count, "tensor, dst, group and tag")) return nullptr;
  Message message;
  if (!message.parse(arguments, Message::kSend)) Py_RETURN_NOTIMPLEMENTED;
  return call_without_gil(*message.tensor, [&](const at::Tensor& held) {
    message.backend->send_and_wait(held, message.peer, message.tag);
    return c10::intrusive_ptr<c10d::Work>();
  });
}

PyObject* direct_recv(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (!has_four("direct_recv", count, "tensor, src, group and tag")) return nullptr;
  Message message;
  if (!message.parse(arguments, Message::kReceive)) Py_RETURN_NOTIMPLEMENTED;
  // Returns the caller's own object if the caller named the source, else the source's global rank.
  // Copies the ranks now, because the group may be forgotten while the GIL is released.
  const std::vector<int> global_ranks =
      message.peer < 0 ? message.known->global_ranks : std::vector<int>();
  int source = -1;
  PyObject* done = call_without_gil(*message.tensor, [&](const at::Tensor& held) {
    source = message.backend->receive_and_wait(held, message.peer, message.tag);
    return c10::intrusive_ptr<c10d::Work>();
  });
  if (done == nullptr) return nullptr;
  Py_DECREF(done);  // it is None
  if (message.peer < 0) return PyLong_FromLong(global_ranks[static_cast<size_t>(source)]);
  Py_INCREF(arguments[1]);
  return arguments[1];
}

// A repeated call of all_reduce_caching(), with its arguments from the first time.
struct RepeatedAllReduce {
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
  const auto* repeated = static_cast<const RepeatedAllReduce*>(PyCapsule_GetPointer(self, nullptr));
  const at::Tensor* tensor = plain_tensor(arguments[0]);
  if (tensor == nullptr || !repeated->fits(*tensor, arguments[1], arguments[2]))
    Py_RETURN_NOTIMPLEMENTED;
  const c10::intrusive_ptr<DscommBackend> backend = repeated->backend.lock();
  if (!backend) Py_RETURN_NOTIMPLEMENTED;
  const int asynchronous = PyObject_IsTrue(arguments[3]);
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
  auto repeated = std::make_unique<RepeatedAllReduce>(RepeatedAllReduce{
      std::make_shared<const DscommBackend::AllReducePlan>(match_id, torch_op), op,
      py::weakref(group), WeakBackend(backend), tensor.sizes().vec(), tensor.scalar_type()});
  const py::capsule owner(repeated.get(),
                          [](void* self) { delete static_cast<RepeatedAllReduce*>(self); });
  static_cast<void>(repeated.release());
  return py::reinterpret_steal<py::object>(PyCFunction_New(&method, owner.ptr()));
}

}  // namespace

void add_direct_calls(py::module_& module) {
  static PyMethodDef methods[] = {
      {"direct_all_reduce", as_method(&direct_all_reduce), METH_FASTCALL,
       "direct_all_reduce(tensor, op, group, async_op, /)\n\n"
       "all_reduce() of the backend of a group that remember_group() was told of, by an op that "
       "remember_op() was told of. NotImplemented, and nothing is done, where the group or the op "
       "is another one, or is_plain(tensor) is false."},
      {"direct_send", as_method(&direct_send), METH_FASTCALL,
       "direct_send(tensor, dst, group, tag, /)\n\n"
       "A blocking send to a global rank in a group that remember_ranks() was told of. "
       "NotImplemented, and nothing is done, where something is not plain."},
      {"direct_recv", as_method(&direct_recv), METH_FASTCALL,
       "direct_recv(tensor, src, group, tag, /)\n\n"
       "The same for a receive, of any source where src is None; returns the source's global "
       "rank."},
      {nullptr, nullptr, 0, nullptr}};
  if (PyModule_AddFunctions(module.ptr(), methods) != 0) throw py::error_already_set();
  module.def(
      "is_plain", [](const py::handle& tensor) { return plain_tensor(tensor.ptr()) != nullptr; },
      py::arg("tensor"),
      "Whether a call with this tensor may bypass torch's dispatcher: the tensor is no more than "
      "CPU memory, and no mode, transform or tracer is to see the call.");
  module.def("remember_group", &remember_direct_group, py::arg("group"), py::arg("backend"),
             "For direct_all_reduce(): the backend that the group uses, until the group is gone.");
  module.def("remember_ranks", &remember_ranks, py::arg("group"), py::arg("ranks"),
             "For direct_send() and direct_recv(), after remember_group(): the rank in the group "
             "by global rank.");
  module.def("knows_ranks", &knows_ranks, py::arg("group"),
             "Whether remember_ranks() was told of the group.");
  module.def("remember_op", &remember_op, py::arg("op"), py::arg("torch_op"),
             "For direct_all_reduce(): an object that stands for torch's operation.");
  module.def("repeated_all_reduce", &repeated_all_reduce, py::arg("tensor"), py::arg("op"),
             py::arg("torch_op"), py::arg("group"), py::arg("backend"), py::arg("match_id"),
             "A function (tensor, op, group, async_op), by position: all_reduce_caching() of the "
             "backend where they are those given here (of the tensor its shape and dtype), else "
             "NotImplemented.");
}

}  // namespace dscomm
