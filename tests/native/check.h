// The check of all native tests: prints what failed, and ends the process with 1.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::fflush(stderr);                                                 \
      std::_Exit(1);                                                       \
    }                                                                      \
  } while (0)
