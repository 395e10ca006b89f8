// Python bindings of overlapped GEMMs: the registry of their buffers, the BLAS, recorded spans.
#include "ffi/cpu/comm_gemm.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "ffi/recorded_spans.h"
#include "gemm/blas.h"
#include "gemm/overlap_buffers.h"
#include "gemm/overlap_problem.h"
#include "gpu_schedule/gemm_scratch.h"
#include "nanobind/stl/string.h"
#include "transport/spans.h"

namespace nb = nanobind;

namespace cpd {
namespace {

void Check(const Status& status) {
  if (!status.ok()) throw nb::value_error(status.message.c_str());
}

DataType FloatType(const std::string& name) {
  if (name == "float8_e4m3fn") return DataType::kE4M3;
  if (name == "float8_e5m2") return DataType::kE5M2;
  if (name == "bfloat16") return DataType::kBF16;
  if (name == "float16") return DataType::kF16;
  if (name == "float32") return DataType::kF32;
  if (name == "float64") return DataType::kF64;
  return DataType::kOther;
}

void Create(const std::string& op, int64_t id, int comm_type, int method, int64_t num_splits,
            bool atomic, bool overlap_first_gemm, bool aggregate, bool copies, int64_t num_ranks,
            int64_t rank_bytes, const std::string& dtype, const std::string& parameters) {
  OverlapBufferSpec spec;
  spec.config.type = static_cast<CommType>(comm_type);
  spec.config.method = static_cast<CommMethod>(method);
  spec.config.num_splits = num_splits;
  spec.config.atomic = atomic;
  spec.config.overlap_first_gemm = overlap_first_gemm;
  spec.config.aggregate = aggregate;
  spec.config.copies = copies;
  spec.num_ranks = num_ranks;
  spec.rank_bytes = rank_bytes;
  spec.type = FloatType(dtype);
  spec.parameters = parameters;
  Check(OverlapBuffers::Get().Create(op, id, spec));
}

// The smallest buffer that holds what moves, however 8-bit elements are scaled.
int64_t BufferBytesFor(int comm_type, int method, bool copies, int64_t num_ranks, int64_t rows,
                       int64_t slot_rows, int64_t columns, const std::string& dtype,
                       bool has_scales, bool gathers_to_aux) {
  BufferRoom room;
  room.config.type = static_cast<CommType>(comm_type);
  room.config.method = static_cast<CommMethod>(method);
  room.config.copies = copies;
  room.num_ranks = num_ranks;
  room.rows = rows;
  room.slot_rows = slot_rows;
  room.columns = columns;
  room.type = FloatType(dtype);
  room.gathers_to_aux = gathers_to_aux;
  // On GPUs even an auxiliary array moves through the buffer.
  room.shares_only_buffers = room.config.method == CommMethod::kBulk;
  if (!has_scales) return room.Bytes();
  room.scaling = Scaling::kTensor;
  const int64_t of_tensors = room.Bytes();
  room.scaling = Scaling::kBlocks;
  return std::max(of_tensors, room.Bytes());
}

int64_t ScratchBytes(int64_t m, int64_t n, int64_t k, const std::string& output_dtype,
                     bool has_scales, bool lhs_transposed, bool rhs_transposed, bool fuse_gelu) {
  OverlapProblem problem;
  problem.m = m;
  problem.n = n;
  problem.k = k;
  problem.output_type = FloatType(output_dtype);
  problem.scaling = has_scales ? Scaling::kTensor : Scaling::kNone;
  problem.lhs_transposed = lhs_transposed;
  problem.rhs_transposed = rhs_transposed;
  problem.fuse_gelu = fuse_gelu;
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

// SciPy exports its routines as capsules, named by their C signature.
void* RoutineOf(nb::capsule capsule) { return capsule.data(); }

}  // namespace

void BindCommGemm(nb::module_& m) {
  using nb::arg;
  m.def("create_overlap_buffer", &Create, arg("op"), arg("id"), nb::kw_only(), arg("comm_type"),
        arg("method"), arg("num_splits"), arg("atomic"), arg("overlap_first_gemm"),
        arg("aggregate"), arg("copies"), arg("num_ranks"), arg("rank_bytes"), arg("dtype"),
        arg("parameters"));
  m.def(
      "destroy_overlap_buffer",
      [](const std::string& op, int64_t id) { Check(OverlapBuffers::Get().Destroy(op, id)); },
      arg("op"), arg("id"));
  m.def(
      "destroy_all_overlap_buffers",
      [](const std::string& op) { Check(OverlapBuffers::Get().DestroyAll(op)); }, arg("op"));
  m.def(
      "find_overlap_buffer",
      [](const std::string& op, int64_t id) {
        OverlapBufferEntry entry;
        Check(OverlapBuffers::Get().Find(op, id, &entry));
      },
      arg("op"), arg("id"));
  m.def("list_overlap_buffers", &List);
  m.def("overlap_buffer_bytes", &BufferBytesFor, nb::kw_only(), arg("comm_type"), arg("method"),
        arg("copies"), arg("num_ranks"), arg("rows"), arg("slot_rows"), arg("columns"),
        arg("dtype"), arg("has_scales"), arg("gathers_to_aux"), "Returns the bytes of one rank.");
  m.def("gemm_scratch_bytes", &ScratchBytes, nb::kw_only(), arg("m"), arg("n"), arg("k"),
        arg("output_dtype"), arg("has_scales"), arg("lhs_transposed"), arg("rhs_transposed"),
        arg("fuse_gelu"), "Returns the bytes of one rank on a GPU.");
  m.def(
      "load_blas",
      [](nb::capsule sgemm, nb::capsule dgemm) {
        return LoadBlas(RoutineOf(sgemm), RoutineOf(dgemm));
      },
      nb::kw_only(), arg("sgemm"), arg("dgemm"));
  m.def("start_spans", [] { SpanRecorder::Get().Start(); });
  m.def(
      "stop_spans", [] { return ToPython(SpanRecorder::Get().Stop()); },
      "Returns the spans in the order in which they ended.");
}

}  // namespace cpd
