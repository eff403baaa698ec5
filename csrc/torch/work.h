// Work: torch's handle of an asynchronous call.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "core/engine/group.h"
#include "torch/compat.h"

namespace dscomm {

struct CallInfo;

class DscommWork : public c10d::Work {
 public:
  // Runs after the operation has succeeded and before the Work ends: on the thread that finishes
  // the operation, or on one that waits for it or polls it, whichever comes first.
  using Epilogue = std::function<Status()>;

  DscommWork(const CallInfo& call, std::shared_ptr<Group> group, at::TensorList inputs,
             at::TensorList outputs);

  // Binds the Work to its operation. Called once, before any other thread sees the Work.
  static void follow(const c10::intrusive_ptr<DscommWork>& work, OperationPtr operation,
                     uint64_t sequence, Epilogue epilogue);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  // timeout 0: the operation's own deadline. An earlier timeout raises, and the operation goes on.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  float getDuration() const DSCOMM_OVERRIDE_TORCH_2;  // ms from the call to its end
  uint64_t getSequencenumber() const DSCOMM_OVERRIDE_TORCH_2;

 private:
  void check_process() const;
  bool ended() const { return const_cast<DscommWork*>(this)->isCompleted(); }
  std::exception_ptr reported_error() const;
  // Ends the Work; the operation must be done. The first caller ends it, and others wait for that.
  void complete();
  void mark(c10::ivalue::Future& future);

  const char* title_;
  std::shared_ptr<Group> group_;
  OperationPtr operation_;
  Epilogue epilogue_;
  std::vector<at::Tensor> outputs_;
  uint64_t sequence_ = 0;
  std::chrono::steady_clock::time_point started_, finished_;

  std::mutex completing_;  // held while the epilogue runs, not for the future's callbacks
  bool ended_ = false;     // guarded by completing_
  c10::intrusive_ptr<c10::ivalue::Future>
      future_;  // guarded by completing_; made by the first getFuture()
};

#if DSCOMM_TORCH_2

// All calls between startCoalescing() and endCoalescing(), as one Work.
class CoalescedWork : public c10d::Work {
 public:
  CoalescedWork(int rank, std::vector<c10::intrusive_ptr<DscommWork>> parts)
      : c10d::Work(rank, c10d::OpType::COALESCED), parts_(std::move(parts)) {}

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  std::vector<c10::intrusive_ptr<DscommWork>> parts_;
};

#endif

// Names the call in an error: "all_reduce in group 'name'".
std::string describe_call(const char* title, const Group& group);
// Raises `status`, which is not OK, with the call and the group in its message.
[[noreturn]] void raise_error(const Status& status, const char* title, const Group& group);

}  // namespace dscomm
