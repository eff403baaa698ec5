// TcpFailureDetector: the FailureDetector over TCP connections, kept as long as a transport's
// processes live.
//
// When a process dies, the kernel closes its connections, so the linked members learn at once of
// its death, and tell all (see links.h and flooding.h). The ends of Teams, with their causes,
// spread the same way. A process that ends in order sends a goodbye first, which tells how its
// program ended.
//
// A notice reaches every member while the graph of the survivors' links is connected. It is, if at
// most one process or host is gone. Members that are cut off rely on their deadlines. So do all
// members if the network between hosts is cut: no connection closes before the longest timeout.
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

class TcpFailureDetector final : public FailureDetector {
 public:
  // Collective over the members of the request. If it fails, it fails on all of them, and the
  // status names the rank and host at fault. Starts a thread.
  static Result<std::unique_ptr<TcpFailureDetector>> connect(const TransportRequest& request,
                                                             Store& store,
                                                             const Deadline& deadline);
  ~TcpFailureDetector() override;  // calls leave(), but not in a forked child

  uint64_t count() const override { return count_.load(std::memory_order_acquire); }  // publish()
  Status gone(int rank) const override;
  Departure departure(int rank) const override;
  void note_end(const std::string& exception) override;
  Status death_if_cut_off(const std::vector<int>& ranks, int64_t grace_ns) const override;
  Status ended(uint64_t team_id, uint64_t call = kAnyCall) const override;
  void end(uint64_t team_id, const Status& cause, uint64_t unfinished_call = 0) override;
  void note_position(uint64_t team_id, uint64_t position) override;
  void forget(uint64_t team_id) override;
  uint64_t ask(uint64_t team_id, uint64_t position) override;
  std::vector<Answer> answers(uint64_t question) const override;
  void close_question(uint64_t question) override;
  void note_call(uint64_t team_id, const CallRecord& call, const CallerName& caller) override;
  void compare_calls(uint64_t team_id, bool always) override;

  // Call with the timeout of each group: all members' connections then tolerate a silence of this
  // timeout and a minute. A shorter timeout than before changes nothing. Does not block.
  void tolerate_silence(std::chrono::milliseconds timeout);

  // Calls `body` once, with the first death: on the detector's thread, or before on_death() returns
  // if a death is known already. `body` must not use the detector.
  void on_death(std::function<void(const Status& death)> body);

  // Says goodbye, so that the others know that this process left rather than died, and ends the
  // thread. Takes up to a second if others do not read, up to 31 while they do. The detector
  // keeps its knowledge; later calls of end() have no effect on others. Idempotent.
  void leave();

  // In a forked child: closes inherited descriptors, so that the connections end with the parent.
  // Nothing but the destructor works there.
  void close_descriptors();

 private:
  explicit TcpFailureDetector(const TransportRequest& request);
  Status begin();
  void start(std::vector<Link> links);
  void wake();

  void serve();
  bool await_start();
  void clear_wakeup();
  void raise_silence(std::chrono::milliseconds silence);
  void handle_requests();
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

  // Flooding::count() as it was when mutex_ was last released: release store in publish(),
  // acquire load in count().
  std::atomic<uint64_t> count_{0};
  mutable std::mutex mutex_;
  Flooding flooding_;
  int64_t cut_off_ns_ = 0;                       // the time of the cut; 0: none
  std::function<void(const Status&)> on_death_;  // empty once called
  Departure own_;                                // how this process ends
  bool started_ = false;                         // links_ is set and used by the thread
  bool leaving_ = false;
  std::chrono::milliseconds silence_{kLeastSilence};  // that connections tolerate
  bool silence_is_new_ = false;                       // the thread has not applied it yet

  // Held while links_ are used, once started_; taken before mutex_. Only the thread reads
  // and closes connections. Other threads may send, so that their messages are on the way even if
  // the process then ends.
  std::mutex links_mutex_;
  // Once set, never grows or moves, so that a forked child can close the descriptors.
  std::vector<Link> links_;
  std::optional<Deadline> leave_by_;  // set while leaving, by the thread
};

}  // namespace dscomm
