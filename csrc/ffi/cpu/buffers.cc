// Python bindings of the registries of buffers, and of the sizes of those of GEMMs.
#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>

#include "dispatch/dispatch_buffers.h"
#include "ffi/cpu/bindings.h"
#include "gemm/overlap_buffers.h"
#include "gemm/overlap_problem.h"
#include "gpu_schedule/gemm_scratch.h"
#include "nanobind/stl/string.h"
#include "nanobind/stl/tuple.h"

namespace nb = nanobind;

namespace cpd {
namespace {

DataType FloatType(const std::string& name) {
  if (name == "float8_e4m3fn") return DataType::kE4M3;
  if (name == "float8_e5m2") return DataType::kE5M2;
  if (name == "bfloat16") return DataType::kBF16;
  if (name == "float16") return DataType::kF16;
  if (name == "float32") return DataType::kF32;
  if (name == "float64") return DataType::kF64;
  return DataType::kOther;
}

template <typename T>
T Field(const nb::handle& from, const char* name) {
  return nb::cast<T>(from.attr(name));
}

// The way of communicating of a CommOverlapConfig or an Overlap, of jax_cp_dispatch/comm_gemm.
OverlapConfig ConfigOf(const nb::handle& overlap) {
  OverlapConfig config;
  config.type = static_cast<CommType>(Field<int>(overlap, "comm_type"));
  config.method = static_cast<CommMethod>(Field<int>(overlap, "method"));
  config.copies = Field<bool>(overlap, "use_ce");
  return config;
}

// `config` is a CommOverlapConfig.
void Create(const std::string& op, const nb::object& config) {
  OverlapBufferSpec spec;
  spec.config = ConfigOf(config);
  spec.config.num_splits = Field<int64_t>(config, "num_splits");
  spec.config.atomic = Field<bool>(config, "atomic_gemm");
  spec.config.overlap_first_gemm = Field<bool>(config, "rs_overlap_first_gemm");
  spec.config.aggregate = Field<bool>(config, "aggregate_ag");
  spec.num_ranks = Field<int64_t>(config, "tp_size");
  spec.rank_bytes = Field<int64_t>(config, "rank_bytes");
  spec.type = FloatType(Field<std::string>(config, "buffer_dtype"));
  spec.parameters = Field<std::string>(config, "text");
  Check(OverlapBuffers::Get().Create(op, Field<int64_t>(config, "id"), spec));
}

using Sizes = std::tuple<int64_t, int64_t, int64_t>;

// The smallest buffer that holds what moves, however 8-bit elements are scaled.
int64_t BufferBytesFor(const nb::object& overlap, int64_t num_ranks, const Sizes& shape,
                       const std::string& dtype, bool has_scales, bool gathers_to_aux) {
  BufferRoom room;
  room.config = ConfigOf(overlap);
  room.num_ranks = num_ranks;
  std::tie(room.rows, room.slot_rows, room.columns) = shape;
  room.type = FloatType(dtype);
  room.gathers_to_aux = gathers_to_aux;
  // On GPUs even an auxiliary array moves through the buffer.
  room.shares_only_buffers = room.config.is_bulk();
  if (!has_scales) return room.Bytes();
  room.scaling = Scaling::kTensor;
  const int64_t of_tensors = room.Bytes();
  room.scaling = Scaling::kBlocks;
  return std::max(of_tensors, room.Bytes());
}

// `call` is a GemmCall.
int64_t ScratchBytes(const Sizes& mnk, const nb::object& call, bool has_scales) {
  OverlapProblem problem;
  std::tie(problem.m, problem.n, problem.k) = mnk;
  problem.output_type = FloatType(Field<std::string>(call, "out_dtype"));
  problem.scaling = has_scales ? Scaling::kTensor : Scaling::kNone;
  problem.lhs_transposed = Field<bool>(call, "lhs_transposed");
  problem.rhs_transposed = Field<bool>(call, "rhs_transposed");
  problem.fuse_gelu = Field<bool>(call, "fuse_gelu");
  GemmScratch scratch;
  return GemmScratch::Lay(problem, nullptr, &scratch);
}

// id -> (num_created, num_in_use, num_calls, num_groups)
nb::dict List() {
  nb::dict buffers;
  for (const auto& [id, entry] : OverlapBuffers::Get().List()) {
    buffers[nb::int_(id)] =
        nb::make_tuple(entry.num_created, entry.num_in_use, entry.num_calls, entry.num_groups);
  }
  return buffers;
}

// What both registries offer, under their names for one and for all.
template <typename Registry>
void BindDestruction(nb::module_& m, const char* one, const char* all) {
  m.def(
      one, [](const std::string& op, int64_t id) { Check(Registry::Get().Destroy(op, id)); },
      nb::arg("op"), nb::arg("id"));
  m.def(all, [](const std::string& op) { Check(Registry::Get().DestroyAll(op)); }, nb::arg("op"));
}

}  // namespace

void BindBuffers(nb::module_& m) {
  using nb::arg;
  m.def("create_buffer", [] { return DispatchBuffers::Get().Create(); }, "Returns its id.");
  BindDestruction<DispatchBuffers>(m, "destroy_buffer", "destroy_all_buffers");
  m.def(
      "find_buffer",
      [](const std::string& op, int64_t id) {
        BufferUsage usage;
        Check(DispatchBuffers::Get().Find(op, id, &usage));
        return usage.num_in_use;
      },
      arg("op"), arg("id"), "The calls in flight that use it; each rank counts separately.");
  m.def("create_overlap_buffer", &Create, arg("op"), arg("config"));
  BindDestruction<OverlapBuffers>(m, "destroy_overlap_buffer", "destroy_all_overlap_buffers");
  m.def(
      "find_overlap_buffer",
      [](const std::string& op, int64_t id) {
        OverlapBufferEntry entry;
        Check(OverlapBuffers::Get().Find(op, id, &entry));
      },
      arg("op"), arg("id"));
  m.def("list_overlap_buffers", &List);
  m.def("overlap_buffer_bytes", &BufferBytesFor, arg("overlap"), nb::kw_only(), arg("num_ranks"),
        arg("shape"), arg("dtype"), arg("has_scales"), arg("gathers_to_aux"),
        "Returns the bytes of one rank. The shape: rows of all ranks, of one rank, and columns.");
  m.def("gemm_scratch_bytes", &ScratchBytes, arg("mnk"), arg("call"), nb::kw_only(),
        arg("has_scales"), "Returns the bytes of one rank on a GPU.");
}

}  // namespace cpd
