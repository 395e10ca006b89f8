// The native tests are one program: each file registers its test under its name.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace cpd {

// The numbers behind a test's name on the command line, such as how many random programs to run.
struct Numbers : std::vector<int> {
  int Get(size_t index, int otherwise) const { return index < size() ? at(index) : otherwise; }
};

inline std::map<std::string, void (*)(const Numbers&)>& AllTests() {
  static std::map<std::string, void (*)(const Numbers&)> tests;
  return tests;
}

struct Register {
  Register(const char* name, void (*test)(const Numbers&)) { AllTests()[name] = test; }
};

}  // namespace cpd
