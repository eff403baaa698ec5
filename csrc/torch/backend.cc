#include "torch/backend.h"

#include <Python.h>

#include <algorithm>

#include "core/base/format.h"
#include "core/engine/context.h"
#include "core/store/bounded_store.h"
#include "torch/exit.h"
#include "torch/pool_allocator.h"
#include "torch/store_adapter.h"

namespace dscomm {
namespace {

// Releases the GIL for its lifetime if this thread holds it: the thread for which this one waits
// may need it. A destructor of the backend may run with or without the GIL.
class WithoutGil {
 public:
  WithoutGil() : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// Holds the GIL for its lifetime, whether or not this thread held it before.
class WithGil {
 public:
  WithGil() : state_(PyGILState_Ensure()) {}
  ~WithGil() { PyGILState_Release(state_); }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  PyGILState_STATE state_;
};

// Returns a new reference to object.method(), or null, with no exception set, if the call fails.
PyObject* call_or_null(PyObject* object, const char* method) {
  PyObject* result = object == nullptr ? nullptr : PyObject_CallMethod(object, method, nullptr);
  if (result == nullptr && PyErr_Occurred()) PyErr_Clear();
  return result;
}

[[noreturn]] void raise_creation_error(const Status& status, const GroupOptions& options) {
  std::rethrow_exception(to_exception(
      status,
      format_text("making group '{}' (rank {} of {})", options.name, options.rank, options.size)));
}

}  // namespace

c10::intrusive_ptr<DscommBackend> DscommBackend::create(c10::intrusive_ptr<c10d::Store> store,
                                                        GroupOptions options) {
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size)
    raise_value_error("rank: got {} of {}, expected 0 to size - 1", options.rank, options.size);
  if (options.timeout.count() <= 0)
    raise_value_error("timeout: got {} ms, expected more than 0", options.timeout.count());
  Result<std::shared_ptr<Context>> context = Context::process();
  options.world = reinterpret_cast<uintptr_t>(root_of(store).get());
  auto bounded = std::make_shared<BoundedStore>(std::make_shared<StoreAdapter>(std::move(store)),
                                                Deadline::after(options.timeout));
  if (!context.ok()) {
    const WithoutGil without_gil;
    Group::decline(*bounded, options, context.status());
    raise_creation_error(context.status(), options);
  }
  const auto create_group = [&] {
    const WithoutGil without_gil;  // a store written in Python may be called from another thread
    return Group::create(context.value(), bounded, options);
  };
  Result<std::shared_ptr<Group>> group = create_group();
  if (!group.ok()) raise_creation_error(group.status(), options);
  remember_group(group.value());
  return c10::intrusive_ptr<DscommBackend>::make(group.value(), std::move(options));
}

DscommBackend::DscommBackend(std::shared_ptr<Group> group, GroupOptions options)
    : BackendBase(options.rank, options.size),
      group_(std::move(group)),
      options_(std::move(options)) {
  init();
}

// torch destroys a group by shutdown(). torch 1.13, and a program that simply ends, only drop the
// backend. A Work can outlive the backend, since it holds the Group.
DscommBackend::~DscommBackend() {
  if (coalescing_manager_ != nullptr && Py_IsInitialized()) {
    const WithGil with_gil;
    Py_CLEAR(coalescing_manager_);
  }
  WithoutGil without_gil;
  group_->shutdown_with_warning();
  group_.reset();
}

void DscommBackend::shutdown() {
  Status status;
  {
    WithoutGil without_gil;
    status = group_->shutdown();
  }
  // If this raises, the group has left, but torch still lists it and the groups that it would have
  // destroyed next. The user's next call of destroy_process_group() removes them.
  if (!status.ok())
    std::rethrow_exception(to_exception(status, format_text("leaving group '{}'", group_->name())));
}

void DscommBackend::abort() {
  WithoutGil without_gil;
  group_->abort(
      "its program called abort() on the process group (or torch's "
      "_abort_process_group()); see its output for the reason");
}

// Each member counts from its first collective, so there is no number to agree on.
void DscommBackend::setSequenceNumberForGroup() {}

uint64_t DscommBackend::getSequenceNumberForGroup() { return group_->sequence(); }

void DscommBackend::setTimeout(std::chrono::milliseconds timeout) {
  if (timeout.count() <= 0)
    raise_value_error("timeout: got {} ms, expected more than 0", timeout.count());
  group_->set_timeout(timeout);
}

c10::intrusive_ptr<BackendBase::Options> DscommBackend::getBackendOptions() {
  auto options = c10::make_intrusive<Options>(group_->timeout());
#if DSCOMM_TORCH_2
  options->group_name = options_.name;
  options->global_ranks_in_group.assign(options_.global_ranks.begin(), options_.global_ranks.end());
#endif
  return options;
}

#if DSCOMM_TORCH_2

c10::intrusive_ptr<c10d::Backend> DscommBackend::split(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& options) {
  for (int rank : ranks) check_rank(rank, "split", "ranks");
  auto position = std::find(ranks.begin(), ranks.end(), getRank());
  if (position == ranks.end()) return {};
  GroupOptions split_options;
  split_options.name = options ? options->group_name : options_.name + ":split";
  split_options.rank = static_cast<int>(position - ranks.begin());
  split_options.size = static_cast<int>(ranks.size());
  split_options.timeout = options ? options->timeout : group_->timeout();
  for (int rank : ranks)
    split_options.global_ranks.push_back(
        options_.global_ranks.empty() ? rank : options_.global_ranks[static_cast<size_t>(rank)]);
  // Backends of other devices use the new group's `store`, too, so dscomm's keys get a prefix.
  return create(c10::make_intrusive<c10d::PrefixStore>(kBackendName, store),
                std::move(split_options));
}

c10::intrusive_ptr<c10d::Backend> DscommBackend::merge(
    const c10::intrusive_ptr<c10d::Store>& store,
    const c10::intrusive_ptr<c10d::Backend::Options>& options, const int& rank, const int& size) {
  GroupOptions merged;
  merged.name = options ? options->group_name : options_.name + ":merge";
  merged.rank = rank;
  merged.size = size;
  merged.timeout = options ? options->timeout : group_->timeout();
  return create(c10::make_intrusive<c10d::PrefixStore>(kBackendName, store), std::move(merged));
}

c10d::ErrorType DscommBackend::getError() {
  switch (group_->failure().code()) {
    case Code::kOk:
      return c10d::ErrorType::SUCCESS;
    case Code::kTimeout:
      return c10d::ErrorType::TIMEOUT;
    case Code::kPeerDied:
    case Code::kPeerLeft:
      return c10d::ErrorType::REMOTE_ERROR;
    default:
      return c10d::ErrorType::COMM_ERROR;
  }
}

// A negative index is the CPU; a numbered device belongs to another backend.
bool DscommBackend::supportsTensorAlloc(c10::DeviceIndex device) { return device < 0; }

at::Tensor DscommBackend::allocateTensor(long size, at::TensorOptions options) {
  if (size < 0) raise_value_error("allocate_tensor: got size {}, expected 0 or more", size);
  if (!options.device().is_cpu())
    raise_value_error("allocate_tensor: got device {}, expected cpu", options.device().str());
  return empty_in_pool({size}, c10::typeMetaToScalarType(options.dtype()));
}

std::shared_ptr<c10::Allocator> DscommBackend::getMemAllocator() {
  return {pool_allocator(), [](c10::Allocator*) {}};  // never destroyed
}

void DscommBackend::startCoalescing() {
  std::thread::id nobody;
  end_abandoned_coalescing();
  if (!coalescing_thread_.compare_exchange_strong(nobody, std::this_thread::get_id()))
    raise_value_error(
        "startCoalescing: calls of group '{}' are being coalesced already; end that first "
        "(endCoalescing, or leave its _coalescing_manager)",
        group_->name());
  coalesced_.clear();
  const WithGil with_gil;
  PyObject* module = PyImport_ImportModule("deepspeed_comm._coalescing");
  coalescing_manager_ = call_or_null(module, "calling_manager");
  Py_XDECREF(module);
  if (PyErr_Occurred()) PyErr_Clear();
}

c10::intrusive_ptr<c10d::Work> DscommBackend::endCoalescing() {
  if (!coalescing())
    raise_value_error(
        "endCoalescing: this thread has not started to coalesce calls of group '{}', or one failed",
        group_->name());
  auto work = c10::make_intrusive<CoalescedWork>(getRank(), std::move(coalesced_));
  end_coalescing();
  return work;
}

#endif

void DscommBackend::end_coalescing() {
  coalesced_.clear();
  const WithGil with_gil;
  Py_CLEAR(coalescing_manager_);
  coalescing_thread_ = std::thread::id();
}

bool DscommBackend::end_abandoned_coalescing() {
  if (coalescing_thread_.load() == std::thread::id()) return false;
  const WithGil with_gil;
  PyObject* has_ended = call_or_null(coalescing_manager_, "has_ended");
  const bool abandoned = has_ended == Py_True;
  Py_XDECREF(has_ended);
  if (abandoned) end_coalescing();
  return abandoned;
}

GroupIdentity DscommBackend::identity() const {
  GroupIdentity identity;
  identity.name = group_->name();
#if DSCOMM_TORCH_2
  identity.description = getGroupDesc();
#endif
  identity.rank = getRank();
  identity.size = getSize();
  identity.global_ranks = options_.global_ranks;
  return identity;
}

int DscommBackend::check_rank(int64_t rank, const char* title, const char* argument) const {
  if (rank < 0 || rank >= getSize())
    raise_value_error("{}: {}: got rank {}, expected a rank of the group, 0 to {}",
                      describe_call(title, *group_), argument, rank, getSize() - 1);
  return static_cast<int>(rank);
}

void DscommBackend::check_alive(const char* title) const {
  raise_if_failed(group_->failure(), title);
}

void DscommBackend::raise_if_failed(const Status& status, const char* title) const {
  if (status.ok()) return;
  raise_error(group_->refuse(status), title, *group_);
}

c10::intrusive_ptr<c10d::Work> DscommBackend::start(const CallInfo& call, Group::Body body,
                                                    at::TensorList inputs, at::TensorList outputs) {
  raise_if_failed(group_->failure_of_next_call(), call.info.title);
  std::optional<ProfiledParameters> parameters;
  if (profiled()) parameters.emplace(call, identity(), group_->sequence() + 1, inputs, outputs);
  auto work = c10::make_intrusive<DscommWork>(call, group_, inputs, outputs);
  return follow(call, group_->start(call.info, std::move(body), call.timeout), std::move(work),
                nullptr);
}

c10::intrusive_ptr<c10d::Work> DscommBackend::follow(const CallInfo& call, OperationPtr operation,
                                                     c10::intrusive_ptr<DscommWork> work,
                                                     DscommWork::Epilogue epilogue) {
  if (operation->refused()) raise_error(operation->status(), call.info.title, *group_);
  DscommWork::follow(work, std::move(operation), group_->sequence(), std::move(epilogue));
  if (coalescing()) coalesced_.push_back(work);
  return work;
}

}  // namespace dscomm
