// XLA FFI handler of GEMMs, alone or overlapped with communication, on CPU.
#include "gemm/gemm.h"

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "ffi/common.h"
#include "ffi/gemm_call.h"
#include "ffi/targets.h"
#include "gemm/blas.h"
#include "gemm/overlap_contribution.h"
#include "gemm/plan_overlap.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace cpd {
namespace {

ffi::Future Gemm(CallSite* site, ffi::RunId run_id, int rank, int64_t group,
                 const GemmOptions& options, const GemmBuffers& buffers) {
  Exchange exchange;
  exchange.op = std::string(options.op);
  if (options.num_ranks > 0) exchange.op += " over axis '" + std::string(options.axis) + "'";
  if (!BlasIsLoaded()) {
    return Failed(Status::Invalid(exchange.op + ": no BLAS is loaded. Call it through "
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
  if (const Status status = site->Describe(run_id.run_id, group, &exchange); !status.ok()) {
    return Failed(status);
  }
  exchange.deadline = std::chrono::milliseconds(options.deadline_ms);
  Transport& transport = TransportFor(exchange);
  Completion completion = CompleteWith(promise, nullptr);
  const int64_t buffer_id = options.comm_overlap_id;
  if (buffer_id != 0) {
    const Status status = ConfigureByBuffer(exchange.op, buffer_id, &problem);
    if (!status.ok()) {
      transport.Refuse(exchange, status, std::move(completion));
      return future;
    }
  }
  exchange.planner = [exchange, problem, buffer_id, num_threads](const auto& ranks,
                                                                 WorkList* work) {
    const auto gemm = [num_threads](const GemmTask& task) { RunGemm(task, num_threads); };
    return PlanOverlap(exchange, problem, buffer_id, gemm, ranks, work);
  };
  // All that there is to know of a rank elsewhere is part of the signature.
  exchange.reader = [problem](std::string_view) {
    RankMemory memory;
    memory.is_elsewhere = true;
    return std::make_unique<OverlapContribution>(problem, memory);
  };
  auto mine = std::make_unique<OverlapContribution>(problem, MemoryOf(options, problem, buffers));
  transport.Join(exchange, rank, std::move(mine), std::move(completion), /*num_helpers=*/0, {});
  return future;
}

ffi::Future GemmIn(CallSite* site, ffi::RunId run_id, ffi::BufferR0<ffi::S32> rank,
                   ffi::BufferR0<ffi::S32> group, ffi::AnyBuffer lhs, ffi::AnyBuffer lhs_scale_inv,
                   ffi::AnyBuffer rhs, ffi::AnyBuffer rhs_scale_inv, ffi::AnyBuffer bias,
                   ffi::AnyBuffer gelu_input, ffi::AnyBuffer aux_in,
                   ffi::Result<ffi::AnyBuffer> output, ffi::Result<ffi::AnyBuffer> bias_grad,
                   ffi::Result<ffi::AnyBuffer> pre_gelu_out, ffi::Result<ffi::AnyBuffer> aux_out,
                   ffi::Result<ffi::AnyBuffer> lhs_swizzled,
                   ffi::Result<ffi::AnyBuffer> rhs_swizzled, ffi::Result<ffi::AnyBuffer> workspace,
                   std::string_view op, std::string_view axis, std::string_view,
                   ffi::Span<const int64_t>, int64_t num_ranks, int64_t deadline_ms,
                   int64_t num_threads, int64_t scaling_mode, int64_t comm_overlap_method,
                   int64_t comm_type, int64_t comm_overlap_id, int64_t num_splits, bool atomic,
                   bool overlap_first_gemm, bool aggregate, bool copies, int64_t lhs_axis_boundary,
                   int64_t rhs_axis_boundary, int64_t aux_axis_boundary, bool lhs_transposed,
                   bool rhs_transposed, bool fuse_bias, bool fuse_gelu, bool grad,
                   bool use_split_accumulator, ffi::Span<const int64_t> row_counts,
                   int64_t num_batches, bool in_ring_order, bool gathers_to_aux) {
  try {
    const GemmOptions options{op,
                              axis,
                              num_ranks,
                              deadline_ms,
                              num_threads,
                              scaling_mode,
                              comm_overlap_method,
                              comm_type,
                              comm_overlap_id,
                              num_splits,
                              atomic,
                              overlap_first_gemm,
                              aggregate,
                              copies,
                              lhs_axis_boundary,
                              rhs_axis_boundary,
                              aux_axis_boundary,
                              lhs_transposed,
                              rhs_transposed,
                              fuse_bias,
                              fuse_gelu,
                              grad,
                              use_split_accumulator,
                              row_counts,
                              num_batches,
                              in_ring_order,
                              gathers_to_aux};
    const GemmBuffers buffers{lhs,           lhs_scale_inv, rhs,      rhs_scale_inv,
                              bias,          gelu_input,    aux_in,   *output,
                              *bias_grad,    *pre_gelu_out, *aux_out, *lhs_swizzled,
                              *rhs_swizzled, *workspace};
    return Gemm(site, run_id, *rank.typed_data(), *group.typed_data(), options, buffers);
  } catch (const std::exception& error) {  // no memory or no thread: this rank did not arrive
    return Failed({StatusCode::kInternal, std::string("jax_cp_dispatch: ") + error.what()});
  }
}

XLA_FFI_DEFINE_HANDLER(GemmHandler, GemmIn,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::State<CallSite>>()
                           .Ctx<ffi::RunId>()               // the same on all ranks
                           .Arg<ffi::BufferR0<ffi::S32>>()  // rank: place on the axis
                           .Arg<ffi::BufferR0<ffi::S32>>()  // group: place on the other axes
                           .Arg<ffi::AnyBuffer>()           // lhs
                           .Arg<ffi::AnyBuffer>()           // lhs_scale_inv
                           .Arg<ffi::AnyBuffer>()           // rhs
                           .Arg<ffi::AnyBuffer>()           // rhs_scale_inv
                           .Arg<ffi::AnyBuffer>()           // bias [n]
                           .Arg<ffi::AnyBuffer>()           // gelu_input
                           .Arg<ffi::AnyBuffer>()           // aux_in
                           .Ret<ffi::AnyBuffer>()           // output
                           .Ret<ffi::AnyBuffer>()           // bias_grad
                           .Ret<ffi::AnyBuffer>()           // pre_gelu_out
                           .Ret<ffi::AnyBuffer>()           // aux_out
                           .Ret<ffi::AnyBuffer>()           // lhs_swizzled
                           .Ret<ffi::AnyBuffer>()           // rhs_swizzled
                           .Ret<ffi::AnyBuffer>()  // workspace; its type is that of partial sums
                           .Attr<std::string_view>("op")
                           .Attr<std::string_view>("axis")
                           .Attr<std::string_view>("signature")  // this one and the next are the
                           .Attr<ffi::Span<const int64_t>>("processes")  // call site's
                           .Attr<int64_t>("num_ranks")
                           .Attr<int64_t>("deadline_ms")
                           .Attr<int64_t>("num_threads")
                           .Attr<int64_t>("scaling_mode")
                           .Attr<int64_t>("comm_overlap_method")
                           .Attr<int64_t>("comm_type")
                           .Attr<int64_t>("comm_overlap_id")
                           .Attr<int64_t>("num_splits")
                           .Attr<bool>("atomic")
                           .Attr<bool>("overlap_first_gemm")
                           .Attr<bool>("aggregate")
                           .Attr<bool>("copies")
                           .Attr<int64_t>("lhs_axis_boundary")
                           .Attr<int64_t>("rhs_axis_boundary")
                           .Attr<int64_t>("aux_axis_boundary")
                           .Attr<bool>("lhs_transposed")
                           .Attr<bool>("rhs_transposed")
                           .Attr<bool>("fuse_bias")
                           .Attr<bool>("fuse_gelu")
                           .Attr<bool>("grad")
                           .Attr<bool>("use_split_accumulator")
                           .Attr<ffi::Span<const int64_t>>("row_counts")
                           .Attr<int64_t>("num_batches")
                           .Attr<bool>("in_ring_order")
                           .Attr<bool>("gathers_to_aux"));

}  // namespace

std::vector<Target> GemmTargets() { return {{"jax_cp_dispatch.gemm", GemmHandler}}; }

}  // namespace cpd
