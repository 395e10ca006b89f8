// What the fake of NCCL and its test share: communicators, and what the fake shall do.
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <vector>

namespace cpd {

// The ranks that register together. Memory of a rank that has not come is nullptr.
struct FakeClique {
  explicit FakeClique(int num_ranks) : memory(num_ranks) {}
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<void*> memory;
};

struct FakeComm {
  FakeClique* clique;
  int rank;  // as NCCL counts
  void** window = nullptr;
};

struct FakeNccl {
  std::string fails;        // the function that fails
  bool blocks = true;       // otherwise a registration is in progress until all have come
  bool has_windows = true;  // whether the GPUs have symmetric memory
  int unreached = -1;       // a rank without pointers
  int num_allocated = 0;
  std::mutex mutex;
};

}  // namespace cpd

extern "C" cpd::FakeNccl* fake_nccl();
