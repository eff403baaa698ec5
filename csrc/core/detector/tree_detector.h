// TreeDetector: the FailureDetector over TCP connections that live as long as the processes of a
// transport.
//
// The kernel closes a connection when its process dies, so those that a process is linked to learn
// at once of its death, and tell all (see links.h and flooding.h). Causes for which Teams end go
// the same way. Who ends in order says goodbye first, and how its program ended.
//
// Everybody hears everything while the links of the living hang together: they do whichever one
// process or host is gone. Those whom many deaths have cut off from others fall back on their
// deadlines. So does everybody when the network between hosts is cut, which closes no connection
// before the longest timeout of a group.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/base/deadline.h"
#include "core/base/owned.h"
#include "core/detector/connection.h"
#include "core/detector/failure_detector.h"
#include "core/detector/flooding.h"
#include "core/detector/rendezvous.h"
#include "core/store/store.h"
#include "core/transport/transport.h"

namespace dscomm {

class TreeDetector final : public FailureDetector {
 public:
  // Collective over the members of the request. When it fails, it does so on all of them, and the
  // status names the rank and host at fault. Starts a thread.
  static Result<std::unique_ptr<TreeDetector>> connect(const TransportRequest& request,
                                                       Store& store, const Deadline& deadline);
  ~TreeDetector() override;  // leaves

  uint64_t count() const override { return count_.load(std::memory_order_acquire); }  // publish()
  Status gone(int rank) const override;
  Departure departure(int rank) const override;
  void note_end(const std::string& exception) override;
  Status cut_off(const std::vector<int>& ranks, int64_t grace_ns) const override;
  Status ended(uint64_t team_id, uint64_t call = kAnyCall) const override;
  void end(uint64_t team_id, const Status& cause, uint64_t unfinished_call = 0) override;
  void note_position(uint64_t team_id, uint64_t position) override;
  void forget(uint64_t team_id) override;
  uint64_t ask(uint64_t team_id, uint64_t position) override;
  std::vector<Progress> answers(uint64_t question) const override;
  void close_question(uint64_t question) override;
  void note_call(uint64_t team_id, const CallRecord& call, const Caller& caller) override;
  void compare_calls(uint64_t team_id, bool always) override;

  // A group of this process has such a timeout: connections, of all members, stay for as long
  // although nothing is heard over them. A shorter one than before changes nothing. Does not block.
  void outlast(std::chrono::milliseconds timeout);

  // `body` is called once, with the first death: by the detector's thread, or at once if a death is
  // known. It must not use the detector.
  void on_death(std::function<void(const Status& death)> body);

  // Says goodbye, so that the others hear that this process left rather than died, and ends the
  // thread. Takes a second where the others do not answer. What was heard stays; what end() is
  // told afterwards stays here. Idempotent.
  void leave();

  // In a forked child: closes what it inherited, so that the connections end with the parent.
  // Nothing else works on this object there, but its destructor.
  void close_descriptors();

 private:
  explicit TreeDetector(const TransportRequest& request);
  Status begin();
  void start(std::vector<Link> links);
  void wake();

  void serve();
  bool await_start();
  void sleep_again();
  void take_silence(std::chrono::milliseconds silence);
  void take_orders();
  void send_outbox();
  void send_now();
  void flush_all();
  void listen_to(Link& link);
  void lose(Link& link, int error);
  void publish();

  const int rank_, made_in_pid_;
  const std::vector<TransportMember> members_;
  UniqueFd wake_;
  std::thread service_;
  std::mutex leave_mutex_;  // held while the thread is joined

  // Flooding::count() as it was when the mutex was released last: release store in publish(),
  // acquire load in count().
  std::atomic<uint64_t> count_{0};
  mutable std::mutex mutex_;
  Flooding flooding_;
  int64_t cut_off_ns_ = 0;                       // since when
  std::function<void(const Status&)> on_death_;  // empty once it was called
  Departure own_;                                // of this process
  bool started_ = false;                         // links_ belong to the thread
  bool leaving_ = false;
  std::chrono::milliseconds silence_{kLeastSilence};  // that connections outlast
  bool silence_is_new_ = false;                       // to the thread

  // Held while links_ are used, once started_; taken before mutex_. The thread alone opens, closes
  // and reads connections; others may send, so that what they say is on its way when they go on,
  // even if their process then ends.
  std::mutex links_mutex_;
  // Never grows or moves, so that a forked child can close them.
  std::vector<Link> links_;
  std::optional<Deadline> leave_by_;  // nothing: not leaving. Changed by the thread.
};

}  // namespace dscomm
