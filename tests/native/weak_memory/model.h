// What a checked program and the model of memory (model.cc) know of each other.
//
// The program is compiled with -fsanitize=thread, but linked without the sanitizer: the calls that
// the compiler inserts for each access of memory are those of model.cc. So the kernels are checked
// as they are.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/block.h"

namespace cpd::model {

constexpr int kThreads = 8;

// ---- The program.

// Before each run: sets all memory to its begin. Accesses are not checked.
void Begin();
void RunThread(int thread);

// ---- The model.

// Checks accesses of this memory, once for all runs. Aligned to 4 bytes.
void Track(void* begin, size_t bytes);

// Ends the run, and the program, unless the condition holds.
void Require(bool condition, const char* what);

// A barrier of some threads, as that of a block, or the end of a kernel. One use after another.
class Barrier final : public BlockBarrier {
 public:
  explicit Barrier(int count) : count_(count) { Track(&arrived_, sizeof arrived_); }
  void Wait() override;
  void Reset() { arrived_ = 0; }

 private:
  const uint64_t count_;
  uint64_t arrived_ = 0;
};

}  // namespace cpd::model
