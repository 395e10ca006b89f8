// XLA FFI handler of GEMMs, alone or overlapped with communication, on CPU.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ffi/common.h"
#include "ffi/targets.h"
#include "gemm/blas.h"
#include "gemm/comm_overlap.h"
#include "gemm/overlap_buffers.h"
#include "transport/in_process.h"
#include "transport/team.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace cpd {
namespace {

// Attributes that are known when the program is made.
struct GemmOptions {
  std::string_view op;    // for messages
  std::string_view axis;  // for messages
  int64_t num_ranks;
  int64_t deadline_ms;
  int64_t num_threads;  // of one rank
  int64_t scaling_mode;
  int64_t comm_overlap_method;
  int64_t comm_type;
  int64_t comm_overlap_id;  // 0: the workspace is the buffer
  int64_t num_splits;       // these four: of a call without a registered buffer
  bool atomic;
  bool overlap_first_gemm;
  bool aggregate;
  bool copies;
  int64_t lhs_axis_boundary;
  int64_t rhs_axis_boundary;
  int64_t aux_axis_boundary;
  bool lhs_transposed;
  bool rhs_transposed;
  bool fuse_bias;
  bool fuse_gelu;
  bool grad;
  bool use_split_accumulator;
  ffi::Span<const int64_t> row_counts;  // of each rank's chunk, per batch
  int64_t num_batches;
  bool in_ring_order;
  bool gathers_to_aux;
};

// Absent operands and results are one element, which nobody looks at.
struct GemmBuffers {
  ffi::AnyBuffer lhs, rhs, bias, aux_in;
  ffi::AnyBuffer output, aux_out, workspace;
};

struct GemmContribution final : Contribution {
  RankMemory memory;
};

struct Shape2D {
  int64_t rows, columns;
};

Shape2D Collapse(const ffi::AnyBuffer& buffer, int64_t boundary) {
  Shape2D shape{1, 1};
  const auto dims = buffer.dimensions();
  for (size_t i = 0; i < dims.size(); ++i) {
    (static_cast<int64_t>(i) < boundary ? shape.rows : shape.columns) *= dims[i];
  }
  return shape;
}

// -1: its elements do not fill rows of that many columns.
int64_t NumRows(const ffi::AnyBuffer& buffer, int64_t num_columns) {
  const auto count = static_cast<int64_t>(buffer.element_count());
  return num_columns > 0 && count % num_columns == 0 ? count / num_columns : -1;
}

char* Data(const ffi::AnyBuffer& buffer) { return static_cast<char*>(buffer.untyped_data()); }

std::string Text(Shape2D shape) {
  return "[" + std::to_string(shape.rows) + ", " + std::to_string(shape.columns) + "]";
}

// Of what Python never passes; nullptr: all is well.
const char* WrongAttribute(const GemmOptions& options) {
  const auto type = static_cast<CommType>(options.comm_type);
  const auto method = static_cast<CommMethod>(options.comm_overlap_method);
  if (options.comm_type < 0 || type > CommType::kAllGather || options.comm_overlap_method < 0 ||
      method > CommMethod::kRingExchange) {
    return "comm_type or comm_overlap_method is out of range";
  }
  if (type == CommType::kNone) {
    return method == CommMethod::kNone ? nullptr : "a method needs a comm_type";
  }
  if (type == CommType::kAllGather && method == CommMethod::kPipeline) {
    return "a pipeline cannot gather";
  }
  if (options.row_counts.size() == 0 ||
      static_cast<int64_t>(options.row_counts.size()) != options.num_ranks) {
    return "row_counts needs one count per rank";
  }
  for (const int64_t count : options.row_counts) {
    if (count < 0) return "a row count is negative";
  }
  if (options.num_splits < 1 || options.num_batches < 1) {
    return "num_splits and num_batches need to be at least 1";
  }
  if (options.aggregate && options.num_ranks % 2 != 0) return "pairs need an even number of ranks";
  return nullptr;
}

// What the shapes say, without memory. Python has checked it; here only what could corrupt memory.
Status Describe(const std::string& op, const GemmOptions& options, const GemmBuffers& buffers,
                OverlapProblem* problem) {
  if (const char* wrong = WrongAttribute(options)) {
    return Status::Invalid(op + ": " + wrong + ". Call it through jax_cp_dispatch.");
  }
  const Shape2D lhs = Collapse(buffers.lhs, options.lhs_axis_boundary);
  const Shape2D rhs = Collapse(buffers.rhs, options.rhs_axis_boundary);
  const Shape2D aux = Collapse(buffers.aux_in, options.aux_axis_boundary);
  OverlapProblem& p = *problem;
  p.config = {static_cast<CommType>(options.comm_type),
              static_cast<CommMethod>(options.comm_overlap_method),
              options.num_splits,
              options.atomic,
              options.overlap_first_gemm,
              options.aggregate,
              options.copies};
  p.lhs_transposed = options.lhs_transposed;
  p.rhs_transposed = options.rhs_transposed;
  p.lhs_type = ToDataType(buffers.lhs.element_type());
  p.rhs_type = ToDataType(buffers.rhs.element_type());
  p.output_type = ToDataType(buffers.output.element_type());
  p.aux_type = ToDataType(buffers.aux_in.element_type());
  p.partial_type = ToDataType(buffers.workspace.element_type());
  p.in_ring_order = options.in_ring_order;
  p.gathers_to_aux = options.gathers_to_aux;
  p.k = p.lhs_transposed ? lhs.rows : lhs.columns;
  p.n = p.rhs_transposed ? rhs.rows : rhs.columns;
  p.m = p.lhs_transposed ? lhs.columns : lhs.rows;
  const int64_t rhs_k = p.rhs_transposed ? rhs.columns : rhs.rows;
  if (rhs_k != p.k) {
    return Status::Invalid(op + ": lhs " + Text(lhs) + " and rhs " + Text(rhs) +
                           " do not have the same contracted size.");
  }
  if (!GemmIsSupported(p.lhs_type, p.rhs_type, p.output_type)) {
    return Status::Invalid(op + ": the element types of operands or output are not supported.");
  }
  const bool is_bulk = p.config.method == CommMethod::kBulk;
  if (p.lhs_transposed && p.config.type == CommType::kAllGather && !is_bulk) {
    return Status::Invalid(op + ": the rows of a transposed lhs are no chunks to gather.");
  }
  const int64_t out_rows = NumRows(buffers.output, p.n);
  if ((p.config.type == CommType::kNone || is_bulk) && out_rows != p.m) {
    return Status::Invalid(op + ": the output does not have " + std::to_string(p.m) + " rows of " +
                           std::to_string(p.n) + " columns.");
  }
  if (p.config.type != CommType::kNone) {
    const int64_t batches = options.num_batches;
    p.rows.num_batches = batches;
    p.rows.counts.assign(options.row_counts.begin(), options.row_counts.end());
    const bool gathers = p.config.type == CommType::kAllGather;
    const int64_t total = batches * p.rows.total();
    const int64_t rows_in = is_bulk ? aux.rows : p.m;
    const int64_t rows_out = is_bulk ? NumRows(buffers.aux_out, aux.columns) : out_rows;
    // One side has the rows of all ranks, the other has room for those of each.
    const int64_t alone = gathers ? rows_in : rows_out, together = gathers ? rows_out : rows_in;
    p.rows.capacity = alone / batches;
    if (is_bulk) p.aux_width = aux.columns;
    if (is_bulk && buffers.aux_out.element_type() != buffers.aux_in.element_type()) {
      return Status::Invalid(op + ": aux_out is of another type than aux_in.");
    }
    const int64_t most = *std::max_element(p.rows.counts.begin(), p.rows.counts.end());
    if (p.rows.num_chunks() != options.num_ranks || p.rows.capacity * batches != alone ||
        most > p.rows.capacity || together != total) {
      return Status::Invalid(op + ": row counts do not fit the arrays, whose collapsed rows are " +
                             std::to_string(rows_in) + " in and " + std::to_string(rows_out) +
                             " out.");
    }
    if (gathers && !is_bulk) p.m = total;
  }
  if (options.fuse_bias && (ToDataType(buffers.bias.element_type()) != p.output_type ||
                            static_cast<int64_t>(buffers.bias.element_count()) != p.n)) {
    return Status::Invalid(op + ": bias needs " + std::to_string(p.n) +
                           " elements of the output's type.");
  }
  const bool is_ring = p.config.method == CommMethod::kRingExchange;
  if (p.config.type == CommType::kAllGather && (p.gathers_to_aux || (is_ring && p.in_ring_order))) {
    const int64_t own = p.rows.num_batches * p.rows.capacity;
    const int64_t need = (p.gathers_to_aux ? p.m : own) * p.k;
    const auto given = static_cast<int64_t>(buffers.aux_out.element_count());
    if (given != need || buffers.aux_out.element_type() != buffers.lhs.element_type()) {
      return Status::Invalid(op + ": aux_out has " + std::to_string(given) +
                             " elements but the call gives back " + std::to_string(need) +
                             " of lhs.");
    }
  }
  if (p.config.type == CommType::kReduceScatter && !is_bulk &&
      !GemmIsSupported(p.lhs_type, p.rhs_type, p.partial_type)) {
    return Status::Invalid(op + ": partial sums are of a type that is not supported.");
  }
  if (p.config.type != CommType::kNone && options.comm_overlap_id == 0) {
    const auto given = static_cast<int64_t>(buffers.workspace.size_bytes());
    if (const int64_t need = BufferBytes(p); given < need) {
      return Status::Invalid(op + ": the workspace has " + std::to_string(given) +
                             " bytes but the call needs " + std::to_string(need) + ".");
    }
  }
  constexpr int64_t kMost = std::numeric_limits<int>::max();
  if (p.m > kMost || p.n > kMost || p.k > kMost) {
    return Status::Invalid(op + ": a collapsed dimension is above 2**31 - 1, the BLAS's integers.");
  }
  return Status::Ok();
}

Status TakeBuffer(const std::string& op, const GemmOptions& options, int64_t group,
                  OverlapProblem* problem, std::shared_ptr<OverlapBufferLease>* lease) {
  OverlapBufferSpec spec;
  Status status = OverlapBuffers::Get().Find(op, options.comm_overlap_id, &spec);
  if (!status.ok()) return status;
  const std::string buffer = "buffer " + std::to_string(options.comm_overlap_id);
  if (spec.config.type != problem->config.type || spec.config.method != problem->config.method ||
      spec.num_ranks != options.num_ranks) {
    return Status::Invalid(op + ": " + buffer + " is for another call: " + spec.parameters + ".");
  }
  const bool gathers = spec.config.type == CommType::kAllGather;
  const bool is_bulk = spec.config.method == CommMethod::kBulk;
  const DataType moved = is_bulk   ? problem->aux_type
                         : gathers ? problem->lhs_type
                                   : problem->partial_type;
  if (spec.type != moved) {
    return Status::Invalid(op + ": " + buffer + " is of another dtype than what the call moves: " +
                           spec.parameters + ".");
  }
  problem->config = spec.config;
  if (const int64_t need = BufferBytes(*problem); need > spec.rank_bytes) {
    return Status::Invalid(op + ": " + buffer + " has " + std::to_string(spec.rank_bytes) +
                           " bytes per rank but the call needs " + std::to_string(need) +
                           ". Create it with a larger buffer_shape.");
  }
  status = OverlapBuffers::Get().Lease(op, options.comm_overlap_id, group, lease);
  if (!status.ok()) return status;
  for (size_t rank = 0; rank < problem->ranks.size(); ++rank) {
    problem->ranks[rank].buffer = (*lease)->memory(static_cast<int>(rank));
  }
  return Status::Ok();
}

// The schedule of one call, and what it holds until it is over.
struct Schedule {
  std::shared_ptr<OverlapBufferLease> lease;
  std::unique_ptr<CommOverlapCore> core;
  std::unique_ptr<Team> team;
  std::vector<int> tasks;
};

Status PlanSchedule(const Exchange& exchange, const GemmOptions& options, OverlapProblem problem,
                    const std::vector<std::unique_ptr<Contribution>>& contributions,
                    WorkList* work) {
  for (const auto& contribution : contributions) {
    problem.ranks.push_back(static_cast<const GemmContribution&>(*contribution).memory);
  }
  auto schedule = std::make_shared<Schedule>();
  if (options.comm_overlap_id != 0) {
    const Status status =
        TakeBuffer(exchange.op, options, exchange.key.group, &problem, &schedule->lease);
    if (!status.ok()) return status;
  }
  const int num_ranks = problem.num_ranks();
  const auto num_threads = static_cast<int>(options.num_threads);
  schedule->core = MakeCommOverlap(
      std::move(problem), [num_threads](const GemmTask& task) { RunGemm(task, num_threads); });
  schedule->team =
      std::make_unique<Team>(exchange.op, static_cast<int>(exchange.key.group), num_ranks,
                             schedule->core->num_signals(), exchange.deadline);
  for (int rank = 0; rank < num_ranks; ++rank) {
    schedule->core->Record(rank, schedule->team->streams(rank));
  }
  schedule->tasks = schedule->team->Tasks();
  work->num_tasks = static_cast<int64_t>(schedule->tasks.size());
  work->tasks_wait = true;
  work->run = [schedule](int64_t task) { schedule->team->Run(schedule->tasks[task]); };
  work->outcome = [schedule] { return schedule->team->status(); };
  if (schedule->lease) {
    work->gate = [schedule](std::function<void()> begin) {
      schedule->lease->Enter(std::move(begin));
    };
  }
  return Status::Ok();
}

RankMemory MemoryOf(const GemmOptions& options, const GemmBuffers& buffers) {
  RankMemory memory;
  memory.lhs = Data(buffers.lhs);
  memory.rhs = Data(buffers.rhs);
  if (options.fuse_bias) memory.bias = Data(buffers.bias);
  memory.aux_in = Data(buffers.aux_in);
  memory.output = Data(buffers.output);
  memory.aux_out = Data(buffers.aux_out);
  memory.buffer = Data(buffers.workspace);
  return memory;
}

void MultiplyAlone(const OverlapProblem& problem, const RankMemory& memory, int num_threads) {
  GemmTask task;
  task.m = problem.m;
  task.n = problem.n;
  task.k = problem.k;
  task.a = {memory.lhs, problem.lhs_type, problem.lhs_transposed ? problem.m : problem.k,
            problem.lhs_transposed};
  task.b = {memory.rhs, problem.rhs_type, problem.rhs_transposed ? problem.k : problem.n,
            problem.rhs_transposed};
  task.c = memory.output;
  task.c_type = problem.output_type;
  task.c_pitch = problem.n;
  task.bias = memory.bias;
  RunGemm(task, num_threads);
}

ffi::Future Gemm(CallSite* site, ffi::RunId run_id, int rank, int64_t group,
                 const GemmOptions& options, const GemmBuffers& buffers) {
  Exchange exchange;
  exchange.op = std::string(options.op);
  if (options.num_ranks > 0) exchange.op += " over axis '" + std::string(options.axis) + "'";
  if (options.scaling_mode != 0 || options.fuse_gelu || options.grad) {
    return Failed(Status::Invalid(exchange.op + ": got " +
                                  (options.scaling_mode != 0 ? "a scaling mode"
                                   : options.fuse_gelu       ? "fuse_gelu"
                                                             : "grad") +
                                  ", which this version does not have yet; it needs "
                                  "scaling_mode=NO_SCALING, fuse_gelu=False and grad=False."));
  }
  if (!BlasIsLoaded()) {
    return Failed(Status::Invalid(exchange.op + ": no BLAS is loaded. Call it through "
                                                "jax_cp_dispatch."));
  }
  OverlapProblem problem;
  if (const Status status = Describe(exchange.op, options, buffers, &problem); !status.ok()) {
    return Failed(status);  // the same on every rank: shapes are part of the program
  }
  auto promise = std::make_shared<ffi::Promise>();
  ffi::Future future(*promise);
  if (problem.config.type == CommType::kNone) {
    MultiplyAlone(problem, MemoryOf(options, buffers), static_cast<int>(options.num_threads));
    promise->SetAvailable();
    return future;
  }
  exchange.key = {run_id.run_id, site->uid, group};
  exchange.num_ranks = static_cast<int>(options.num_ranks);
  exchange.deadline = std::chrono::milliseconds(options.deadline_ms);
  exchange.planner = [exchange, options, problem](const auto& ranks, WorkList* work) {
    return PlanSchedule(exchange, options, problem, ranks, work);
  };
  auto mine = std::make_unique<GemmContribution>();
  mine->memory = MemoryOf(options, buffers);
  InProcessTransport().Join(exchange, rank, std::move(mine), CompleteWith(promise, nullptr),
                            /*num_helpers=*/0, {});
  return future;
}

ffi::Future GemmIn(
    CallSite* site, ffi::RunId run_id, ffi::BufferR0<ffi::S32> rank, ffi::BufferR0<ffi::S32> group,
    ffi::AnyBuffer lhs, ffi::AnyBuffer, ffi::AnyBuffer rhs, ffi::AnyBuffer, ffi::AnyBuffer bias,
    ffi::AnyBuffer, ffi::AnyBuffer aux_in, ffi::Result<ffi::AnyBuffer> output,
    ffi::Result<ffi::AnyBuffer>, ffi::Result<ffi::AnyBuffer>, ffi::Result<ffi::AnyBuffer> aux_out,
    ffi::Result<ffi::AnyBuffer>, ffi::Result<ffi::AnyBuffer>, ffi::Result<ffi::AnyBuffer> workspace,
    std::string_view op, std::string_view axis, int64_t num_ranks, int64_t deadline_ms,
    int64_t num_threads, int64_t scaling_mode, int64_t comm_overlap_method, int64_t comm_type,
    int64_t comm_overlap_id, int64_t num_splits, bool atomic, bool overlap_first_gemm,
    bool aggregate, bool copies, int64_t lhs_axis_boundary, int64_t rhs_axis_boundary,
    int64_t aux_axis_boundary, bool lhs_transposed, bool rhs_transposed, bool fuse_bias,
    bool fuse_gelu, bool grad, bool use_split_accumulator, ffi::Span<const int64_t> row_counts,
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
    const GemmBuffers buffers{lhs, rhs, bias, aux_in, *output, *aux_out, *workspace};
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
