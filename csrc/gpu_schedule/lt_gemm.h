// A product with its epilogue on a GPU: by cuBLASLt as a whole, or in parts that it has.
#pragma once

#include <functional>
#include <string>

#include "gpu_schedule/cublaslt.h"

namespace cpd {

// Applies the epilogue of a task to float32 sums [m, n] with a pitch in elements, and stores the
// result. The sums may be the result's own memory.
using LtEpilogue = std::function<void(const GemmTask& task, const char* sums, int64_t pitch)>;

// Enqueues the task. `sums` is memory for [m, n] float32, for tasks whose epilogue the library
// lacks; see GemmScratch.
//
// If the library has no algorithm for the task, it is multiplied without the epilogue, as blocks of
// rows in the workspace; then also with an algorithm that needs no alignment.
Status MultiplyWithLt(const std::string& op, const GemmTask& task, const LtOptions& options,
                      const LtResources& resources, char* sums, const LtEpilogue& epilogue);

}  // namespace cpd
