// Messages between two ranks, and the monitored barrier, which is made of them.
#include "core/base/format.h"
#include "torch/backend.h"
#include "torch/exit.h"
#include "torch/tensors.h"

namespace dscomm {
namespace {

using c10d::OpType;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// c10d's tags start at 0; negative tags are dscomm's.
constexpr int kArriveTag = -2;
constexpr int kReleaseTag = -3;

// The messages of a monitored barrier have deadlines this much after the barrier's own: a message
// that reaches its deadline ends the group, with an error that names only one rank.
constexpr std::chrono::milliseconds kGrace{10000};

const at::Tensor& only_tensor(const std::vector<at::Tensor>& tensors) {
  if (tensors.size() != 1)
    raise_value_error("tensors: got {} tensors, expected one: pass one per call", tensors.size());
  return tensors[0];
}

void check_tag(int tag, const char* title, const Group& group) {
  if (tag < 0)
    raise_value_error("{}: tag: got {}, expected 0 or more", describe_call(title, group), tag);
}

// Starts with gloo's text, which programs search for. With a limit of 0, that text names no missing
// rank; else it names the first one, or all of them if `all`. Then lists all missing ranks.
std::string describe_missing(const std::vector<int>& missing, std::chrono::milliseconds limit,
                             bool all) {
  const int64_t limit_ms = limit.count();
  const std::string ranks = join_text(missing, ", ");
  const std::string text =
      limit_ms == 0 ? "Rank 0 timed out in monitoredBarrier after 0 ms"
      : all ? format_text("Ranks {} failed to pass monitoredBarrier in {} ms", ranks, limit_ms)
            : format_text("Rank {} failed to pass monitoredBarrier in {} ms", missing[0], limit_ms);
  return format_text(
      "{}: timed out; rank 0 heard nothing from these ranks: {}; see in their output whether they "
      "make this call; if they are only slow, raise the timeout of monitored_barrier()",
      text, ranks);
}

CallInfo message_call(OpType type, const char* title, const Buffer& buffer, int peer, int tag) {
  CallInfo call(type, title, true, std::chrono::milliseconds(0));
  call.info.dtype = buffer.dtype();
  call.info.count = static_cast<int64_t>(buffer.count());
  call.info.peer = peer;
  call.info.tag = tag;
  return call;
}

// Counts a blocking message, as a Work is counted, so that a process that ends waits for it.
class UnderWay {
 public:
  UnderWay() { call_begins(); }
  ~UnderWay() { call_ends(); }
  UnderWay(const UnderWay&) = delete;
  UnderWay& operator=(const UnderWay&) = delete;
};

}  // namespace

WorkPtr DscommBackend::send(std::vector<at::Tensor>& tensors, int dst, int tag) {
  const CoalescingGuard on_error(*this);
  check_rank(dst, "send", "dst");
  check_tag(tag, "send", *group_);
  auto buffer = std::make_shared<Buffer>(only_tensor(tensors), Use::kRead, Argument{"tensor"});
  const CallInfo call = message_call(OpType::SEND, "dscomm:send", *buffer, dst, tag);
  check_alive(call.info.title);
  buffer->load();
  std::optional<ProfiledParameters> parameters;
  if (profiled()) parameters.emplace(call, identity(), group_->sequence(), tensors, tensors);
  auto work = c10::make_intrusive<DscommWork>(call, group_, tensors, tensors);
  OperationPtr operation = group_->send(buffer->data(), buffer->count(), buffer->dtype(), dst, tag,
                                        buffer, call.timeout);
  return follow(call, std::move(operation), std::move(work), nullptr);
}

WorkPtr DscommBackend::recv(std::vector<at::Tensor>& tensors, int src, int tag) {
  const CoalescingGuard on_error(*this);
  check_rank(src, "recv", "src");
  return receive(tensors, OpType::RECV, "dscomm:recv", src, tag);
}

WorkPtr DscommBackend::recvAnysource(std::vector<at::Tensor>& tensors, int tag) {
  return receive(tensors, OpType::RECVANYSOURCE, "dscomm:recvAnySource", -1, tag);
}

WorkPtr DscommBackend::receive(std::vector<at::Tensor>& tensors, OpType type, const char* title,
                               int src, int tag) {
  const CoalescingGuard on_error(*this);
  check_tag(tag, type == OpType::RECV ? "recv" : "recvAnySource", *group_);
  auto buffer = std::make_shared<Buffer>(only_tensor(tensors), Use::kWrite, Argument{"tensor"});
  const CallInfo call = message_call(type, title, *buffer, src, tag);
  std::optional<ProfiledParameters> parameters;
  if (profiled()) parameters.emplace(call, identity(), group_->sequence(), tensors, tensors);
  auto work = c10::make_intrusive<DscommWork>(call, group_, tensors, tensors);
  OperationPtr operation = group_->receive(buffer->data(), buffer->count(), buffer->dtype(), src,
                                           tag, buffer, call.timeout);
  // A receive succeeds even after the group has failed, if the message was sent before the failure.
  if (operation->done() && !operation->status().ok() && !operation->refused())
    raise_error(operation->status(), call.info.title, *group_);
  DscommWork::Epilogue store;
  if (buffer->staged()) store = [buffer] { return store_all({buffer.get(), 1}); };
  return follow(call, std::move(operation), std::move(work), std::move(store));
}

void DscommBackend::send_and_wait(const at::Tensor& tensor, int dst, int tag) {
  check_rank(dst, "send", "dst");
  check_tag(tag, "send", *group_);
  const Buffer buffer(tensor, Use::kRead, Argument{"tensor"});
  check_alive("send");
  const UnderWay under_way;
  const Status status = group_->blocking_send(buffer.data(), buffer.count(), buffer.dtype(), dst,
                                              tag, std::chrono::milliseconds(0));
  if (!status.ok()) raise_error(status, "send", *group_);
}

int DscommBackend::receive_and_wait(const at::Tensor& tensor, int src, int tag) {
  const char* title = src < 0 ? "recvAnySource" : "recv";
  if (src >= 0) check_rank(src, title, "src");
  check_tag(tag, title, *group_);
  const Buffer buffer(tensor, Use::kWrite, Argument{"tensor"});
  const UnderWay under_way;
  int source = -1;
  // No check_alive(), as in receive(): a message sent before the group failed is still received.
  const Status status = group_->blocking_receive(buffer.data(), buffer.count(), buffer.dtype(), src,
                                                 tag, std::chrono::milliseconds(0), &source);
  if (!status.ok()) raise_error(status, title, *group_);
  return source;
}

void DscommBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  const char* title = "monitored_barrier";
  check_alive(title);
  // A timeout of 0 asks which ranks are already there; only a negative one means unset.
  const auto limit = options.timeout.count() < 0 ? group_->timeout() : options.timeout;
  auto byte = std::make_shared<char>(0);

  if (getRank() != 0) {
    OperationPtr arrive =
        group_->send(byte.get(), 1, DType::kUInt8, 0, kArriveTag, byte, limit + kGrace);
    Status status = arrive->wait();
    auto answer = std::make_shared<char>(0);
    // Rank 0 answers by its own deadline, which is later than this rank's if rank 0 came later.
    if (status.ok())
      status =
          group_->receive(answer.get(), 1, DType::kUInt8, 0, kReleaseTag, answer, limit + kGrace)
              ->wait();
    if (!status.ok()) {
      // gloo's text, since programs search for it.
      const std::string cause = format_text(
          "Rank {} successfully reached monitoredBarrier, but received errors while waiting for "
          "send/recv from rank 0: {}",
          getRank(), status.message());
      raise_error(Status(status.code(), cause), title, *group_);
    }
    return;
  }

  // All receives start before the first wait, so that all missing ranks are known at the deadline.
  auto arrivals = std::make_shared<std::vector<char>>(group_size());
  std::vector<OperationPtr> receives;
  for (int rank = 1; rank < getSize(); ++rank)
    receives.push_back(group_->receive(&(*arrivals)[static_cast<size_t>(rank)], 1, DType::kUInt8,
                                       rank, kArriveTag, arrivals, limit + kGrace));
  const Deadline deadline = Deadline::after(limit);
  TimeLeft time_left(deadline);
  std::vector<int> missing;
  for (int rank = 1; rank < getSize(); ++rank) {
    OperationPtr& receive = receives[static_cast<size_t>(rank - 1)];
    // At least 1: a wait with timeout 0 has no limit.
    const auto remaining =
        std::chrono::milliseconds(std::max<int64_t>(time_left.ns() / 1'000'000, 1));
    Status status = receive->wait(remaining);
    if (status.ok()) continue;
    if (receive->done())  // the group ended, or `rank` died
      raise_error(status, title, *group_);
    missing.push_back(rank);
  }
  if (!missing.empty()) {
    const std::string cause = describe_missing(missing, limit, wait_all_ranks);
    group_->abort(std::string(title) + ": " + cause);  // tells the ranks that did arrive
    raise_error(Status(Code::kTimeout, cause), title, *group_);
  }
  for (int rank = 1; rank < getSize(); ++rank) {
    Status status =
        group_->send(byte.get(), 1, DType::kUInt8, rank, kReleaseTag, byte, limit + kGrace)->wait();
    if (!status.ok()) raise_error(status, title, *group_);
  }
}

}  // namespace dscomm
