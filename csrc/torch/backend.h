// DscommBackend: the c10d backend of one dscomm Group.
//
// Each override checks its arguments on the calling thread, before peers see anything of the call,
// then makes the call's buffers and submits a body: the code that loads the inputs, calls the Team
// and stores the outputs. A synchronous call runs its body inline and returns a null Work. An
// asynchronous call is queued with all that it needs, including its tensors.
//
// A coalesced call, such as allreduce_coalesced(), makes one Team call for each tensor of a list.
// All of them are one body, so no other call runs in between.
#pragma once

#include <Python.h>

#include <atomic>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/engine/group.h"
#include "torch/compat.h"
#include "torch/convert.h"
#include "torch/profiling.h"
#include "torch/work.h"

namespace dscomm {

inline constexpr const char* kBackendName = "dscomm";

// A call, without its tensors.
struct CallInfo {
  // `title` is the profiler's name, "dscomm:all_reduce"; everywhere else the name is "all_reduce".
  CallInfo(c10d::OpType op_type, const char* title, bool is_async,
           std::chrono::milliseconds call_limit)
      : type(op_type), profiling_title(title), timeout(call_limit) {
    info.title = title + std::char_traits<char>::length("dscomm:");
    info.asynchronous = is_async;
  }

  c10d::OpType type;
  const char* profiling_title;
  std::chrono::milliseconds timeout;  // 0: the group's timeout
  OperationInfo info;
};

class DscommBackend : public BackendBase {
 public:
  struct Options : BackendBase::Options {
    explicit Options(std::chrono::milliseconds limit) : BackendBase::Options(kBackendName, limit) {}
  };

  // Collective: blocks, without the GIL, until all members have called it or the timeout passes.
  static c10::intrusive_ptr<DscommBackend> create(c10::intrusive_ptr<c10d::Store> store,
                                                  GroupOptions options);
  ~DscommBackend() override;

  // backend.cc
  const std::string getBackendName() const override { return kBackendName; }
  void setSequenceNumberForGroup() override;
  uint64_t getSequenceNumberForGroup() override;
  void setTimeout(std::chrono::milliseconds timeout) DSCOMM_OVERRIDE_TORCH_2;
  void abort() DSCOMM_OVERRIDE_TORCH_2;
  void shutdown() DSCOMM_OVERRIDE_TORCH_2;
  // Returns a copy: torch changes the options before it passes them to split() or merge().
  c10::intrusive_ptr<BackendBase::Options> getBackendOptions() DSCOMM_OVERRIDE_TORCH_2;
#if DSCOMM_TORCH_2
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& options) override;
  c10::intrusive_ptr<c10d::Backend> merge(const c10::intrusive_ptr<c10d::Store>& store,
                                          const c10::intrusive_ptr<c10d::Backend::Options>& options,
                                          const int& rank, const int& size) override;
  c10d::ErrorType getError() override;
  // Uninitialised CPU tensors of `size` elements, from the tensor pool. DDP and FSDP2 can take
  // their buffers from here. Calls work with any other CPU tensor too.
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  std::shared_ptr<c10::Allocator> getMemAllocator() override;
  // Between startCoalescing() and endCoalescing(), this thread's calls start without being waited
  // for; endCoalescing() returns one Work for all of them. Calls are not fused, and one Work per
  // message serves batch_isend_irecv better, so supportsCoalescing() stays false.
  //
  // torch's _coalescing_manager does not call endCoalescing() if its body raises. So
  // startCoalescing() remembers the current manager (deepspeed_comm/_coalescing.py), and the first
  // call after the manager has ended ends coalescing.
  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;
  // Nothing to enable: each Work measures its duration.
  void enableCollectivesTiming() override {}
#endif
  std::string describe() const { return group_->describe(); }
  std::string flight_record() const { return group_->flight_record_json(); }

  // collectives.cc
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>& tensors,
                                        const c10d::ReduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather_coalesced(
      std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options) DSCOMM_OVERRIDE_TORCH_2;
  c10::intrusive_ptr<c10d::Work> gather(std::vector<std::vector<at::Tensor>>& outputs,
                                        std::vector<at::Tensor>& inputs,
                                        const c10d::GatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> scatter(std::vector<at::Tensor>& outputs,
                                         std::vector<std::vector<at::Tensor>>& inputs,
                                         const c10d::ScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter(std::vector<at::Tensor>& outputs,
                                                std::vector<std::vector<at::Tensor>>& inputs,
                                                const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::ReduceScatterOptions& options) DSCOMM_OVERRIDE_TORCH_2;
  c10::intrusive_ptr<c10d::Work> alltoall(std::vector<at::Tensor>& outputs,
                                          std::vector<at::Tensor>& inputs,
                                          const c10d::AllToAllOptions& options) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_splits,
                                               std::vector<int64_t>& input_splits,
                                               const c10d::AllToAllOptions& options) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override;

  // All-reduce for deepspeed_comm, without torch.distributed's layers. The Work is null unless
  // asynchronous. all_reduce_caching() is for a call that is repeated with the same dtype and size
  // under one match_id, which is the same on all ranks: the Team keeps its preparations.
  c10::intrusive_ptr<c10d::Work> all_reduce(const at::Tensor& tensor, const c10d::ReduceOp& op,
                                            bool asynchronous);
  // The parts of a repeated call that do not change.
  struct AllReducePlan {
    AllReducePlan(std::string id, c10d::ReduceOp op);
    std::string match_id;
    c10d::ReduceOp op;
    uint64_t hash;  // of match_id
  };
  c10::intrusive_ptr<c10d::Work> all_reduce_caching(const at::Tensor& tensor,
                                                    std::shared_ptr<const AllReducePlan> plan,
                                                    bool asynchronous);
  // For its lifetime, allreduce() of this backend on this thread is all_reduce_caching() with the
  // match_id: for calls that must go through torch's dispatcher.
  class WithMatchId {
   public:
    WithMatchId(const DscommBackend& backend, std::string match_id);
    ~WithMatchId();
    WithMatchId(const WithMatchId&) = delete;
    WithMatchId& operator=(const WithMatchId&) = delete;
    static const std::string* of(const DscommBackend& backend);  // null if there is none

   private:
    const DscommBackend& backend_;
    const std::string match_id_;
    const WithMatchId* const outer_;
  };

  // point_to_point.cc
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int dst, int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int src, int tag) override;
  c10::intrusive_ptr<c10d::Work> recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;
  // Blocking messages for deepspeed_comm, without torch.distributed's layers and without a Work.
  // They return when the tensor may be reused (send) or holds the message (receive). With src -1,
  // a receive takes a message from any rank; it returns the sender's rank in the group. The tensor
  // must be usable in place (contiguous, no conjugate or negative bit), and may_block() true.
  void send_and_wait(const at::Tensor& tensor, int dst, int tag);
  int receive_and_wait(const at::Tensor& tensor, int src, int tag);
  // False while calls are coalesced or a profiler listens, as both need a Work.
  bool may_block() const { return !profiled() && !coalescing(); }
  // Rank 0 waits for a message from every other rank, then releases them all. At the timeout it
  // names all missing ranks, even without wait_all_ranks.
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

 private:
  DscommBackend(std::shared_ptr<Group> group, GroupOptions options);
  friend class c10::intrusive_ptr<DscommBackend>;

  // Runs or queues a body: any movable `Status(Team&, const CallOptions&)` that owns its buffers.
  // A synchronous call neither copies nor allocates. Defined in submit.h.
  template <typename Body>
  c10::intrusive_ptr<c10d::Work> submit(const CallInfo& call, Body body, at::TensorList inputs,
                                        at::TensorList outputs);

  c10::intrusive_ptr<c10d::Work> all_reduce_tensor(const at::Tensor& tensor,
                                                   const c10d::ReduceOp& op, bool asynchronous,
                                                   std::chrono::milliseconds timeout);
  c10::intrusive_ptr<c10d::Work> submit_planned(const at::Tensor& tensor,
                                                std::shared_ptr<const AllReducePlan> plan,
                                                bool asynchronous,
                                                std::chrono::milliseconds timeout);
  // Raises the group's first error if the group has ended.
  void check_alive(const char* title) const;
  // Raises `status`, the group's error, if it is not OK.
  void raise_if_failed(const Status& status, const char* title) const;
  c10::intrusive_ptr<c10d::Work> start(const CallInfo& call, Group::Body body,
                                       at::TensorList inputs, at::TensorList outputs);
  c10::intrusive_ptr<c10d::Work> follow(const CallInfo& call, OperationPtr operation,
                                        c10::intrusive_ptr<DscommWork> work,
                                        DscommWork::Epilogue epilogue);
  c10::intrusive_ptr<c10d::Work> receive(std::vector<at::Tensor>& tensors, c10d::OpType type,
                                         const char* title, int src, int tag);
  // The first local variable of each call. Ends coalescing that was abandoned, and coalescing in
  // which this call throws. torch does neither: without the guard, later synchronous calls of this
  // thread would return before they are done.
  class CoalescingGuard {
   public:
    explicit CoalescingGuard(DscommBackend& backend)
        : backend_(backend),
          is_needed_(backend.coalescing() && !backend.end_abandoned_coalescing()),
          exceptions_(is_needed_ ? std::uncaught_exceptions() : 0) {}
    ~CoalescingGuard() {
      if (is_needed_ && std::uncaught_exceptions() != exceptions_) backend_.end_coalescing();
    }
    CoalescingGuard(const CoalescingGuard&) = delete;
    CoalescingGuard& operator=(const CoalescingGuard&) = delete;

   private:
    DscommBackend& backend_;
    const bool is_needed_;
    const int exceptions_;
  };
  // Whether this thread is coalescing calls. Relaxed: only this thread stores this thread's id.
  bool coalescing() const {
    const std::thread::id thread = coalescing_thread_.load(std::memory_order_relaxed);
    return thread != std::thread::id() && thread == std::this_thread::get_id();
  }
  void end_coalescing();
  // Ends coalescing if torch's manager has ended without endCoalescing(); returns whether it had.
  bool end_abandoned_coalescing();
  GroupIdentity identity() const;
  int check_rank(int64_t rank, const char* title, const char* argument) const;
  size_t group_size() const { return static_cast<size_t>(getSize()); }

  std::shared_ptr<Group> group_;
  GroupOptions options_;
  std::atomic<std::thread::id> coalescing_thread_{};  // thread between start- and endCoalescing()
  std::vector<c10::intrusive_ptr<DscommWork>> coalesced_;  // only coalescing_thread_ uses it
  // The _coalescing.Manager that started coalescing; null if unknown. Guarded by the GIL.
  PyObject* coalescing_manager_ = nullptr;
};

}  // namespace dscomm
