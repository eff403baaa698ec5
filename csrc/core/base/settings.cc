#include "core/base/settings.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string_view>

extern char** environ;

namespace dscomm {
namespace {

Status read_number(const char* name, int64_t smallest, int64_t largest, int64_t* field) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return {};
  char* end = nullptr;
  errno = 0;
  int64_t value = std::strtoll(text, &end, 10);
  if (errno != 0 || *end != '\0' || value < smallest || value > largest)
    return make_status(Code::kInvalidArgument, "%s=%s: expected a whole number from %lld to %lld",
                       name, text, static_cast<long long>(smallest),
                       static_cast<long long>(largest));
  *field = value;
  return {};
}

// A text whose allowed values are listed ("a|b|c") must be one of them; other texts are free.
Status read_text(const char* name, std::string_view allowed, std::string* field) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return {};
  if (allowed.find('|') != std::string_view::npos) {
    std::string wrapped = "|" + std::string(allowed) + "|";
    // Two of them with a bar between are found in the list as well, and are none of it.
    if (std::strchr(text, '|') != nullptr ||
        wrapped.find("|" + std::string(text) + "|") == std::string::npos)
      return make_status(Code::kInvalidArgument, "%s=%s: expected one of %s", name, text,
                         std::string(allowed).c_str());
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
      return make_status(Code::kInvalidArgument, "%s is not a setting of dscomm; did you mean %s?",
                         std::string(name).c_str(), nearest->name.c_str());
  }
  return {};
}

}  // namespace

Result<Settings> Settings::from_environment() {
  Settings settings;
  if (Status status = check_names(); !status.ok()) return status;
#define DSCOMM_READ_NUMBER(field, name, value, smallest, largest, unit, meaning)           \
  if (Status status = read_number(name, smallest, largest, &settings.field); !status.ok()) \
    return status;
#define DSCOMM_READ_TEXT(field, name, value, allowed, meaning) \
  if (Status status = read_text(name, allowed, &settings.field); !status.ok()) return status;
  DSCOMM_SETTINGS(DSCOMM_READ_NUMBER, DSCOMM_READ_TEXT)
#undef DSCOMM_READ_NUMBER
#undef DSCOMM_READ_TEXT
  return settings;
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

bool started_by_torchrun() {
  const char* run = std::getenv("TORCHELASTIC_RUN_ID");
  return run != nullptr && *run != '\0';
}

std::optional<TorchrunWorker> torchrun_worker() {
  if (!started_by_torchrun()) return std::nullopt;
  const auto text = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  const auto number = [&](const char* name) {
    const std::string digits = text(name);
    char* end = nullptr;
    const long value = std::strtol(digits.c_str(), &end, 10);
    const bool is_good = !digits.empty() && *end == '\0' && value >= 0 && value < 1 << 30;
    return is_good ? static_cast<int>(value) : -1;
  };
  TorchrunWorker worker{number("RANK"), number("WORLD_SIZE"), number("LOCAL_RANK"),
                        number("LOCAL_WORLD_SIZE"), ""};
  for (const char* name :
       {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"})
    worker.attempt += text(name) + "/";
  return worker;
}

bool launcher_keeps_store() {
  const char* keeps = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  return keeps != nullptr && std::string_view(keeps) == "True";
}

}  // namespace dscomm
