// Coverage-guided fuzzing, on the host, of how the GEMM handler for GPUs reads a call: any
// attributes, and any number, shapes and types of arrays, are rejected or describe valid memory.
// Accepted calls are computed as on CPU. See fuzz.sh.
#include <algorithm>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ffi/cuda/dispatch_call.h"
#include "ffi/cuda/gemm_call.h"
#include "fuzz_gemm_program.h"
#include "fuzz_schedule.h"
#include "gpu_schedule/overlap_team.h"

namespace cpd {
namespace {

// Mostly the type that fits.
XLA_FFI_DataType TypeOf(Chooser& c, XLA_FFI_DataType fitting) {
  constexpr XLA_FFI_DataType kOthers[] = {XLA_FFI_DataType_PRED, XLA_FFI_DataType_S32,
                                          XLA_FFI_DataType_S64, XLA_FFI_DataType_F32,
                                          XLA_FFI_DataType_F64};
  return c.Seldom() ? kOthers[c.Number(0, std::size(kOthers) - 1)] : fitting;
}

void AddAll(const GemmOptions& o, std::vector<int64_t> device_table, Chooser& c,
            Attributes* attributes) {
  Attributes& a = *attributes;
  const OverlapProblem& p = o.problem;
  a.Add("op", std::string_view(o.op));
  a.Add("axis", std::string_view(o.axis));
  for (const auto& [name, value] :
       std::vector<std::pair<const char*, int64_t>>{{"num_ranks", o.num_ranks},
                                                    {"deadline_ms", o.deadline_ms},
                                                    {"num_threads", o.num_threads},
                                                    {"scaling_mode", o.scaling_mode},
                                                    {"comm_overlap_method", o.comm_overlap_method},
                                                    {"comm_type", o.comm_type},
                                                    {"comm_overlap_id", o.comm_overlap_id},
                                                    {"num_splits", p.config.num_splits},
                                                    {"lhs_axis_boundary", o.lhs_axis_boundary},
                                                    {"rhs_axis_boundary", o.rhs_axis_boundary},
                                                    {"aux_axis_boundary", o.aux_axis_boundary},
                                                    {"num_batches", p.rows.num_batches},
                                                    {"gemm_priority", c.MostlyOrHostile(0)},
                                                    {"comm_priority", c.MostlyOrHostile(0)},
                                                    {"num_comm_sm", c.MostlyOrHostile(2)}}) {
    a.Add(name, value);
  }
  for (const auto& [name, value] : std::vector<std::pair<const char*, bool>>{
           {"atomic", p.config.atomic},
           {"overlap_first_gemm", p.config.overlap_first_gemm},
           {"aggregate", p.config.aggregate},
           {"copies", p.config.copies},
           {"lhs_transposed", p.lhs_transposed},
           {"rhs_transposed", p.rhs_transposed},
           {"fuse_bias", o.fuse_bias},
           {"fuse_gelu", p.fuse_gelu},
           {"grad", o.grad},
           {"use_split_accumulator", false},
           {"in_ring_order", p.in_ring_order},
           {"gathers_to_aux", p.gathers_to_aux},
           {"set_sm_margin", false},
           {"tf32", false}}) {
    a.Add(name, value);
  }
  a.Add("row_counts", p.rows.counts);
  a.Add("device_table", std::move(device_table));
  a.Add("memory", std::string_view("devices"));
  a.Add("site", int64_t{7});
  if (c.Seldom()) a.Remove(c.Number(0, a.size() - 1));
}

// Touches what a product of this problem may write besides its results.
void Touch(const GemmScratch& scratch, const OverlapProblem& p) {
  const bool is_scaled = p.scaling != Scaling::kNone;
  if (reinterpret_cast<uintptr_t>(scratch.lt) % 256 != 0) __builtin_trap();
  scratch.lt[0] = scratch.lt[GemmScratch::kLtBytes - 1] = 0;
  if (is_scaled && !p.rhs_transposed) std::fill_n(scratch.rhs, p.k * p.n, 0);
  if (is_scaled && p.lhs_transposed) std::fill_n(scratch.lhs, p.k * p.m, 0);
  if (ElementBytes(p.output_type) == 2 && p.fuse_gelu && (is_scaled || p.n % 8 != 0)) {
    std::fill_n(scratch.sums, 4 * p.m * p.n, 0);
  }
}

}  // namespace

void Run(Chooser& c) {
  GemmProgram program(&c, /*most_ranks=*/2);
  const bool is_one_device = c.Flag();
  const bool has_rank_dim = is_one_device && program.options.comm_type != 0;
  // GPUs have scratch, of any type, instead of a workspace for sums.
  constexpr int64_t kScratch = GemmScratch::kLtBytes + (1 << 16);
  if (!c.Seldom()) program.shapes.back() = {program.shapes.back().type, {kScratch / 4}};
  std::vector<int64_t> device_table = {-1};
  if (!is_one_device) {
    device_table.clear();
    for (int64_t i = c.Mostly(program.num_ranks, 0, 5); i > 0; --i) {
      device_table.push_back(c.MostlyOrHostile(i));
    }
  }
  Attributes attributes([&](XLA_FFI_DataType type) { return TypeOf(c, type); });
  AddAll(program.options, std::move(device_table), c, &attributes);
  const XLA_FFI_Attrs raw = attributes.raw();
  CudaGemmOptions options;
  if (IsRefused(ReadOptions(xla::ffi::Dictionary(&raw), &options), "jax_cp_dispatch")) return;
  const std::string op = options.op();
  if (IsRefused(CheckRanksOnGpu(op, options), op)) return;
  RankLocation location;
  if (IsRefused(LocateRanks(op, 1, options.num_ranks(), options.device_table, &location), op))
    return;

  static char* const of_workspaces = new char[Arrays::kMostBytes];
  Arrays arrays;
  Frame frame;
  if (c.Seldom()) program.shapes.erase(program.shapes.begin() + c.Number(0, 13));
  for (size_t i = 0; i < program.shapes.size(); ++i) {
    Shape shape = program.shapes[i];
    if (has_rank_dim && !c.Seldom()) shape.dims.insert(shape.dims.begin(), program.num_ranks);
    const bool is_workspace = i + 1 == program.shapes.size();
    XLA_FFI_Buffer* buffer =
        arrays.Make(std::move(shape), is_workspace ? of_workspaces + Arrays::kMostBytes : nullptr);
    i < GemmProgram::kNumArgs ? frame.AddArg(buffer) : frame.AddResult(buffer);
  }
  const bool has_all_ranks = options.overlaps() && location.on_one_device;
  CudaGemmCall call;
  if (IsRefused(ReadGemmCall(op, options, frame.args(), frame.results(), has_all_ranks, &call),
                op)) {
    return;
  }
  OverlapProblem& problem = call.problem;
  std::vector<RankMemory> memory;
  for (size_t rank = 0; rank < call.buffers.size(); ++rank) {
    memory.push_back(MemoryOf(options.call, problem, call.buffers[rank]));
    Touch(call.scratch[rank], problem);
  }
  if (!options.overlaps()) {
    RunGemm(WholeProduct(problem, memory[0]), /*num_threads=*/1);
    FinishProduct(problem, memory[0], memory[0].lhs_scales);
    return;
  }
  if (!has_all_ranks) return;  // other ranks' memory is elsewhere
  problem.config = OnGpus(problem.config);
  problem.shares_only_buffers = true;
  const int64_t buffer_bytes = BufferBytes(problem);
  std::vector<std::unique_ptr<char[]>> channels;
  std::vector<std::unique_ptr<Contribution>> ranks;
  for (RankMemory& of_rank : memory) {
    of_rank.buffer = channels.emplace_back(new char[buffer_bytes]).get();
    ranks.push_back(std::make_unique<OverlapContribution>(problem, of_rank));
  }
  RunSchedule(problem, /*buffer_id=*/0, ranks);
}

}  // namespace cpd
