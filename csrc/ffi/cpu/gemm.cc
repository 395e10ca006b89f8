// XLA FFI handler of GEMMs, alone or overlapped with communication, on CPU.
#include "gemm/gemm.h"

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ffi/common.h"
#include "ffi/cpu/call_site.h"
#include "ffi/gemm_call.h"
#include "gemm/blas.h"
#include "gemm/plan_overlap.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace cpd {
namespace {

ffi::Future Gemm(const RankCallState<GemmOptions>& state, const CallingRank& calling,
                 ffi::ThreadPool, const ffi::RemainingArgs& args,
                 const ffi::RemainingRets& results) {
  const GemmOptions& options = state.options;
  std::vector<ffi::AnyBuffer> arrays;
  if (const Status status = ReadArrays(options.op, args, results, &arrays); !status.ok()) {
    return Failed(status);
  }
  const GemmBuffers buffers = BuffersOf(arrays);
  Exchange exchange;
  exchange.op = options.num_ranks > 0 ? options.OverAxis() : options.op;
  if (!BlasIsLoaded()) {
    return Failed(Status::Invalid(exchange.op,
                                  ": no BLAS is loaded. Call it through "
                                  "jax_cp_dispatch."));
  }
  OverlapProblem problem;
  if (const Status status = Describe(exchange.op, options, buffers, &problem); !status.ok()) {
    return Failed(status);  // the same on every rank: shapes are part of the program
  }
  const auto num_threads = static_cast<int>(options.num_threads);
  for (const auto& result : {buffers.output, buffers.aux_out, buffers.workspace}) {
    PreferHugePages(result.untyped_data(), NumBytes(result));
  }
  auto promise = std::make_shared<ffi::Promise>();
  ffi::Future future(*promise);
  if (problem.config.type == CommType::kNone) {
    const RankMemory memory = MemoryOf(options, problem, buffers);
    RunGemm(WholeProduct(problem, memory), num_threads);
    FinishProduct(problem, memory, memory.lhs_scales);
    promise->SetAvailable();
    return future;
  }
  exchange.num_ranks = static_cast<int>(options.num_ranks);
  Transport* transport = nullptr;
  if (const Status status = state.site.Describe(calling, &exchange, &transport); !status.ok()) {
    return Failed(status);
  }
  exchange.deadline = std::chrono::milliseconds(options.deadline_ms);
  Completion completion = CompleteWith(promise, nullptr);
  const int64_t buffer_id = options.comm_overlap_id;
  if (buffer_id != 0) {
    const Status status = ConfigureByBuffer(exchange.op, buffer_id, &problem);
    if (!status.ok()) {
      transport->Refuse(exchange, status, std::move(completion));
      return future;
    }
  }
  exchange.planner = [exchange, problem, buffer_id, num_threads](const auto& ranks,
                                                                 WorkList* work) {
    const auto gemm = [num_threads](const GemmTask& task) { RunGemm(task, num_threads); };
    return PlanOverlap(exchange, problem, buffer_id, gemm, ranks, work);
  };
  // The signature contains everything about ranks of other processes.
  exchange.reader = [problem](std::string_view) {
    RankMemory memory;
    memory.is_elsewhere = true;
    return std::make_unique<OverlapContribution>(problem, memory);
  };
  auto mine = std::make_unique<OverlapContribution>(problem, MemoryOf(options, problem, buffers));
  transport->Join(exchange, calling.rank, std::move(mine), std::move(completion), /*num_helpers=*/0,
                  {});
  return future;
}

}  // namespace

std::vector<Target> GemmTargets() {
  return {RankTarget<GemmOptions, Gemm>("jax_cp_dispatch.gemm")};
}

}  // namespace cpd
