// Lifeline: News over TCP connections that live as long as the processes of a transport.
//
// The connections are a star: every member is connected to member 0. The kernel closes a connection
// when its process dies, so member 0 learns at once of every death, and tells all; if it dies
// itself, all see it. Causes for which Teams end go the same way: to member 0, and from there to
// all. Who ends in order says goodbye first, and how its program ended.
//
// When member 0 has died or left, the others go on without news: they learn that it is gone, but
// nothing of each other any more, and fall back on their deadlines. So they do when the network
// between hosts is cut, which closes no connection before the longest timeout of a group.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/base/deadline.h"
#include "core/base/owned.h"
#include "core/store/store.h"
#include "core/transport/connection.h"
#include "core/transport/news.h"
#include "core/transport/transport.h"

namespace dscomm {

class Lifeline final : public News {
 public:
  // Collective over the members of the request. When it fails, it does so on all of them, and the
  // status names the rank and host at fault. Starts a thread.
  static Result<std::unique_ptr<Lifeline>> connect(const TransportRequest& request, Store& store,
                                                   const Deadline& deadline);
  ~Lifeline() override;  // leaves

  uint64_t count() const override { return count_.load(std::memory_order_acquire); }  // note_news()
  Status gone(int rank) const override;
  Departure departure(int rank) const override;
  void note_end(const std::string& exception) override;
  Status cut_off(int64_t grace_ns) const override;
  int hub() const override { return 0; }
  Status ended(uint64_t team_id) const override;
  void end(uint64_t team_id, const Status& cause) override;

  // A group of this process has such a timeout: connections stay for as long although nothing is
  // heard over them. A shorter one than before changes nothing. Does not block.
  void outlast(std::chrono::milliseconds timeout);

  // Called once some rank has died, by the thread; at once where one has already.
  void on_death(std::function<void()> body);

  // Says goodbye, so that the others hear that this process left rather than died, and ends the
  // thread. Takes a second where the others do not answer. What was heard stays; what end() is
  // told afterwards stays here. Idempotent.
  void leave();

  // In a forked child: closes what it inherited, so that the connections end with the parent.
  // Nothing else works on this object there, but its destructor.
  void close_descriptors();

 private:
  explicit Lifeline(const TransportRequest& request);
  Status begin();
  void start(std::vector<Connection> connections);
  void wake();

  void serve();
  bool await_start();
  void sleep_again();
  void take_orders();
  void flush_all();
  void tell_all_but(int rank, const std::string& message);
  void listen_to(int rank);
  bool take(int from, const Message& message);
  void lose(int rank, int error);
  void let_go(int rank, const Status& status, const Departure& departure = {});

  bool note_gone(int rank, const Status& status, const Departure& departure);
  bool note_ended(uint64_t team_id, const Status& cause);
  void note_news();

  const int rank_;
  const std::vector<TransportMember> members_;
  const int made_in_pid_;
  UniqueFd wake_;
  std::thread service_;
  std::mutex leave_mutex_;  // held while the thread is joined

  // Grows by one with each entry of gone_ and ended_, after the entry: release store in
  // note_news(), acquire load in count().
  std::atomic<uint64_t> count_{0};
  mutable std::mutex mutex_;
  std::vector<Status> gone_;           // by rank; OK while it is there
  std::vector<Departure> departures_;  // by rank; of those that left
  int64_t hub_gone_ns_ = 0;            // when the hub was found to be gone
  std::function<void()> on_death_;     // empty once it was called
  Departure own_;                      // of this process
  std::map<uint64_t, Status> ended_;   // by Team: only what ended with a cause
  std::vector<std::string> outgoing_;  // encoded messages that the thread shall send to all
  bool started_ = false;               // connections_ belong to the thread
  bool leaving_ = false;
  std::chrono::milliseconds silence_{kLeastSilence};  // that connections outlast
  bool silence_is_new_ = false;                       // to the thread

  // Of the thread, once started_. Never grows or moves, so that a forked child can close them.
  std::vector<Connection> connections_;
  std::optional<Deadline> leave_by_;  // nothing: not leaving
};

}  // namespace dscomm
