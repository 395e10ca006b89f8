// The arrays of a GEMM's custom call: reads them in their order.
#include "ffi/gemm_call.h"

#include <algorithm>
#include <limits>

#include "gemm/overlap_problem.h"
#include "numerics/rows.h"

namespace ffi = xla::ffi;

namespace cpd {

Status ReadArrays(const std::string& op, const ffi::RemainingArgs& args,
                  const ffi::RemainingRets& results, std::vector<ffi::AnyBuffer>* arrays) {
  constexpr size_t kNumArgs = 7, kNumResults = 7;
  if (args.size() != kNumArgs || results.size() != kNumResults) {
    return NotOurs(op, "their number is wrong");
  }
  for (size_t i = 0; i < kNumArgs; ++i) {
    const auto arg = args.get<ffi::AnyBuffer>(i);
    if (!arg.has_value()) return NotOurs(op, "one is not an array");
    arrays->push_back(*arg);
  }
  for (size_t i = 0; i < kNumResults; ++i) {
    auto result = results.get<ffi::AnyBuffer>(i);
    if (!result.has_value()) return NotOurs(op, "a result is not an array");
    arrays->push_back(**result);
  }
  return {};
}

GemmBuffers BuffersOf(const std::vector<ffi::AnyBuffer>& arrays) {
  const auto& a = arrays;
  return {a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13]};
}

// ---- One call of the GEMM handler: its attributes, and the problem that they describe.

namespace {

// The range of the BLAS's integers. Products of two collapsed dimensions stay below 2^62.
constexpr int64_t kMost = std::numeric_limits<int>::max();

constexpr char kTooLarge[] =
    "a collapsed dimension, or the number of gathered rows, is above 2**31 - 1, the largest "
    "integer "
    "of the BLAS";

struct Shape2D {
  int64_t rows, columns;

  bool is_usable() const { return rows <= kMost && columns <= kMost; }
};

// Dimensions that overflow become the largest integer.
Shape2D Collapse(const ffi::AnyBuffer& buffer, int64_t boundary) {
  Shape2D shape{1, 1};
  const auto dims = buffer.dimensions();
  for (size_t i = 0; i < dims.size(); ++i) {
    int64_t& size = static_cast<int64_t>(i) < boundary ? shape.rows : shape.columns;
    if (dims[i] < 0 || __builtin_mul_overflow(size, dims[i], &size)) {
      size = std::numeric_limits<int64_t>::max();
      if (dims[i] < 0) break;
    }
  }
  return shape;
}

// -1 if its elements do not fill rows of that many columns.
int64_t NumRows(const ffi::AnyBuffer& buffer, int64_t num_columns) {
  const int64_t count = NumElements(buffer);
  return num_columns > 0 && count >= 0 && count % num_columns == 0 ? count / num_columns : -1;
}

// All of these return the first violated invariant of a call, or nullptr.

const char* WrongAttribute(const GemmOptions& options) {
  constexpr int64_t kMostSplits = 1 << 20;   // each has its own signals
  constexpr int64_t kMostBatches = 1 << 20;  // each has its own copies
  const OverlapProblem& p = options.problem;
  const auto type = static_cast<CommType>(options.comm_type);
  const auto method = static_cast<CommMethod>(options.comm_overlap_method);
  if (options.comm_type < 0 || type > CommType::kAllGather || options.comm_overlap_method < 0 ||
      method > CommMethod::kRingExchange || options.scaling_mode < 0 || options.scaling_mode > 3) {
    return "comm_type, comm_overlap_method or scaling_mode is out of range";
  }
  if (options.num_threads < 1 || options.num_threads > kMostThreads) {
    return "num_threads is out of range";
  }
  if (type == CommType::kNone) {
    return method == CommMethod::kNone ? nullptr : "a method needs a comm_type";
  }
  if (type == CommType::kAllGather && method == CommMethod::kPipeline) {
    return "a pipeline cannot gather";
  }
  if (p.num_ranks() == 0 || p.num_ranks() != options.num_ranks) {
    return "row_counts needs one count per rank";
  }
  int64_t num_rows = 0;
  for (const int64_t count : p.rows.counts) {
    if (count < 0 || count > kMost - num_rows) return "row_counts are negative, or above 2**31 - 1";
    num_rows += count;
  }
  if (p.config.num_splits < 1 || p.config.num_splits > kMostSplits || p.rows.num_batches < 1 ||
      p.rows.num_batches > kMostBatches) {
    return "num_splits and num_batches need to be at least 1, and at most 2**20";
  }
  if (!options.HasDeadline()) return "deadline_ms is out of range";
  if (p.config.aggregate && p.num_ranks() % 2 != 0) return "pairs need an even number of ranks";
  if (p.in_ring_order && p.gathers_to_aux) return "aux_out cannot be both own and gathered rows";
  const bool is_partial = type == CommType::kReduceScatter || method == CommMethod::kBulk;
  if (p.fuse_gelu && is_partial) return "GELU needs complete sums";
  return nullptr;
}

// One side has the rows of all ranks, the other has capacity for the rows of each rank.
const char* WrongRows(const GemmBuffers& buffers, Shape2D aux, OverlapProblem* problem) {
  OverlapProblem& p = *problem;
  const bool is_bulk = p.config.is_bulk(), gathers = p.config.type == CommType::kAllGather;
  const int64_t batches = p.rows.num_batches, total = batches * p.rows.total();
  const int64_t rows_in = is_bulk ? aux.rows : p.m;
  const int64_t rows_out =
      is_bulk ? NumRows(buffers.aux_out, aux.columns) : NumRows(buffers.output, p.n);
  const int64_t alone = gathers ? rows_in : rows_out, together = gathers ? rows_out : rows_in;
  p.rows.capacity = alone / batches;
  if (is_bulk) {
    p.aux_width = aux.columns;
    const bool is_supported = gathers ? ElementBytes(p.aux_type) > 0
                                      : SumIsSupported({p.aux_type, AccumulationType(p.aux_type)});
    if (!is_supported || buffers.aux_out.element_type() != buffers.aux_in.element_type()) {
      return "the types of aux_in and aux_out are not supported";
    }
  }
  const int64_t most = *std::max_element(p.rows.counts.begin(), p.rows.counts.end());
  if (alone < 0 || alone > kMost || p.rows.capacity * batches != alone || most > p.rows.capacity ||
      together != total) {
    return "row counts do not fit the arrays";
  }
  if (gathers && !is_bulk) p.m = total;
  return p.m > kMost ? kTooLarge : nullptr;
}

const char* WrongEpilogue(const GemmOptions& options, const GemmBuffers& buffers,
                          const OverlapProblem& p) {
  if (options.fuse_bias &&
      !IsArray(options.grad ? buffers.bias_grad : buffers.bias, p.output_type, p.n)) {
    return "the bias or its gradient needs as many elements as there are columns";
  }
  if (p.fuse_gelu && !IsArray(options.grad ? buffers.gelu_input : buffers.pre_gelu_out,
                              p.output_type, p.m * p.n)) {
    return "pre_gelu needs the output's shape and type";
  }
  const bool is_ring = p.config.method == CommMethod::kRingExchange;
  if (p.config.type == CommType::kAllGather && (p.gathers_to_aux || (is_ring && p.in_ring_order))) {
    const int64_t rows = p.gathers_to_aux ? p.m : p.rows.num_batches * p.rows.capacity;
    if (NumElements(buffers.aux_out) != rows * p.k ||
        buffers.aux_out.element_type() != buffers.lhs.element_type()) {
      return "aux_out needs the rows of lhs that the call returns";
    }
  }
  return nullptr;
}

const char* WrongScales(const GemmBuffers& buffers, const OverlapProblem& p) {
  if (IsByteFloat(p.lhs_type) != (p.scaling != Scaling::kNone))
    return "8-bit operands need scales, and others take none";
  if (p.scaling == Scaling::kTensor && !(IsArray(buffers.lhs_scale_inv, DataType::kF32, 1) &&
                                         IsArray(buffers.rhs_scale_inv, DataType::kF32, 1))) {
    return "tensor scales are one float32 per operand";
  }
  if (p.scaling != Scaling::kBlocks) return nullptr;
  if (p.k % Scales::kBlock != 0) return "the contracted size needs to be a multiple of 32";
  const int64_t blocks = (p.k / Scales::kBlock + kScalesInTile - 1) / kScalesInTile * kScalesInTile;
  const auto lines = [](int64_t count) {
    return (count + kLinesInTile - 1) / kLinesInTile * kLinesInTile;
  };
  const bool gathers = p.config.gathers_lhs();
  const int64_t own = gathers ? p.rows.num_batches * p.rows.capacity : p.m;
  if (!IsArray(buffers.lhs_scale_inv, DataType::kU8, lines(own) * blocks) ||
      !IsArray(buffers.rhs_scale_inv, DataType::kU8, lines(p.n) * blocks)) {
    return "block scales need to be padded";
  }
  const auto fits = [&](const auto& tiles, int64_t count) {
    return tiles.element_type() != ffi::U8 || IsArray(tiles, DataType::kU8, lines(count) * blocks);
  };
  if (!fits(buffers.lhs_swizzled, p.m) || !fits(buffers.rhs_swizzled, p.n)) {
    return "swizzled scales need whole tiles";
  }
  if (gathers && !p.gathers_to_aux && buffers.lhs_swizzled.element_type() == ffi::U8) {
    return "swizzled scales of gathered rows need the gathered rows";
  }
  return nullptr;
}

char* Data(const ffi::AnyBuffer& buffer) { return static_cast<char*>(buffer.untyped_data()); }

}  // namespace

void ReadOptions(AttributeReader* attributes, GemmOptions* options) {
  AttributeReader& a = *attributes;
  GemmOptions& o = *options;
  OverlapProblem& p = o.problem;
  o.Read(attributes);
  a.Read("num_threads", &o.num_threads);
  a.Read("scaling_mode", &o.scaling_mode);
  a.Read("comm_overlap_method", &o.comm_overlap_method);
  a.Read("comm_type", &o.comm_type);
  a.Read("comm_overlap_id", &o.comm_overlap_id);
  a.Read("num_splits", &p.config.num_splits);
  a.Read("atomic", &p.config.atomic);
  a.Read("overlap_first_gemm", &p.config.overlap_first_gemm);
  a.Read("aggregate", &p.config.aggregate);
  a.Read("copies", &p.config.copies);
  a.Read("lhs_axis_boundary", &o.lhs_axis_boundary);
  a.Read("rhs_axis_boundary", &o.rhs_axis_boundary);
  a.Read("aux_axis_boundary", &o.aux_axis_boundary);
  a.Read("lhs_transposed", &p.lhs_transposed);
  a.Read("rhs_transposed", &p.rhs_transposed);
  a.Read("fuse_bias", &o.fuse_bias);
  a.Read("fuse_gelu", &p.fuse_gelu);
  a.Read("grad", &o.grad);
  a.Read("row_counts", &p.rows.counts);
  a.Read("num_batches", &p.rows.num_batches);
  a.Read("in_ring_order", &p.in_ring_order);
  a.Read("gathers_to_aux", &p.gathers_to_aux);
}

Status Describe(const std::string& op, const GemmOptions& options, const GemmBuffers& buffers,
                OverlapProblem* problem) {
  const auto wrong = [&]() -> const char* {
    if (const char* attribute = WrongAttribute(options)) return attribute;
    constexpr Scaling scaling[] = {Scaling::kNone, Scaling::kTensor, Scaling::kTensor,
                                   Scaling::kBlocks};
    const Shape2D lhs = Collapse(buffers.lhs, options.lhs_axis_boundary);
    const Shape2D rhs = Collapse(buffers.rhs, options.rhs_axis_boundary);
    const Shape2D aux = Collapse(buffers.aux_in, options.aux_axis_boundary);
    OverlapProblem& p = *problem = options.problem;
    p.config.type = static_cast<CommType>(options.comm_type);
    p.config.method = static_cast<CommMethod>(options.comm_overlap_method);
    p.lhs_type = ToRealType(buffers.lhs.element_type());
    p.rhs_type = ToRealType(buffers.rhs.element_type());
    p.output_type = ToRealType(buffers.output.element_type());
    p.aux_type = ToRealType(buffers.aux_in.element_type());
    p.partial_type = ToRealType(buffers.workspace.element_type());
    p.scaling = scaling[options.scaling_mode];
    p.k = p.lhs_transposed ? lhs.rows : lhs.columns;
    p.n = p.rhs_transposed ? rhs.rows : rhs.columns;
    p.m = p.lhs_transposed ? lhs.columns : lhs.rows;
    if (!lhs.is_usable() || !rhs.is_usable() || !aux.is_usable()) return kTooLarge;
    if ((p.rhs_transposed ? rhs.columns : rhs.rows) != p.k) {
      return "lhs and rhs do not have the same contracted size";
    }
    const bool sums = p.config.type == CommType::kReduceScatter && !p.config.is_bulk();
    if (!GemmIsSupported(p.lhs_type, p.rhs_type, p.output_type) ||
        (sums && !GemmIsSupported(p.lhs_type, p.rhs_type, p.partial_type))) {
      return "the element types of operands, output or partial sums are not supported";
    }
    if (p.lhs_transposed && p.config.gathers_lhs()) {
      return "the rows of a transposed lhs cannot be gathered in chunks";
    }
    if ((p.config.type == CommType::kNone || p.config.is_bulk()) &&
        NumRows(buffers.output, p.n) != p.m) {
      return "the output needs the rows of lhs and the columns of rhs";
    }
    if (p.config.type != CommType::kNone) {
      if (const char* rows = WrongRows(buffers, aux, &p)) return rows;
    }
    if (const char* epilogue = WrongEpilogue(options, buffers, p)) return epilogue;
    if (const char* scales = WrongScales(buffers, p)) return scales;
    if (p.config.type != CommType::kNone && options.comm_overlap_id == 0 &&
        NumBytes(buffers.workspace) < BufferBytes(p)) {
      return "the workspace has too few bytes";
    }
    return nullptr;
  }();
  if (wrong == nullptr) return Status::Ok();
  return Status::Invalid(op, ": ", wrong,
                         wrong == kTooLarge ? "." : ". Call it through jax_cp_dispatch.");
}

RankMemory MemoryOf(const GemmOptions& options, const OverlapProblem& problem,
                    const GemmBuffers& buffers) {
  RankMemory memory;
  memory.lhs = Data(buffers.lhs);
  memory.rhs = Data(buffers.rhs);
  memory.aux_in = Data(buffers.aux_in);
  memory.output = Data(buffers.output);
  memory.aux_out = Data(buffers.aux_out);
  memory.buffer = Data(buffers.workspace);
  if (options.fuse_bias) {
    if (options.grad) {
      memory.bias_grad = Data(buffers.bias_grad);
    } else {
      memory.bias = Data(buffers.bias);
    }
  }
  if (problem.fuse_gelu) {
    if (options.grad) {
      memory.gelu_input = Data(buffers.gelu_input);
    } else {
      memory.pre_gelu_out = Data(buffers.pre_gelu_out);
    }
  }
  if (problem.scaling == Scaling::kNone) return memory;
  memory.lhs_scales = Data(buffers.lhs_scale_inv);
  memory.rhs_scales = Data(buffers.rhs_scale_inv);
  const auto tiles = [](const ffi::AnyBuffer& buffer) {
    return buffer.element_type() == ffi::U8 ? Data(buffer) : nullptr;
  };
  memory.lhs_swizzled = tiles(buffers.lhs_swizzled);
  memory.rhs_swizzled = tiles(buffers.rhs_swizzled);
  return memory;
}

}  // namespace cpd
