#include "core/base/settings.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <numeric>
#include <string_view>

extern char** environ;

namespace dscomm {
namespace {

// The value of a variable; empty if unset.
std::string environment(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? "" : text;
}

Status read_number(const char* name, int64_t smallest, int64_t largest, int64_t* field) {
  const std::string text = environment(name);
  if (text.empty()) return {};
  char* end = nullptr;
  errno = 0;
  int64_t value = std::strtoll(text.c_str(), &end, 10);
  if (errno != 0 || *end != '\0' || value < smallest || value > largest)
    return make_status(Code::kInvalidArgument, "{}={}: expected a whole number from {} to {}", name,
                       text, smallest, largest);
  *field = value;
  return {};
}

// If allowed values are listed ("a|b|c"), the text must be one of them; else any text is allowed.
Status read_text(const char* name, const std::string& allowed, std::string* field) {
  const std::string text = environment(name);
  if (text.empty()) return {};
  if (allowed.find('|') != std::string::npos) {
    // Two values with a bar between them would also be found in the list.
    if (text.find('|') != std::string::npos ||
        ("|" + allowed + "|").find("|" + text + "|") == std::string::npos)
      return make_status(Code::kInvalidArgument, "{}={}: expected one of {}", name, text, allowed);
  }
  *field = text;
  return {};
}

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      size_t above = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1])});
      diagonal = above;
    }
  }
  return row[b.size()];
}

Status check_names() {
  std::vector<SettingRow> rows = setting_rows();
  for (char** entry = environ; *entry != nullptr; ++entry) {
    std::string_view text(*entry);
    if (text.rfind("DSCOMM_", 0) != 0) continue;
    std::string_view name = text.substr(0, text.find('='));
    const SettingRow* nearest = &rows.front();
    for (const SettingRow& row : rows)
      if (edit_distance(name, row.name) < edit_distance(name, nearest->name)) nearest = &row;
    if (nearest->name != name)
      return make_status(Code::kInvalidArgument, "{} is not a setting of dscomm; did you mean {}?",
                         std::string(name), nearest->name);
  }
  return {};
}

}  // namespace

Result<Settings> Settings::from_environment() {
  Settings settings;
  DSCOMM_RETURN_IF_ERROR(check_names());
#define DSCOMM_READ_NUMBER(field, name, value, smallest, largest, unit, meaning) \
  DSCOMM_RETURN_IF_ERROR(read_number(name, smallest, largest, &settings.field));
#define DSCOMM_READ_TEXT(field, name, value, allowed, meaning) \
  DSCOMM_RETURN_IF_ERROR(read_text(name, allowed, &settings.field));
  DSCOMM_SETTINGS(DSCOMM_READ_NUMBER, DSCOMM_READ_TEXT)
#undef DSCOMM_READ_NUMBER
#undef DSCOMM_READ_TEXT
  if (!parse_ports(settings.ports))
    return Status(Code::kInvalidArgument,
                  "DSCOMM_PORTS=" + settings.ports +
                      ": expected two ports from 1024 to 65535, lower first, as in 20000-20999");
  return settings;
}

std::optional<PortRange> parse_ports(const std::string& text) {
  PortRange range;
  if (text.empty()) return range;
  const char* const end = text.data() + text.size();
  const auto [dash, first_error] = std::from_chars(text.data(), end, range.first);
  if (first_error != std::errc() || dash == end || *dash != '-') return {};
  const auto [stop, last_error] = std::from_chars(dash + 1, end, range.last);
  if (last_error != std::errc() || stop != end) return {};
  return range.first >= 1024 && range.first <= range.last ? std::optional(range) : std::nullopt;
}

PortRange ports_of_rank(const PortRange& range, int rank, int ranks) {
  const int share = (range.last - range.first + 1) / ranks;
  if (range.is_any() || share < kPortsOfRank) return range;
  const int first = range.first + rank * share;
  return {static_cast<uint16_t>(first), static_cast<uint16_t>(first + share - 1)};
}

std::vector<SettingRow> setting_rows() {
  std::vector<SettingRow> rows;
#define DSCOMM_ROW_NUMBER(field, name, value, smallest, largest, unit, meaning)                  \
  rows.push_back({name, std::to_string(int64_t{value}),                                          \
                  std::to_string(int64_t{smallest}) + " to " + std::to_string(int64_t{largest}), \
                  unit, meaning});
#define DSCOMM_ROW_TEXT(field, name, value, allowed, meaning) \
  rows.push_back({name, value, allowed, "", meaning});
  DSCOMM_SETTINGS(DSCOMM_ROW_NUMBER, DSCOMM_ROW_TEXT)
#undef DSCOMM_ROW_NUMBER
#undef DSCOMM_ROW_TEXT
  return rows;
}

bool started_by_torchrun() { return !environment("TORCHELASTIC_RUN_ID").empty(); }

std::optional<TorchrunWorker> torchrun_worker() {
  if (!started_by_torchrun()) return std::nullopt;
  const auto number = [](const char* name) {
    const std::string digits = environment(name);
    char* end = nullptr;
    const long value = std::strtol(digits.c_str(), &end, 10);
    const bool is_good = !digits.empty() && *end == '\0' && value >= 0 && value < 1 << 30;
    return is_good ? static_cast<int>(value) : -1;
  };
  TorchrunWorker worker{number("RANK"), number("WORLD_SIZE"), number("LOCAL_RANK"),
                        number("LOCAL_WORLD_SIZE"), ""};
  for (const char* name :
       {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"})
    worker.attempt += environment(name) + "/";
  return worker;
}

bool launcher_keeps_store() { return environment("TORCHELASTIC_USE_AGENT_STORE") == "True"; }

}  // namespace dscomm
