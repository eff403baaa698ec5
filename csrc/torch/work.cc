#include "torch/work.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/ivalue_inl.h>
#include <ATen/core/jit_type.h>

#include <algorithm>
#include <atomic>

#include "core/base/format.h"
#include "core/base/log.h"
#include "torch/backend.h"
#include "torch/convert.h"
#include "torch/exit.h"
#include "torch/profiling.h"

namespace dscomm {

std::string describe_call(const char* title, const Group& group) {
  return format_text("{} in group '{}'", title, group.name());
}

namespace {

std::exception_ptr exception_of_call(const Status& status, const char* title, const Group& group) {
  std::string text = status.message();
  // A late rank gets the error of a rank that waited for it. Mark in it which rank is this one.
  const size_t end = text.find(')', text.find(format_text(" rank {} (", group.rank())));
  if (status.code() == Code::kTimeout && end != std::string::npos)
    text.insert(end + 1, ", this rank");
  return to_exception(Status(status.code(), text), describe_call(title, group));
}

}  // namespace

void raise_error(const Status& status, const char* title, const Group& group) {
  std::rethrow_exception(exception_of_call(status, title, group));
}

DscommWork::DscommWork(const CallInfo& call, std::shared_ptr<Group> group, at::TensorList inputs,
                       at::TensorList outputs)
    : c10d::Work(group->rank(), call.type, profiled() ? call.profiling_title : nullptr,
                 profiled() ? c10::optional<std::vector<at::Tensor>>(inputs.vec()) : c10::nullopt),
      title_(call.info.title),
      group_(std::move(group)),
      outputs_(outputs.vec()),
      started_(std::chrono::steady_clock::now()) {}

void DscommWork::follow(const c10::intrusive_ptr<DscommWork>& work, OperationPtr operation,
                        uint64_t sequence, Epilogue epilogue) {
  work->operation_ = std::move(operation);
  work->sequence_ = sequence;
  work->epilogue_ = std::move(epilogue);
  // The callback holds the Work until the operation is done, so that its future completes and its
  // profiler event ends even if the caller drops the Work.
  call_begins();
  work->operation_->when_done([held = work](const Status&) mutable {
    held->complete();
    held.reset();  // may drop the last reference to tensors, which must happen before call_ends()
    call_ends();
  });
}

void DscommWork::complete() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::lock_guard lock(completing_);
    if (ended_) return;
    Status status = operation_->status();
    if (status.ok() && epilogue_) status = epilogue_();
    epilogue_ = nullptr;
    finished_ = std::chrono::steady_clock::now();
    finish(status.ok() ? nullptr : exception_of_call(status, title_, *group_));
    ended_ = true;
    future = future_;
  }
  if (future) mark(*future);
}

void DscommWork::mark(c10::ivalue::Future& future) {
  // Runs the future's callbacks. Their exceptions must not end this thread.
  try {
    if (std::exception_ptr error = reported_error()) {
      future.setError(error);
    } else {
      future.markCompleted(c10::IValue(outputs_));
    }
  } catch (const std::exception& error) {
    log_line(LogLevel::kError, "a callback of the future of {} raised: {}", title_, error.what());
  }
}

bool DscommWork::isCompleted() {
  if (!operation_->done()) {
    check_process();
    return false;
  }
  complete();
  return true;
}

// A call that was running at a fork never ends in the child.
void DscommWork::check_process() const {
  if (Status status = group_->check_process(); !status.ok()) raise_error(status, title_, *group_);
}

bool DscommWork::isSuccess() const { return ended() && reported_error() == nullptr; }

std::exception_ptr DscommWork::exception() const { return ended() ? reported_error() : nullptr; }

// The error of a Work that has ended, if any; notes that the caller has seen it.
std::exception_ptr DscommWork::reported_error() const {
  std::exception_ptr error = c10d::Work::exception();
  if (error) group_->note_reported();
  return error;
}

int DscommWork::sourceRank() const {
  if (opType_ != c10d::OpType::RECV && opType_ != c10d::OpType::RECVANYSOURCE)
    raise_value_error("{} has no source rank; only a receive has", title_);
  return operation_->source();
}

std::vector<at::Tensor> DscommWork::result() {
  if (!isCompleted()) raise_value_error("{} has no result yet; wait() for it first", title_);
  if (std::exception_ptr error = reported_error()) std::rethrow_exception(error);
  return outputs_;
}

bool DscommWork::wait(std::chrono::milliseconds timeout) {
  if (!operation_->done()) check_process();
  Status status = operation_->wait(timeout);
  if (!operation_->done()) raise_error(status, title_, *group_);
  complete();
  wait_for_calls_at_exit();
  if (std::exception_ptr error = reported_error()) std::rethrow_exception(error);
  synchronize();
  return true;
}

void DscommWork::abort() {
  group_->abort(format_text(
      "its program called abort() on the Work of its {}; see its output for the reason", title_));
}

c10::intrusive_ptr<c10::ivalue::Future> DscommWork::getFuture() {
  bool ended = false;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::lock_guard lock(completing_);
    if (future_) return future_;
    future = future_ =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    ended = ended_;
  }
  if (ended) mark(*future);
  return future;
}

float DscommWork::getDuration() const {
  if (!ended()) raise_value_error("{} has no duration yet; wait() for it first", title_);
  return std::chrono::duration<float, std::milli>(finished_ - started_).count();
}

uint64_t DscommWork::getSequencenumber() const { return sequence_; }

#if DSCOMM_TORCH_2

bool CoalescedWork::isCompleted() {
  return std::all_of(parts_.begin(), parts_.end(),
                     [](const auto& part) { return part->isCompleted(); });
}

bool CoalescedWork::isSuccess() const {
  return std::all_of(parts_.begin(), parts_.end(),
                     [](const auto& part) { return part->isSuccess(); });
}

std::exception_ptr CoalescedWork::exception() const {
  for (const auto& part : parts_)
    if (std::exception_ptr error = part->exception()) return error;
  return nullptr;
}

std::vector<at::Tensor> CoalescedWork::result() {
  std::vector<at::Tensor> all;
  for (const auto& part : parts_) {
    std::vector<at::Tensor> some = part->result();
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

bool CoalescedWork::wait(std::chrono::milliseconds timeout) {
  const Deadline deadline = Deadline::after(timeout);
  for (const auto& part : parts_) {
    // At least 1: a wait with timeout 0 has no limit.
    const bool limited = timeout.count() > 0;
    const int64_t remaining_ms =
        limited ? std::max<int64_t>(deadline.remaining_ns() / 1'000'000, 1) : 0;
    part->wait(std::chrono::milliseconds(remaining_ms));
  }
  synchronize();
  return true;
}

void CoalescedWork::abort() {
  if (!parts_.empty()) parts_.front()->abort();  // all parts have one group
}

c10::intrusive_ptr<c10::ivalue::Future> CoalescedWork::getFuture() {
  auto future =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  // The last part to end completes the future. The extra count delays that until all parts have
  // callbacks.
  auto pending = std::make_shared<std::atomic<size_t>>(parts_.size() + 1);
  auto self = c10::intrusive_ptr<CoalescedWork>::unsafe_reclaim_from_nonowning(this);
  auto one_less = [self, future, pending] {
    if (pending->fetch_sub(1) != 1) return;
    if (std::exception_ptr error = self->exception())
      future->setError(error);
    else
      future->markCompleted(c10::IValue(self->result()));
  };
  for (const auto& part : parts_)
    part->getFuture()->addCallback([one_less](c10::ivalue::Future&) { one_less(); });
  one_less();
  return future;
}

#endif

}  // namespace dscomm
