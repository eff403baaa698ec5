// Sets environment variables for a test.
#pragma once

#include <stdlib.h>

#include <initializer_list>
#include <utility>
#include <vector>

namespace dscomm::test {

using Variable = std::pair<const char*, const char*>;

// Sets the variables for its lifetime.
class Environment {
 public:
  Environment(std::initializer_list<Variable> variables) : variables_(variables) {
    for (auto [name, value] : variables_) setenv(name, value, 1);
  }
  ~Environment() {
    for (auto [name, value] : variables_) unsetenv(name);
  }

 private:
  std::vector<Variable> variables_;
};

}  // namespace dscomm::test
