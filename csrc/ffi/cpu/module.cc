// The Python module with the XLA FFI handlers, the registries of buffers and the planner for CPU.

#include "ffi/module.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "dispatch/dispatch_buffers.h"
#include "ffi/cpu/call_site.h"
#include "gemm/blas.h"
#include "gemm/overlap_problem.h"
#include "gemm/plan_overlap.h"
#include "gpu_schedule/cublaslt.h"
#include "kernels/call.h"
#include "nanobind/nanobind.h"
#include "nanobind/ndarray.h"
#include "nanobind/stl/string.h"
#include "nanobind/stl/tuple.h"
#include "nanobind/stl/vector.h"
#include "planner/placement.h"
#include "planner/problem.h"
#include "transport/transport.h"
#include "transport/transports.h"

namespace nb = nanobind;

namespace cpd {

namespace {

// Raises ValueError.
void Check(const Status& status) {
  if (!status.ok()) throw nb::value_error(status.message.c_str());
}

// ---- Python bindings of the registries of buffers, and of the sizes of memory on GPUs.

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
  const auto [rows, slot_rows, columns] = shape;
  OverlapProblem p;
  p.config = ConfigOf(overlap);
  p.rows.counts.resize(std::max<int64_t>(num_ranks, 1));
  p.rows.counts[0] = rows;
  p.rows.capacity = slot_rows;
  p.n = p.k = p.aux_width = columns;
  p.lhs_type = p.aux_type = p.partial_type = FloatType(dtype);
  p.gathers_to_aux = gathers_to_aux;
  // On GPUs even an auxiliary array moves through the buffer.
  p.shares_only_buffers = p.config.is_bulk();
  if (!has_scales) return BufferBytes(p);
  p.scaling = Scaling::kTensor;
  const int64_t of_tensors = BufferBytes(p);
  p.scaling = Scaling::kBlocks;
  return std::max(of_tensors, BufferBytes(p));
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
        nb::make_tuple(entry.num_created, entry.num_in_use, entry.num_calls, entry.groups.size());
  }
  return buffers;
}

// Of one group; see channel_bytes.
using GroupSizes = std::tuple<int64_t, int64_t, int64_t, bool, std::vector<int64_t>>;

int64_t ChannelBytes(bool is_dispatch, bool has_network, int num_ranks,
                     const std::vector<GroupSizes>& groups) {
  kernels::Call call{};
  call.is_dispatch = is_dispatch;
  call.has_network = has_network;
  call.num_ranks = num_ranks;
  call.num_local = 1;
  for (const auto& [num_tokens, capacity, num_replicas, has_src_offset, row_bytes] : groups) {
    if (call.num_groups == kernels::kMaxOperandGroups) break;
    kernels::OperandGroup& group = call.groups[call.num_groups++];
    group.num_tokens = num_tokens;
    group.capacity = capacity;
    group.num_replicas = num_replicas;
    static const int32_t any = 0;  // there are offsets
    if (has_src_offset) group.src_offset = {&any, IntType::kI32};
    group.first_array = call.num_arrays;
    for (const int64_t bytes : row_bytes) {
      if (call.num_arrays == kernels::kMaxArrays) break;
      call.arrays[call.num_arrays++].in_row_bytes = bytes;
    }
    group.num_arrays = call.num_arrays - group.first_array;
  }
  return kernels::AlignUp(kernels::LayOutChannel(&call));
}

// What both registries offer, under their names for one and for all.
template <typename Registry>
void BindDestruction(nb::module_& m, const char* one, const char* all) {
  m.def(
      one, [](const std::string& op, int64_t id) { Check(Registry::Get().Destroy(op, id)); },
      nb::arg("op"), nb::arg("id"));
  m.def(all, [](const std::string& op) { Check(Registry::Get().DestroyAll(op)); }, nb::arg("op"));
}

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
        OverlapBuffer entry;
        Check(OverlapBuffers::Get().Find(op, id, &entry));
      },
      arg("op"), arg("id"));
  m.def("list_overlap_buffers", &List);
  m.def("overlap_buffer_bytes", &BufferBytesFor, arg("overlap"), nb::kw_only(), arg("num_ranks"),
        arg("shape"), arg("dtype"), arg("has_scales"), arg("gathers_to_aux"),
        "Returns the bytes of one rank. The shape: rows of all ranks, of one rank, and columns.");
  m.def("gemm_scratch_bytes", &ScratchBytes, arg("mnk"), arg("call"), nb::kw_only(),
        arg("has_scales"), "Returns the bytes of one rank on a GPU.");
  m.def("channel_bytes", &ChannelBytes, arg("is_dispatch"), arg("has_network"), arg("num_ranks"),
        arg("groups"),
        "Returns the bytes of a channel in a slab. A group is (num_tokens, capacity, num_replicas, "
        "has_src_offset, row bytes of each array).");
}

// ---- Python bindings of the planner: documents to pieces.

using Pieces = nb::ndarray<nb::numpy, int64_t, nb::ndim<2>>;
using Mask = std::tuple<int64_t, int64_t, int64_t>;  // left, right and chunk; negative: no limit

PairCount PairsOf(const Mask& mask) {
  const auto [left, right, chunk] = mask;
  PairCount pairs;
  pairs.left = left < 0 ? PairCount::kNoLimit : left;
  pairs.right = right < 0 ? PairCount::kNoLimit : right;
  pairs.chunk = chunk;
  return pairs;
}

Mask MaskOf(const PairSum& pairs) {
  const PairCount& first = pairs.terms.front().pairs;
  return Mask(first.left, first.right, first.chunk);
}

// Rows (rank, document, start, end), by rank, document and start.
Pieces RowsOf(const RankPieces& ranks) {
  auto rows = std::make_unique<std::vector<int64_t>>();
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const Piece& piece : ranks[rank]) {
      rows->insert(rows->end(),
                   {static_cast<int64_t>(rank), piece.document, piece.start, piece.end});
    }
  }
  std::vector<int64_t>* data = rows.release();
  const nb::capsule owner(data,
                          [](void* p) noexcept { delete static_cast<std::vector<int64_t>*>(p); });
  return Pieces(data->data(), {data->size() / 4, 4}, owner);
}

// Plans without the interpreter.
template <typename Problem>
Pieces Plan(RankPieces (*plan)(Problem), const Problem& problem) {
  RankPieces ranks;
  {
    nb::gil_scoped_release release;
    ranks = plan(problem);
  }
  return RowsOf(ranks);
}

using Numbers = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::vector<int64_t> ListOf(const Numbers& x) { return {x.data(), x.data() + x.size()}; }

// Requires numbers for each query of the documents that the problem has.
SharedTable TableOf(const std::vector<int64_t>& lengths, const Numbers& pairs_before,
                    const Numbers& first_key, const Numbers& last_key) {
  QueryTable table{{}, ListOf(pairs_before), ListOf(first_key), ListOf(last_key)};
  size_t num_queries = 0;
  for (int64_t length : lengths) {
    table.first_query.push_back(static_cast<int64_t>(num_queries));
    num_queries += static_cast<size_t>(length);
  }
  if (table.pairs_before.size() != num_queries + 1 || table.first_key.size() != num_queries ||
      table.last_key.size() != num_queries) {
    throw nb::value_error("set_table: it needs numbers for each query of `lengths`.");
  }
  return std::make_shared<const QueryTable>(std::move(table));
}

using Times = std::tuple<int64_t, int64_t>;         // of a row inside a node, and between nodes
using Shares = std::tuple<double, double, double>;  // as `ExchangeShare`

int64_t ShareOf(double x) { return static_cast<int64_t>(std::llround(x * ExchangeShare::kAll)); }

Times TimesOf(const RowTime& time) { return {time.inside, time.between}; }
RowTime RowTimeOf(const Times& times) { return {std::get<0>(times), std::get<1>(times)}; }

// The fields that both problems have; the headers of `csrc/planner` describe them.
template <typename Problem>
nb::class_<Problem> BindProblem(nb::module_& m, const char* name) {
  return nb::class_<Problem>(m, name)
      .def(nb::init<>())
      .def_rw("lengths", &Problem::lengths)
      .def_rw("num_ranks", &Problem::num_ranks)
      .def_rw("tolerance_ppm", &Problem::tolerance_ppm)
      .def_rw("speeds", &Problem::speeds)
      .def_rw("ranks_per_node", &Problem::ranks_per_node)
      .def_rw("block", &Problem::block)
      .def_prop_rw(
          "key_time", [](const Problem& x) { return TimesOf(x.key_time); },
          [](Problem& x, const Times& times) { x.key_time = RowTimeOf(times); })
      .def(
          "set_exchanges",
          [](Problem& x, double waiting, const std::vector<Shares>& exchanges) {
            x.waiting = ShareOf(waiting);
            x.exchanges.clear();
            for (const auto& [work, keys, queries] : exchanges) {
              x.exchanges.push_back({ShareOf(work), ShareOf(keys), ShareOf(queries)});
            }
          },
          nb::arg("waiting"), nb::arg("exchanges"),
          "The share of each exchange that waits; of each, its shares of work, keys and queries.")
      .def_prop_rw(
          "pairs", [](const Problem& x) { return MaskOf(x.pairs); },
          [](Problem& x, const Mask& mask) { x.pairs = PairsOf(mask); })
      .def(
          "set_layers",
          [](Problem& x, const std::vector<std::tuple<Mask, int64_t>>& masks) {
            x.pairs.terms.clear();
            for (const auto& [mask, layers] : masks) {
              x.pairs.terms.push_back({PairsOf(mask), layers});
            }
          },
          nb::arg("masks"), "Several masks in place of `pairs`, and how many layers use each.")
      .def(
          "set_table",
          [](Problem& x, const Numbers& pairs_before, const Numbers& first_key,
             const Numbers& last_key) {
            x.table = TableOf(x.lengths, pairs_before, first_key, last_key);
          },
          nb::arg("pairs_before"), nb::arg("first_key"), nb::arg("last_key"),
          "In place of `pairs`: numbers of each query of `lengths`, see `QueryTable`.");
}

void BindPlanner(nb::module_& m) {
  m.def(
      "count_pairs",
      [](const Mask& pairs, int64_t start, int64_t end, int64_t length) {
        return PairsOf(pairs)(start, end, length);
      },
      nb::arg("pairs"), nb::arg("start"), nb::arg("end"), nb::arg("length"),
      "Pairs of the queries [start, end) of a document, as the planner counts them.");
  BindProblem<PlacementProblem>(m, "PlacementProblem")
      .def_rw("tokens_per_rank", &PlacementProblem::tokens_per_rank)
      .def_rw("max_received", &PlacementProblem::max_received);
  BindProblem<QueryProblem>(m, "QueryProblem")
      .def_rw("columns", &QueryProblem::columns)
      .def_rw("columns_per_rank", &QueryProblem::columns_per_rank)
      .def_rw("query_cost", &QueryProblem::query_cost)
      .def_rw("key_cost", &QueryProblem::key_cost)
      .def_prop_rw(
          "query_time", [](const QueryProblem& x) { return TimesOf(x.query_time); },
          [](QueryProblem& x, const Times& times) { x.query_time = RowTimeOf(times); })
      .def_rw("max_queries", &QueryProblem::max_queries)
      .def_rw("max_keys", &QueryProblem::max_keys)
      .def_rw("wanted_piece", &QueryProblem::wanted_piece);
  m.def(
      "place_documents",
      [](const PlacementProblem& problem) { return Plan(&PlaceDocuments, problem); },
      nb::arg("problem"), "Pieces of documents by rank: rows (rank, document, start, end).");
  m.def(
      "move_queries", [](const QueryProblem& problem) { return Plan(&MoveQueries, problem); },
      nb::arg("problem"), "The pieces that each rank computes, in the same form.");
}

// ---- Python bindings of the transport between processes. Python creates the sockets and segments.

[[noreturn]] void Refuse(int process, const std::string& why) {
  throw nb::value_error(
      ("initialize: the segment of process " + std::to_string(process) + " " + why).c_str());
}

// Maps only segments of at least the expected size: reading beyond their end would kill the
// process.
SharedSegment Map(int process, int fd, int64_t num_bytes, bool is_own) {
  struct stat status;
  if (fstat(fd, &status) != 0) Refuse(process, std::string("has no size: ") + std::strerror(errno));
  if (num_bytes <= 0 || status.st_size != num_bytes) {
    Refuse(process, "has " + std::to_string(status.st_size) + " bytes but " +
                        std::to_string(num_bytes) + " were announced.");
  }
  const int protection = is_own ? PROT_READ | PROT_WRITE : PROT_READ;
  void* base = mmap(nullptr, num_bytes, protection, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (base == MAP_FAILED) {
    Refuse(process, "of " + std::to_string(num_bytes) +
                        " bytes cannot be mapped: " + std::strerror(errno) +
                        ". Reduce JAX_CP_DISPATCH_SEGMENT_BYTES in all processes.");
  }
  madvise(base, num_bytes, MADV_DONTDUMP);
  return {process, fd, static_cast<char*>(base), num_bytes};
}

// `others` are of the class Neighbour in _ranks/processes/connect.py.
void Start(int process, int segment_fd, int64_t segment_bytes, const nb::sequence& others) {
  if (SharedMemoryTransport() != nullptr) throw nb::value_error("initialize: called twice.");
  std::vector<SharedSegment> segments;
  std::vector<Peer> peers;
  SharedSegment own = Map(process, segment_fd, segment_bytes, /*is_own=*/true);
  for (const nb::handle other : others) {
    const auto field = [&other](const char* name) { return nb::cast<int64_t>(other.attr(name)); };
    const auto file = [&field](const char* name) { return static_cast<int>(field(name)); };
    const auto number = static_cast<int>(field("process"));
    segments.push_back(Map(number, file("segment_fd"), field("segment_bytes"), /*is_own=*/false));
    peers.push_back({number, field("pid"), file("socket_fd"), file("pid_fd")});
  }
  StartSharedMemory(own, std::move(segments), std::move(peers));
}

void BindProcesses(nb::module_& m) {
  using nb::arg;
  m.def("start_shared_memory", &Start, arg("process"), nb::kw_only(), arg("segment_fd"),
        arg("segment_bytes"), arg("others"),
        "Takes over the file descriptors; afterwards exchanges reach the ranks of the others.");
  m.def("end_programs", &EndPrograms, "Records that no program with calls is being compiled.");
}

}  // namespace
}  // namespace cpd

NB_MODULE(_cpu, m) {
  m.doc() = "XLA FFI handlers on CPU, and the registries of buffers.";
  cpd::BindTargets(m, {cpd::DispatchTargets(), cpd::GemmTargets(), cpd::GroupedGemmTargets()});
  cpd::BindSpans<cpd::SpanRecorder>(m);
  cpd::BindBuffers(m);
  cpd::BindPlanner(m);
  cpd::BindProcesses(m);
  m.def(
      "load_blas",  // SciPy exports its routines as capsules, named by their C signature
      [](nb::capsule sgemm, nb::capsule dgemm) {
        return cpd::LoadBlas(sgemm.data(), dgemm.data());
      },
      nb::kw_only(), nb::arg("sgemm"), nb::arg("dgemm"));
}
