#include "core/detector/flooding.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/base/packer.h"
#include "core/team/mismatch.h"
#include "core/transport/members.h"

namespace dscomm {
namespace {

// How many ids of others' questions and comparisons are kept. Answers to them, and copies on other
// paths, come within a fraction of a second.
constexpr size_t kQuestions = 4096;

// Calls of a Team that are kept for comparison: a rank may be this far ahead of one that waits.
// Usually the lead is less: a rank sends another at most eight messages that are not received yet.
constexpr size_t kCallsKept = 128;
// The most calls in one question.
constexpr size_t kCallsAsked = 16;
static_assert(kCallsAsked * sizeof(CallRecord) + 512 <= kMessageTextBytes);
// kTeamsKept: how many Teams that have ended here keep their calls. kTeamsAsked: if calls_ has this
// many Teams, the Teams in which this member has made no call, but others have asked, are dropped.
constexpr size_t kTeamsKept = 64, kTeamsAsked = 4096;

Status describe_leave(const std::string& name, const Departure& departure) {
  const std::string how = departure.exception ? departure.how() : "has left: it ended in order";
  return Status(Code::kPeerLeft, name + " " + how + "; " + departure.advice());
}

}  // namespace

Status describe_loss(const std::string& name, int error) {
  switch (error) {
    case 0:
    case EPIPE:
    case ECONNRESET:
      return Status(Code::kPeerDied, name + " died or exited without leaving" + kDeathAdvice);
    case EPROTO:
      return Status(Code::kPeerDied, name +
                                         " sent what is no message of dscomm, so that its "
                                         "connection was closed; this is a defect of dscomm");
    default:
      return Status(Code::kPeerDied,
                    name + " cannot be reached any more (" + std::strerror(error) +
                        "); see whether its host is down or the network between the hosts is cut");
  }
}

Flooding::Flooding(int rank, const std::vector<TransportMember>& members,
                   const std::vector<int>& links)
    : rank_(rank), members_(members), links_(links) {}

Status Flooding::gone(int rank) const {
  auto found = gone_.find(rank);
  return found == gone_.end() ? Status() : found->second.status;
}

Departure Flooding::departure(int rank) const {
  auto found = gone_.find(rank);
  return found == gone_.end() ? Departure() : found->second.departure;
}

Status Flooding::ended(uint64_t team_id, uint64_t call) const {
  auto found = ended_.find(team_id);
  if (found == ended_.end() || call < found->second.unfinished_call) return {};
  return found->second.cause;
}

bool Flooding::end(uint64_t team_id, const Status& cause, uint64_t unfinished_call) {
  Message message = Message::about(MessageKind::kEnd, rank_, team_id, cause);
  // This rank, too, keeps only the text that fits into a message, so all ranks have the same text.
  const size_t heading_bytes =
      Packer().number(unfinished_call).number(kMessageTextBytes).take().size();
  message.text = Packer()
                     .number(unfinished_call)
                     .text(bounded_text(cause.message(), kMessageTextBytes - heading_bytes))
                     .take();
  const uint64_t before = count_;
  static_cast<void>(handle_end(rank_, message));
  return count_ != before;
}

uint64_t Flooding::ask(uint64_t team_id, uint64_t position) {
  const uint64_t question = static_cast<uint64_t>(rank_) << 32 | ++asked_;
  std::vector<Answer>& answers = open_[question];
  answers.assign(members_.size(), Answer::kSilent);
  answers[static_cast<size_t>(rank_)] = Answer::kReached;
  Message message = Message::about(MessageKind::kAsk, rank_, question);
  message.text = Packer().number(team_id).number(position).take();
  pass_on(rank_, message);
  return question;
}

void Flooding::forget(uint64_t team_id) {
  positions_.erase(team_id);
  auto found = calls_.find(team_id);
  if (found == calls_.end()) return;
  forgotten_.emplace_back(team_id, std::move(found->second));
  calls_.erase(found);
  if (forgotten_.size() > kTeamsKept) forgotten_.pop_front();
}

bool Flooding::note_call(uint64_t team_id, const CallRecord& call, const CallerName& caller) {
  Calls& calls = calls_[team_id];
  if (calls.last.empty()) calls.caller = caller;
  if (calls.last.size() == kCallsKept) calls.last.pop_front();
  calls.last.push_back(call);
  calls.is_asked = false;
  if (calls.ahead.calls.empty()) return false;
  const bool differs = compare(team_id, calls, calls.ahead);
  if (differs || calls.ahead.calls.back().number() <= call.number()) calls.ahead = {};
  return differs;
}

void Flooding::compare_calls(uint64_t team_id, bool always) {
  auto found = calls_.find(team_id);
  if (found == calls_.end() || found->second.last.empty()) return;
  Calls& calls = found->second;
  if (std::exchange(calls.is_asked, false) && !always) return;
  Message message =
      Message::about(MessageKind::kCompare, rank_, static_cast<uint64_t>(rank_) << 32 | ++asked_);
  std::string records;
  for (size_t i = calls.last.size() - std::min(calls.last.size(), kCallsAsked);
       i < calls.last.size(); ++i)
    records.append(reinterpret_cast<const char*>(&calls.last[i]), sizeof(CallRecord));
  message.text =
      Packer().number(team_id).text(records).text(bounded_text(calls.caller.name, 400)).take();
  pass_on(rank_, message);
}

void Flooding::send_to_links(const Message& message) { pass_on(rank_, message); }

void Flooding::pass_on(int from, const Message& message) {
  const std::string bytes = encode(message);
  for (int link : links_)
    if (link != from) outbox_.emplace_back(link, bytes);
}

bool Flooding::handle(int from, const Message& message) {
  switch (message.kind) {
    case MessageKind::kMissing:
    case MessageKind::kReady:
    case MessageKind::kStart:  // may come before or after this member has started
      return true;
    case MessageKind::kFail:
      lose(from, Status(Code::kPeerDied,
                        name_member(members_, from) +
                            " gave up before all members were connected: " + message.text));
      return true;
    case MessageKind::kEnd:
      return handle_end(from, message);
    case MessageKind::kGone:
      return handle_gone(from, message);
    case MessageKind::kGoodbye:
      lose(from, describe_leave(name_member(members_, from), message.departure()),
           message.departure());
      return true;
    case MessageKind::kAsk:
      return handle_question(from, message);
    case MessageKind::kAnswer:
      return handle_answer(message);
    case MessageKind::kCompare:
      return handle_comparison(from, message);
    default:
      return false;
  }
}

bool Flooding::handle_gone(int from, const Message& message) {
  if (message.rank < 0 || message.rank >= static_cast<int>(members_.size()) ||
      message.code == Code::kOk)
    return false;
  if (message.rank == rank_) return true;  // this rank lives: a link to it was lost
  const bool is_new =
      message.code == Code::kPeerLeft
          ? note_gone(message.rank,
                      describe_leave(name_member(members_, message.rank), message.departure()),
                      message.departure())
          : note_gone(message.rank, message.status(), {});
  if (is_new) pass_on(from, message);
  return true;
}

void Flooding::lose(int link, const Status& status, const Departure& departure) {
  std::erase(links_, link);
  if (!note_gone(link, status, departure)) return;
  pass_on(link, status.code() == Code::kPeerLeft
                    ? Message::about_departure(MessageKind::kGone, link, departure)
                    : Message::about(MessageKind::kGone, link, 0, status));
}

// Keeps the first status of a rank. Returns whether this one is the first.
bool Flooding::note_gone(int rank, const Status& status, const Departure& departure) {
  if (!gone_.try_emplace(rank, Gone{status, departure}).second) return false;
  if (first_death_.ok() && status.code() == Code::kPeerDied) first_death_ = status;
  ++count_;
  return true;
}

bool Flooding::handle_end(int from, const Message& message) {
  Unpacker unpacker(message.text);
  const uint64_t unfinished_call = unpacker.number();
  const std::string text = unpacker.text();
  if (message.code == Code::kOk || !unpacker.whole()) return false;
  auto [end, is_new] =
      ended_.try_emplace(message.id, End{Status(message.code, text), unfinished_call});
  // The first cause stays, but the lowest unfinished call of all ranks that ended the Team counts.
  if (!is_new && unfinished_call >= end->second.unfinished_call) return true;
  end->second.unfinished_call = unfinished_call;
  ++count_;
  pass_on(from, message);
  return true;
}

bool Flooding::handle_question(int from, const Message& message) {
  Unpacker unpacker(message.text);
  const uint64_t team_id = unpacker.number(), position = unpacker.number();
  if (!unpacker.whole()) return false;
  if (message.rank == rank_ || !answer_route_.try_emplace(message.id, from).second) return true;
  answer_route_order_.push_back(message.id);
  if (answer_route_order_.size() > kQuestions) {
    answer_route_.erase(answer_route_order_.front());
    answer_route_order_.pop_front();
  }
  pass_on(from, message);
  auto found = positions_.find(team_id);
  // A member asks only after all have made the Team, so a Team that is unknown here has ended here.
  const bool has_reached = found == positions_.end() || found->second >= position;
  Message answer = Message::about(MessageKind::kAnswer, rank_, message.id);
  answer.text = Packer().number(has_reached ? 1 : 0).take();
  send(from, answer);
  return true;
}

bool Flooding::handle_comparison(int from, const Message& message) {
  Unpacker unpacker(message.text);
  const uint64_t team_id = unpacker.number();
  const std::string records = unpacker.text();
  Question question{message.rank, unpacker.text(), {}};
  question.calls.resize(records.size() / sizeof(CallRecord));
  if (!unpacker.whole() || question.calls.empty() || records.size() % sizeof(CallRecord) != 0)
    return false;
  std::memcpy(question.calls.data(), records.data(), records.size());
  if (message.rank == rank_ || !compared_.insert(message.id).second) return true;
  comparisons_.push_back(message.id);
  if (comparisons_.size() > kQuestions) {
    compared_.erase(comparisons_.front());
    comparisons_.pop_front();
  }
  pass_on(from, message);
  for (const auto& [id, calls] : forgotten_)
    if (id == team_id) {
      compare(team_id, calls, question);
      return true;
    }
  if (calls_.size() >= kTeamsAsked && !calls_.contains(team_id))
    std::erase_if(calls_, [](const auto& entry) { return entry.second.last.empty(); });
  Calls& calls = calls_[team_id];
  if (compare(team_id, calls, question)) return true;
  const uint64_t newest = calls.last.empty() ? 0 : calls.last.back().number();
  const uint64_t asked = question.calls.back().number();
  if (asked == newest) calls.is_asked = true;
  if (asked > newest && (calls.ahead.calls.empty() || asked > calls.ahead.calls.back().number()))
    calls.ahead = std::move(question);
  return true;
}

// Ends the Team and returns true if a call differs. Reports the first difference, which may have
// caused later ones.
bool Flooding::compare(uint64_t team_id, const Calls& calls, const Question& question) {
  for (const CallRecord& theirs : question.calls)
    for (const CallRecord& mine : calls.last) {
      if (mine.number() != theirs.number() || hash_call(0, mine) == hash_call(0, theirs)) continue;
      const std::string& own_name = calls.caller.name;
      const std::string text =
          describe_mismatch({rank_, mine, own_name}, {question.rank, theirs, question.name});
      end(team_id,
          Status(Code::kMismatch,
                 text + " (first seen by " + own_name + " in group '" + calls.caller.group + "')"),
          theirs.number());
      return true;
    }
  return false;
}

bool Flooding::handle_answer(const Message& message) {
  Unpacker unpacker(message.text);
  const uint64_t has_reached = unpacker.number();
  if (!unpacker.whole() || message.rank < 0 || message.rank >= static_cast<int>(members_.size()))
    return false;
  if (auto open = open_.find(message.id); open != open_.end())
    open->second[static_cast<size_t>(message.rank)] =
        has_reached != 0 ? Answer::kReached : Answer::kBehind;
  else if (auto way = answer_route_.find(message.id);
           way != answer_route_.end() &&
           std::find(links_.begin(), links_.end(), way->second) != links_.end())
    send(way->second, message);
  return true;
}

}  // namespace dscomm
