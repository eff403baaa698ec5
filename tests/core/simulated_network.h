// Processes of a transport on a simulated network: runs the failure detector's own Links and
// Flooding, with a fixed delay per message and a fixed time to handle it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <queue>
#include <string>
#include <utility>
#include <vector>

#include "core/detector/flooding.h"
#include "core/detector/links.h"

namespace dscomm::test {

class SimulatedNetwork {
 public:
  SimulatedNetwork(int hosts, int local, double hop_us, double handle_us)
      : hop_us_(hop_us), handle_us_(handle_us) {
    for (int host = 0; host < hosts; ++host)
      for (int k = 0; k < local; ++k) {
        TransportMember member;
        member.host = host;
        member.global_rank = host * local + k;
        member.pid = 1000 + member.global_rank;
        member.host_name = "host-" + std::to_string(host);
        members_.push_back(std::move(member));
      }
    const int ranks = hosts * local;
    const std::vector<Links> links = make_links(members_);
    for (int rank = 0; rank < ranks; ++rank) {
      const Links& own = links[static_cast<size_t>(rank)];
      links_.push_back(own.up);
      links_.back().insert(links_.back().end(), own.down.begin(), own.down.end());
      nodes_.push_back(std::make_unique<Flooding>(rank, members_, links_.back()));
    }
    is_dead_.resize(static_cast<size_t>(ranks));
    free_at_us_.resize(static_cast<size_t>(ranks));
    messages_.resize(static_cast<size_t>(ranks));
  }

  int size() const { return static_cast<int>(nodes_.size()); }
  Flooding& node(int rank) { return *nodes_[static_cast<size_t>(rank)]; }
  bool lives(int rank) const { return !is_dead_[static_cast<size_t>(rank)]; }
  size_t most_links() const {
    size_t most = 0;
    for (const std::vector<int>& links : links_) most = std::max(most, links.size());
    return most;
  }

  // Kills all at once; their connections close one hop later.
  void kill(const std::vector<int>& ranks) {
    for (int rank : ranks) is_dead_[static_cast<size_t>(rank)] = true;
    for (int rank : ranks)
      for (int other : links_[static_cast<size_t>(rank)])
        if (lives(other)) events_.push({now_us_ + hop_us_, next_++, rank, other, true, ""});
  }
  // Sends the messages that a process has queued.
  void send_from(int rank, double at_us) {
    for (auto& [to, bytes] : node(rank).take_outbox()) {
      bytes_ += bytes.size();
      ++messages_[static_cast<size_t>(rank)];
      events_.push({at_us + hop_us_, next_++, rank, to, false, std::move(bytes)});
    }
  }
  // Runs until no message is in transit. Calls `is_over` after each event; returns the time at
  // which it first was true, or -1.
  template <typename IsOver>
  double run(const IsOver& is_over) {
    double over_us = -1;
    while (!events_.empty()) {
      Event event = events_.top();
      events_.pop();
      now_us_ = event.at_us;
      const auto to = static_cast<size_t>(event.to);
      if (is_dead_[to]) continue;
      // A process handles one message at a time.
      free_at_us_[to] = std::max(free_at_us_[to], event.at_us) + handle_us_;
      if (event.is_loss) {
        node(event.to).lose(event.from, describe_loss("rank " + std::to_string(event.from), 0));
      } else {
        Message message;
        if (!decode(event.bytes, &message) || !node(event.to).handle(event.from, message))
          std::abort();
      }
      send_from(event.to, free_at_us_[to]);
      if (over_us < 0 && is_over(event.to)) over_us = free_at_us_[to];
    }
    return over_us;
  }
  double now_us() const { return now_us_; }

  // Since the last call: messages by sender, and the sum of their bytes.
  struct Traffic {
    std::vector<uint64_t> messages;
    uint64_t bytes = 0;
  };
  Traffic take_traffic() {
    Traffic traffic{messages_, bytes_};
    std::fill(messages_.begin(), messages_.end(), uint64_t{0});
    bytes_ = 0;
    return traffic;
  }

 private:
  struct Event {
    double at_us;
    uint64_t number;  // sending order, which links preserve
    int from, to;
    bool is_loss;
    std::string bytes;
    bool operator<(const Event& other) const {
      return std::make_pair(at_us, number) > std::make_pair(other.at_us, other.number);
    }
  };

  const double hop_us_, handle_us_;
  std::vector<TransportMember> members_;
  std::vector<std::vector<int>> links_;
  std::vector<std::unique_ptr<Flooding>> nodes_;
  std::vector<bool> is_dead_;
  std::vector<double> free_at_us_;  // when a process has handled all that has arrived
  std::vector<uint64_t> messages_;
  std::priority_queue<Event> events_;
  uint64_t next_ = 0, bytes_ = 0;
  double now_us_ = 0;
};

}  // namespace dscomm::test
