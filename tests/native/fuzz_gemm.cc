// Coverage-guided fuzzing of how the GEMM handler on CPU checks a call: any attributes and shapes,
// with or without a registered buffer, are rejected or describe products of all ranks that end and
// stay within the arrays. See fuzz.sh.
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "fuzz_gemm_program.h"
#include "fuzz_schedule.h"
#include "gemm/plan_overlap.h"

namespace cpd {
namespace {

GemmBuffers Make(const std::vector<Shape>& shapes, Arrays* rank) {
  std::vector<xla::ffi::AnyBuffer> b;
  for (const Shape& shape : shapes) b.emplace_back(rank->Make(shape));
  return BuffersOf(b);
}

// Mostly a buffer that matches the call. Removed from the registry at the end.
class Buffer {
 public:
  static constexpr int64_t kId = 7;

  Buffer(Chooser& c, const OverlapProblem& p) {
    const bool is_bulk = p.config.method == CommMethod::kBulk;
    OverlapBufferSpec spec;
    spec.config = p.config;
    spec.config.num_splits = c.Mostly(spec.config.num_splits, 1, 1 << 20);
    for (bool* flag : {&spec.config.atomic, &spec.config.overlap_first_gemm, &spec.config.aggregate,
                       &spec.config.copies}) {
      if (c.Seldom()) *flag = !*flag;
    }
    spec.num_ranks = c.Mostly(p.num_ranks(), 0, 5);
    spec.rank_bytes = c.Mostly(1 << 16, 0, 1 << 16);
    spec.type = is_bulk                                 ? p.aux_type
                : p.config.type == CommType::kAllGather ? p.lhs_type
                                                        : p.partial_type;
    if (!OverlapBuffers::Get().Create("fuzz", kId, spec).ok()) __builtin_trap();
  }
  ~Buffer() {
    if (!OverlapBuffers::Get().Destroy("fuzz", kId).ok()) __builtin_trap();
  }
};

}  // namespace

void Run(Chooser& c) {
  GemmProgram program(&c, /*most_ranks=*/4);
  GemmOptions& options = program.options;
  const int64_t seldom = c.Number(0, 7);
  options.comm_overlap_id = seldom == 7 ? Buffer::kId : seldom == 6 ? c.Hostile() : 0;
  std::vector<Arrays> arrays(std::max<int64_t>(1, std::min<int64_t>(options.num_ranks, 9)));
  OverlapProblem problem;
  std::unique_ptr<Buffer> buffer;
  std::vector<RankMemory> memory;
  std::vector<std::unique_ptr<Contribution>> ranks;
  for (Arrays& rank : arrays) {
    const GemmBuffers buffers = Make(program.shapes, &rank);
    problem = {};
    if (IsRefused(Describe("fuzz", options, buffers, &problem), "fuzz")) return;
    if (problem.config.type != CommType::kNone && options.comm_overlap_id != 0) {
      if (buffer == nullptr) buffer = std::make_unique<Buffer>(c, problem);
      if (IsRefused(ConfigureByBuffer("fuzz", options.comm_overlap_id, &problem), "fuzz")) return;
    }
    memory.push_back(MemoryOf(options, problem, buffers));
    ranks.push_back(std::make_unique<OverlapContribution>(problem, memory.back()));
  }
  if (problem.config.type == CommType::kNone) {
    RunGemm(WholeProduct(problem, memory[0]), static_cast<int>(options.num_threads));
    FinishProduct(problem, memory[0], memory[0].lhs_scales);
    return;
  }
  RunSchedule(problem, options.comm_overlap_id, ranks);
}

}  // namespace cpd
