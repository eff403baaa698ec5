// DscommBackend: c10d's face of one dscomm Group.
//
// Each override checks its arguments on the calling thread, before anything is published, builds
// the buffers of the call and submits a body: the straight-line code that loads the inputs, calls
// the Team and stores the outputs. A synchronous call runs its body inline and returns a null Work;
// an asynchronous one is queued together with all that it needs, the tensors included.
//
// Lists of several calls ("coalesced") are one body, so that nothing comes between their parts.
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

// What one call is, besides its tensors.
struct CallInfo {
  // `title` is the profiler's, "dscomm:all_reduce"; the rest of dscomm says "all_reduce".
  CallInfo(c10d::OpType op_type, const char* title, bool is_async,
           std::chrono::milliseconds call_limit)
      : type(op_type), profiling_title(title), timeout(call_limit) {
    info.title = title + std::char_traits<char>::length("dscomm:");
    info.asynchronous = is_async;
  }

  c10d::OpType type;
  const char* profiling_title;
  std::chrono::milliseconds timeout;  // 0: the group's
  OperationInfo info;
};

class DscommBackend : public BackendBase {
 public:
  struct Options : BackendBase::Options {
    explicit Options(std::chrono::milliseconds limit) : BackendBase::Options(kBackendName, limit) {}
  };

  // Collective over the members; blocks until they have met. Call it without the GIL.
  static c10::intrusive_ptr<DscommBackend> create(c10::intrusive_ptr<c10d::Store> store,
                                                  GroupOptions options);
  ~DscommBackend() override;

  // backend.cc
  const std::string getBackendName() const override { return kBackendName; }
  void setSequenceNumberForGroup() override;
  uint64_t getSequenceNumberForGroup() override;
  void setTimeout(std::chrono::milliseconds timeout) DSCOMM_OVERRIDE_2;
  void abort() DSCOMM_OVERRIDE_2;
  void shutdown() DSCOMM_OVERRIDE_2;
  // A copy: split and merge change what they are given.
  c10::intrusive_ptr<BackendBase::Options> getBackendOptions() DSCOMM_OVERRIDE_2;
#if DSCOMM_TORCH_2
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& options) override;
  c10::intrusive_ptr<c10d::Backend> merge(const c10::intrusive_ptr<c10d::Store>& store,
                                          const c10::intrusive_ptr<c10d::Backend::Options>& options,
                                          const int& rank, const int& size) override;
  c10d::ErrorType getError() override;
  // Tensors of `size` elements of ordinary CPU memory, uninitialised. Calls are as fast with any
  // other tensor; DDP and FSDP2 take their buffers from here where they are told to.
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  std::shared_ptr<c10::Allocator> getMemAllocator() override;
  // Between the two, calls of this thread are started and not waited for; the Work of all of them
  // together comes from endCoalescing(). Nothing is fused, and batch_isend_irecv is better served
  // by a Work for each message, so supportsCoalescing() stays false.
  //
  // torch's _coalescing_manager does not end what it has started when its body raises. So the state
  // knows the manager that started it (deepspeed_comm/_coalescing.py), and is over when that is.
  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;
  // Works have durations whether it is called or not.
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
      const c10d::AllgatherOptions& options) DSCOMM_OVERRIDE_2;
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
      const c10d::ReduceScatterOptions& options) DSCOMM_OVERRIDE_2;
  c10::intrusive_ptr<c10d::Work> alltoall(std::vector<at::Tensor>& outputs,
                                          std::vector<at::Tensor>& inputs,
                                          const c10d::AllToAllOptions& options) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_splits,
                                               std::vector<int64_t>& input_splits,
                                               const c10d::AllToAllOptions& options) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override;

  // The same past torch.distributed's own layers, for deepspeed_comm; a null Work unless
  // asynchronous. The second is for a call that is made again and again under one match_id, on all
  // ranks the same, with a tensor of the same dtype and size: what a Team prepares for it is kept.
  c10::intrusive_ptr<c10d::Work> all_reduce(const at::Tensor& tensor, const c10d::ReduceOp& op,
                                            bool asynchronous);
  // What of such a call is the same each time.
  struct AllReducePlan {
    AllReducePlan(std::string id, c10d::ReduceOp op);
    std::string match_id;
    c10d::ReduceOp op;
    uint64_t hash;  // of match_id
  };
  c10::intrusive_ptr<c10d::Work> all_reduce_caching(const at::Tensor& tensor,
                                                    std::shared_ptr<const AllReducePlan> plan,
                                                    bool asynchronous);
  // While it lives, allreduce() of this backend on this thread is all_reduce_caching() under the
  // match_id: for what has to go through torch's dispatcher.
  class WithMatchId {
   public:
    WithMatchId(const DscommBackend& backend, std::string match_id);
    ~WithMatchId();
    WithMatchId(const WithMatchId&) = delete;
    WithMatchId& operator=(const WithMatchId&) = delete;
    static const std::string* of(const DscommBackend& backend);  // null where none lives

   private:
    const DscommBackend& backend_;
    const std::string match_id_;
    const WithMatchId* const outer_;
  };

  // point_to_point.cc
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int dst, int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int src, int tag) override;
  c10::intrusive_ptr<c10d::Work> recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;
  // The same past torch.distributed's own layers, for deepspeed_comm: they return when the message
  // has left the tensor, or stands in it, and no Work is made. src -1 takes any source; the source
  // is returned, a rank of the group. For dense tensors, where may_block() says so.
  void send_and_wait(const at::Tensor& tensor, int dst, int tag);
  int receive_and_wait(const at::Tensor& tensor, int src, int tag);
  // Not while calls are coalesced or a profiler listens: these are for a Work to tell.
  bool may_block() const { return !profiled() && !coalescing(); }
  // Rank 0 hears from every other rank before it lets any of them go. At the timeout it names all
  // that were not heard from, whether or not wait_all_ranks asks for more than the first.
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

 private:
  DscommBackend(std::shared_ptr<Group> group, GroupOptions options);
  friend class c10::intrusive_ptr<DscommBackend>;

  // Runs or queues a body: any copyable `Status(Team&, const CallOptions&)` that owns its buffers.
  // A synchronous one is not copied, and nothing is allocated for it. Defined in submit.h.
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
  // Raises the group's first cause if it has ended.
  void check_alive(const char* title) const;
  // Raises what ended the group, if it is not OK.
  void refuse_for(const Status& status, const char* title) const;
  c10::intrusive_ptr<c10d::Work> start(const CallInfo& call, Group::Body body,
                                       at::TensorList inputs, at::TensorList outputs);
  c10::intrusive_ptr<c10d::Work> follow(const CallInfo& call, OperationPtr operation,
                                        c10::intrusive_ptr<DscommWork> work,
                                        DscommWork::Epilogue epilogue);
  c10::intrusive_ptr<c10d::Work> receive(std::vector<at::Tensor>& tensors, c10d::OpType type,
                                         const char* title, int src, int tag);
  // Stands at the beginning of each call. Ends the coalescing of calls that was left behind, and
  // that in which this call throws: torch does neither, and the thread's later synchronous calls
  // would return before they are done.
  class EndsCoalescing {
   public:
    explicit EndsCoalescing(DscommBackend& backend)
        : backend_(backend),
          is_needed_(backend.coalescing() && !backend.end_abandoned_coalescing()),
          exceptions_(is_needed_ ? std::uncaught_exceptions() : 0) {}
    ~EndsCoalescing() {
      if (is_needed_ && std::uncaught_exceptions() != exceptions_) backend_.end_coalescing();
    }
    EndsCoalescing(const EndsCoalescing&) = delete;
    EndsCoalescing& operator=(const EndsCoalescing&) = delete;

   private:
    DscommBackend& backend_;
    const bool is_needed_;
    const int exceptions_;
  };
  // Whether this thread is coalescing calls. Relaxed: a thread asks for what it has set itself.
  bool coalescing() const {
    const std::thread::id thread = coalescing_thread_.load(std::memory_order_relaxed);
    return thread != std::thread::id() && thread == std::this_thread::get_id();
  }
  void end_coalescing();
  // Ends it if the manager that started it is over without having ended it; whether it did so.
  bool end_abandoned_coalescing();
  GroupIdentity identity() const;
  int check_rank(int64_t rank, const char* argument) const;
  size_t group_size() const { return static_cast<size_t>(getSize()); }

  std::shared_ptr<Group> group_;
  GroupOptions options_;
  std::atomic<std::thread::id> coalescing_thread_{};  // the one between start- and endCoalescing()
  std::vector<c10::intrusive_ptr<DscommWork>> coalesced_;  // used by that thread alone
  // _coalescing.Manager that started it, or null where none is known. Guarded by the GIL.
  PyObject* coalescing_manager_ = nullptr;
};

}  // namespace dscomm
