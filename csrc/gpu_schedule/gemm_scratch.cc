// Scratch memory of a rank's product on a GPU.
#include "gpu_schedule/gemm_scratch.h"

namespace cpd {
namespace {

int64_t AlignUp(int64_t bytes) { return (bytes + 255) & ~int64_t{255}; }

}  // namespace

int64_t GemmScratch::Lay(const OverlapProblem& p, char* data, GemmScratch* scratch) {
  const auto begin = reinterpret_cast<intptr_t>(data);
  int64_t at = AlignUp(begin) - begin;
  const auto take = [&](char** part, int64_t bytes) {
    *part = data ? data + at : nullptr;
    at += AlignUp(bytes);
  };
  const bool is_scaled = p.scaling != Scaling::kNone;
  take(&scratch->lt, kLtBytes);
  take(&scratch->rhs, is_scaled && !p.rhs_transposed ? p.k * p.n : 0);
  take(&scratch->lhs, is_scaled && p.lhs_transposed ? p.k * p.m : 0);
  const bool is_apart = ElementBytes(p.output_type) == 2 && p.fuse_gelu &&
                        (p.scaling != Scaling::kNone || p.n % 8 != 0);
  take(&scratch->sums, is_apart ? 4 * p.m * p.n : 0);
  return at + (data ? 0 : 255);  // whatever the alignment of the start
}

}  // namespace cpd
