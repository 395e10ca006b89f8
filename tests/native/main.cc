// `native_tests NAME [NUMBERS]` runs one native test in a process of its own.
#include <cstdio>
#include <cstdlib>

#include "native_test.h"

int main(int argc, char** argv) {
  const auto test = cpd::AllTests().find(argc > 1 ? argv[1] : "");
  if (test == cpd::AllTests().end()) {
    std::fprintf(stderr, "usage: native_tests NAME [NUMBERS]; the names:\n");
    for (const auto& one : cpd::AllTests()) std::fprintf(stderr, "  %s\n", one.first.c_str());
    return 2;
  }
  cpd::Numbers numbers;
  for (int i = 2; i < argc; ++i) numbers.push_back(std::atoi(argv[i]));
  test->second(numbers);
  std::puts("ok");
}
