// A product with its epilogue on a GPU: by cuBLASLt as a whole, or in parts that it has.
#include "gpu_schedule/lt_gemm.h"

#include <algorithm>
#include <optional>

namespace cpd {
namespace {

// The task without its epilogue, as float32 sums.
GemmTask SumsOf(const GemmTask& task, char* sums, int64_t pitch) {
  GemmTask product = task;
  product.c = sums;
  product.c_type = DataType::kF32;
  product.c_pitch = pitch;
  product.epilogue = {};
  return product;
}

Status Multiply(const std::string& op, const GemmTask& task, const LtOptions& options,
                const LtResources& resources, bool ignores_alignment, bool* is_missing) {
  LtProduct product;
  *is_missing = false;
  if (Status status = DescribeLtProduct(op, task, options, &product); !status.ok()) return status;
  product.ignores_alignment = ignores_alignment;
  return CublasLt::Get().Multiply(op, product, resources, is_missing);
}

// Blocks of rows, whose sums take the place of the library's workspace. nullopt if the library has
// no kernel for them.
std::optional<Status> MultiplyRows(const std::string& op, const GemmTask& task,
                                   const LtOptions& options, const LtResources& resources,
                                   bool ignores_alignment, const LtEpilogue& epilogue) {
  int64_t most = std::min(task.m, resources.workspace_bytes / (4 * task.n));
  if (task.a.scales.is_blocks && most < task.m) most = 0;  // tiles of scales are not cut
  LtResources without = resources;
  without.workspace_bytes = 0;
  for (int64_t row = 0; row < task.m && most > 0; row += most) {
    GemmTask rows = task.FromRow(row);
    rows.m = std::min(most, task.m - row);
    const GemmTask product = SumsOf(rows, resources.workspace, task.n);
    // The first block decides: blocks may differ in their number of rows and their alignment.
    bool is_missing = false;
    const Status status = Multiply(op, product, options, without, ignores_alignment, &is_missing);
    if (is_missing) return std::nullopt;
    if (!status.ok()) return status;
    epilogue(rows, product.c, product.c_pitch);
  }
  if (most == 0) return std::nullopt;
  return Status::Ok();
}

}  // namespace

Status MultiplyWithLt(const std::string& op, const GemmTask& task, const LtOptions& options,
                      const LtResources& resources, char* sums, const LtEpilogue& epilogue) {
  bool is_missing = false;
  const bool is_whole = LtHasEpilogue(task);
  GemmTask product = task;
  if (!is_whole) {
    const bool in_place = task.c_type == DataType::kF32;
    product = SumsOf(task, in_place ? task.c : sums, in_place ? task.c_pitch : task.n);
  }
  const Status first = Multiply(op, product, options, resources, false, &is_missing);
  if (first.ok() && !is_whole) epilogue(task, product.c, product.c_pitch);
  if (!is_missing) return first;
  for (const bool ignores_alignment : {false, true}) {
    const auto status = MultiplyRows(op, task, options, resources, ignores_alignment, epilogue);
    if (status) return *status;
  }
  return first;
}

}  // namespace cpd
