// Reads numbers from the flight recorder's JSON.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace dscomm {

// The numbers after `name`, entry by entry.
inline std::vector<int64_t> numbers_of(const std::string& json, const std::string& name) {
  std::vector<int64_t> found;
  const std::string key = "\"" + name + "\": ";
  for (size_t at = json.find(key); at != std::string::npos; at = json.find(key, at + 1))
    found.push_back(std::stoll(json.substr(at + key.size())));
  return found;
}

}  // namespace dscomm
