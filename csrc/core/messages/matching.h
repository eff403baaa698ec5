// Matching: the posted receives and the held (unexpected) messages of one rank in one group.
//
// A receive names a tag and a source (-1: any); a message has both. Receives match in the order of
// posting, messages in the order of arrival. No receive and message stored here match each other,
// because callers look for a match before they add either.
//
// Plain data, guarded by the caller's lock. Receive and Message are pointers with receive->peer,
// receive->tag, message->source and message->tag.
#pragma once

#include <deque>
#include <map>

namespace dscomm {

template <typename Receive, typename Message>
class Matching {
 public:
  bool empty() const { return tags_.empty(); }

  // The first held message that the receive matches, or null.
  Message find_message(const Receive& receive) const {
    const auto at = tags_.find(receive->tag);
    if (at == tags_.end()) return nullptr;
    for (const Message& message : at->second.held)
      if (takes(receive, message->source)) return message;
    return nullptr;
  }
  // The first posted receive that matches a message from this source with this tag, or null.
  Receive find_receive(int source, int tag) const {
    const auto at = tags_.find(tag);
    if (at == tags_.end()) return nullptr;
    for (const Receive& receive : at->second.posted)
      if (takes(receive, source)) return receive;
    return nullptr;
  }

  void post(const Receive& receive) { tags_[receive->tag].posted.push_back(receive); }
  void hold(const Message& message) { tags_[message->tag].held.push_back(message); }

  // Removes a receive or a message, if it is stored here.
  void erase_receive(const Receive& receive) { erase(receive, &OfTag::posted); }
  void erase_message(const Message& message) { erase(message, &OfTag::held); }
  void clear() { tags_.clear(); }

  template <typename Visit>
  void for_each_message(const Visit& visit) const {
    for (const auto& [tag, of] : tags_)
      for (const Message& message : of.held) visit(message);
  }

 private:
  struct OfTag {
    std::deque<Receive> posted;
    std::deque<Message> held;
  };

  static bool takes(const Receive& receive, int source) {
    return receive->peer == -1 || receive->peer == source;
  }
  template <typename Entry>
  void erase(const Entry& entry, std::deque<Entry> OfTag::* list) {
    const auto at = tags_.find(entry->tag);
    if (at == tags_.end()) return;
    std::erase(at->second.*list, entry);
    if (at->second.posted.empty() && at->second.held.empty()) tags_.erase(at);
  }

  std::map<int, OfTag> tags_;
};

}  // namespace dscomm
