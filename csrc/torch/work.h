// Work: what torch holds of an asynchronous call.
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
  // Runs once the operation has succeeded and before anybody is told so, on the thread that
  // finishes or waits, whichever comes first.
  using Epilogue = std::function<Status()>;

  DscommWork(const CallInfo& call, std::shared_ptr<Group> group, at::TensorList inputs,
             at::TensorList outputs);

  // Ties the Work to what it stands for. Called once, before anybody else sees the Work.
  static void follow(const c10::intrusive_ptr<DscommWork>& work, OperationPtr operation,
                     uint64_t sequence, Epilogue epilogue);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  // timeout 0: until the operation's own deadline. A wait that gives up earlier raises, and leaves
  // the operation running.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  float getDuration() const DSCOMM_OVERRIDE_2;  // ms from the call to its end
  uint64_t getSequencenumber() const DSCOMM_OVERRIDE_2;

 private:
  void check_process() const;
  bool ended() const { return const_cast<DscommWork*>(this)->isCompleted(); }
  std::exception_ptr told_error() const;
  // Brings the Work to its end once the operation is done; the first caller does it, the others
  // wait for it.
  void complete();
  void mark(c10::ivalue::Future& future);

  const char* title_;
  std::shared_ptr<Group> group_;
  OperationPtr operation_;
  Epilogue epilogue_;
  std::vector<at::Tensor> outputs_;
  uint64_t sequence_ = 0;
  std::chrono::steady_clock::time_point started_, finished_;

  std::mutex completing_;  // held while the epilogue runs; never while callbacks do
  bool ended_ = false;     // guarded by completing_
  c10::intrusive_ptr<c10::ivalue::Future>
      future_;  // guarded by completing_; made when first asked for
};

#if DSCOMM_TORCH_2

// The calls between startCoalescing() and endCoalescing(), as one.
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

// What an exception says about where it happened: "all_reduce in group 'name' of rank 1".
std::string describe_call(const char* title, const Group& group);
// Raises an exception for a status that is not OK; it names the call and the group.
[[noreturn]] void raise_error(const Status& status, const char* title, const Group& group);

}  // namespace dscomm
