// What the schedules share: the chunks of a product, and how rows are gathered and summed.
#include "gemm/comm_overlap.h"

#include <algorithm>
#include <numeric>

#include "numerics/sum_rows.h"

namespace cpd {
namespace {

// out = the sum of the sources, in their order (+ bias), rounded once.
void SumAndRound(const std::vector<const char*>& sources, DataType type, const char* bias,
                 int64_t num_elements, DataType out_type, char* out) {
  const DataType sum_type = AccumulationType(type);
  if (sum_type == out_type && bias == nullptr) {
    SumRows({type, sum_type}, sources, num_elements, out);
    return;
  }
  constexpr int64_t kTile = 2048;  // the sums stay in the first-level cache
  alignas(64) char sums[kTile * sizeof(double)];
  std::vector<const char*> tile(sources.size());
  const int64_t bytes = ElementBytes(type), out_bytes = ElementBytes(out_type);
  for (int64_t begin = 0; begin < num_elements; begin += kTile) {
    const int64_t n = std::min(kTile, num_elements - begin);
    for (size_t i = 0; i < tile.size(); ++i) tile[i] = sources[i] + begin * bytes;
    SumRows({type, sum_type}, tile, n, sums);
    AddBiasAndRound(sums, bias ? bias + begin * out_bytes : nullptr, n, out_type,
                    out + begin * out_bytes);
  }
}

Matrix LhsOf(const OverlapProblem& p, const char* data) {
  return {data, p.lhs_type, p.lhs_transposed ? p.m : p.k, p.lhs_transposed};
}

}  // namespace

GemmTask WholeProduct(const OverlapProblem& p, const RankMemory& memory) {
  GemmTask task;
  task.m = p.m;
  task.n = p.n;
  task.k = p.k;
  task.a = LhsOf(p, memory.lhs);
  task.b = {memory.rhs, p.rhs_type, p.rhs_transposed ? p.k : p.n, p.rhs_transposed};
  task.c = memory.output;
  task.c_type = p.output_type;
  task.c_pitch = p.n;
  task.bias = memory.bias;
  return task;
}

int64_t RowChunks::total() const {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

std::vector<int64_t> RowChunks::Offsets() const {
  std::vector<int> order(counts.size());
  std::iota(order.begin(), order.end(), 0);
  return Offsets(order);
}

std::vector<int64_t> RowChunks::Offsets(const std::vector<int>& order) const {
  std::vector<int64_t> offsets(counts.size());
  int64_t next = 0;
  for (const int chunk : order) {
    offsets[chunk] = next;
    next += counts[chunk];
  }
  return offsets;
}

int64_t BufferBytes(const OverlapProblem& p) {
  const RowChunks& rows = p.rows;
  const int64_t whole = rows.num_batches * rows.total();
  switch (p.config.method) {
    case CommMethod::kPipeline:
      return whole * p.n * ElementBytes(p.partial_type);
    case CommMethod::kRingExchange:
      if (p.config.type == CommType::kReduceScatter) {
        const int64_t num_slots = p.config.copies ? 2 * p.num_ranks() - 1 : p.num_ranks();
        return num_slots * rows.num_batches * rows.capacity * p.n * ElementBytes(p.partial_type);
      }
      if (p.gathers_to_aux || !(p.config.copies || p.config.aggregate)) return 0;
      return whole * p.k * ElementBytes(p.lhs_type);
    case CommMethod::kNone:
      if (p.config.type == CommType::kReduceScatter) {
        return whole * p.n * ElementBytes(p.partial_type);
      }
      return p.gathers_to_aux ? 0 : whole * p.k * ElementBytes(p.lhs_type);
    case CommMethod::kBulk:
      return 0;  // from operand to result
  }
  return 0;
}

CommOverlapCore::CommOverlapCore(OverlapProblem problem, GemmFunction gemm)
    : p_(std::move(problem)), offsets_(p_.rows.Offsets()), gemm_(std::move(gemm)) {}

int CommOverlapCore::num_column_chunks() const {
  return static_cast<int>(std::clamp<int64_t>(p_.config.num_splits, 1, std::max<int64_t>(p_.n, 1)));
}

int CommOverlapCore::most_chunks() const {
  const bool by_columns = p_.config.method == CommMethod::kPipeline;
  return std::max(p_.num_ranks(), by_columns ? num_column_chunks() : 1);
}

int CommOverlapCore::num_signals() const { return p_.num_ranks() * (1 + most_chunks()); }

Signal CommOverlapCore::Arrived(int chunk) const {
  return {chunk, "chunk " + std::to_string(chunk) + " arrived"};
}

Signal CommOverlapCore::Computed(int chunk, int by) const {
  return {p_.num_ranks() + by * most_chunks() + chunk,
          "chunk " + std::to_string(chunk) + " computed"};
}

int CommOverlapCore::Rank(int64_t rank) const {
  return static_cast<int>((rank % p_.num_ranks() + p_.num_ranks()) % p_.num_ranks());
}

int64_t CommOverlapCore::width() const {
  if (p_.config.method == CommMethod::kBulk) return p_.aux_width;
  return p_.config.type == CommType::kAllGather ? p_.k : p_.n;
}

DataType CommOverlapCore::summed_type() const {
  return p_.config.method == CommMethod::kBulk ? p_.aux_type : p_.partial_type;
}

std::vector<int64_t> CommOverlapCore::RingOffsets(int rank) const {
  if (!p_.in_ring_order) return offsets_;
  std::vector<int> order;
  for (int step = 1; step <= p_.num_ranks(); ++step) order.push_back(Rank(rank - step));
  return p_.rows.Offsets(order);
}

// ---- The product and its chunks.

Matrix CommOverlapCore::Lhs(const char* data) const { return LhsOf(p_, data); }

GemmTask CommOverlapCore::Task(int rank) const {
  GemmTask task = WholeProduct(p_, p_.ranks[rank]);
  task.bias = nullptr;
  return task;
}

void CommOverlapCore::MultiplyAll(int rank, char* output, DataType type, const char* bias) const {
  GemmTask task = Task(rank);
  task.c = output;
  task.c_type = type;
  task.bias = bias;
  if (p_.config.method == CommMethod::kNone && p_.config.type == CommType::kAllGather) {
    task.a = Lhs(GatheredRows(rank));
  }
  gemm_(task);
}

void CommOverlapCore::MultiplyRows(int rank, int chunk, const char* lhs, int64_t first_row,
                                   int64_t rows_of_batch) const {
  const RankMemory& memory = p_.ranks[rank];
  const int64_t in_output = RingOffsets(rank)[chunk];
  for (int64_t batch = 0; batch < p_.rows.num_batches; ++batch) {
    GemmTask task = Task(rank);
    task.m = p_.rows.counts[chunk];
    task.a = Lhs(lhs).FromRow(batch * rows_of_batch + first_row);
    task.c =
        memory.output + (batch * p_.rows.total() + in_output) * p_.n * ElementBytes(p_.output_type);
    task.c_type = p_.output_type;
    task.bias = memory.bias;
    gemm_(task);
  }
}

void CommOverlapCore::MultiplyGathered(int rank, int chunk) const {
  MultiplyRows(rank, chunk, GatheredRows(rank), offsets_[chunk], p_.rows.total());
}

void CommOverlapCore::MultiplyAlone(int rank, int chunk, const char* lhs) const {
  MultiplyRows(rank, chunk, lhs, 0, p_.rows.capacity);
}

void CommOverlapCore::MultiplyGatheredPair(int rank, int chunk) const {
  const RankMemory& memory = p_.ranks[rank];
  for (int64_t batch = 0; batch < p_.rows.num_batches; ++batch) {
    const int64_t row = batch * p_.rows.total() + offsets_[chunk];
    GemmTask task = Task(rank);
    task.m = p_.rows.counts[chunk] + p_.rows.counts[chunk + 1];
    task.a = Lhs(GatheredRows(rank)).FromRow(row);
    task.c = memory.output + row * p_.n * ElementBytes(p_.output_type);
    task.c_type = p_.output_type;
    task.bias = memory.bias;
    gemm_(task);
  }
}

void CommOverlapCore::MultiplyPartial(int rank, int chunk, char* to) const {
  const int64_t in_lhs = RingOffsets(rank)[chunk];
  const int64_t row_bytes = p_.n * ElementBytes(p_.partial_type);
  for (int64_t batch = 0; batch < p_.rows.num_batches; ++batch) {
    GemmTask task = Task(rank);
    task.m = p_.rows.counts[chunk];
    task.a = task.a.FromRow(batch * p_.rows.total() + in_lhs);
    task.c = to + batch * p_.rows.capacity * row_bytes;
    task.c_type = p_.partial_type;
    gemm_(task);
  }
}

void CommOverlapCore::MultiplyColumns(int rank, int64_t begin, int64_t end, char* to) const {
  GemmTask task = Task(rank);
  task.n = end - begin;
  task.b = task.b.FromColumn(begin);
  task.c = to + begin * ElementBytes(p_.partial_type);
  task.c_type = p_.partial_type;
  gemm_(task);
}

// ---- Communication.

char* CommOverlapCore::GatheredRows(int rank) const {
  const bool to_aux = p_.gathers_to_aux || p_.config.method == CommMethod::kBulk;
  return to_aux ? p_.ranks[rank].aux_out : p_.ranks[rank].buffer;
}

std::vector<RowCopy> CommOverlapCore::ToGathered(int chunk, const char* from, bool is_alone,
                                                 char* to) const {
  const bool is_bulk = p_.config.method == CommMethod::kBulk;
  const int64_t row_bytes = width() * ElementBytes(is_bulk ? p_.aux_type : p_.lhs_type);
  std::vector<RowCopy> pieces;
  for (int64_t batch = 0; batch < p_.rows.num_batches; ++batch) {
    const int64_t there = batch * p_.rows.total() + offsets_[chunk];
    const int64_t here = is_alone ? batch * p_.rows.capacity : there;
    pieces.push_back({to + there * row_bytes, row_bytes, from + here * row_bytes, row_bytes,
                      p_.rows.counts[chunk], row_bytes});
  }
  return pieces;
}

void CommOverlapCore::AllGather(int rank, Stream& stream) const {
  const RankMemory& memory = p_.ranks[rank];
  const char* own = p_.config.method == CommMethod::kBulk ? memory.aux_in : memory.lhs;
  for (int step = 1; step <= p_.num_ranks(); ++step) {  // its own rows last: nobody waits for them
    const int peer = Rank(rank + step);
    stream.Put("own rows to rank " + std::to_string(peer), peer,
               ToGathered(rank, own, /*is_alone=*/true, GatheredRows(peer)), Arrived(rank));
  }
}

void CommOverlapCore::WaitForAllChunks(int rank, Stream& stream) const {
  for (int step = 1; step <= p_.num_ranks(); ++step) {
    const int chunk = Rank(rank - step);
    stream.Wait(Arrived(chunk), 1, chunk);
  }
}

CommOverlapCore::Sources CommOverlapCore::RowsOf(int rank,
                                                 const std::vector<const char*>& whole) const {
  Sources sources{whole, p_.rows.total()};
  const int64_t begin = offsets_[rank] * width() * ElementBytes(summed_type());
  for (const char*& source : sources.first_rows) source += begin;
  return sources;
}

std::vector<const char*> CommOverlapCore::Buffers() const {
  std::vector<const char*> buffers;
  for (const RankMemory& memory : p_.ranks) buffers.push_back(memory.buffer);
  return buffers;
}

void CommOverlapCore::Reduce(int rank, const Sources& sources, int64_t begin, int64_t end) const {
  const bool is_bulk = p_.config.method == CommMethod::kBulk;
  const DataType from_type = summed_type();
  const DataType to_type = is_bulk ? p_.aux_type : p_.output_type;
  const int64_t from_bytes = ElementBytes(from_type), to_bytes = ElementBytes(to_type);
  char* output = is_bulk ? p_.ranks[rank].aux_out : p_.ranks[rank].output;
  const char* bias = is_bulk ? nullptr : p_.ranks[rank].bias;
  const int64_t count = p_.rows.counts[rank], capacity = p_.rows.capacity;
  // Rows that lie without gaps are one.
  const int64_t rows_at_once = begin == 0 && end == width() && bias == nullptr ? count : 1;
  std::vector<const char*> parts(sources.first_rows.size());
  for (int64_t batch = 0; batch < p_.rows.num_batches; ++batch) {
    char* to = output + batch * capacity * width() * to_bytes;
    for (int64_t row = 0; row < count; row += rows_at_once) {
      const int64_t from = (batch * sources.rows_of_batch + row) * width() + begin;
      for (size_t i = 0; i < parts.size(); ++i) {
        parts[i] = sources.first_rows[i] + from * from_bytes;
      }
      SumAndRound(parts, from_type, bias ? bias + begin * to_bytes : nullptr,
                  rows_at_once * (end - begin), to_type, to + (row * width() + begin) * to_bytes);
    }
    for (int64_t row = count; row < capacity; ++row) {  // room that this rank has no rows for
      char* empty = to + row * width() * to_bytes;
      std::fill(empty + begin * to_bytes, empty + end * to_bytes, 0);
    }
  }
}

std::unique_ptr<CommOverlapCore> MakeCommOverlap(OverlapProblem problem, GemmFunction gemm) {
  switch (problem.config.method) {
    case CommMethod::kNone:
      return std::make_unique<NoOverlap>(std::move(problem), std::move(gemm));
    case CommMethod::kBulk:
    case CommMethod::kPipeline:
      return std::make_unique<CommOverlapBase>(std::move(problem), std::move(gemm));
    case CommMethod::kRingExchange:
      return std::make_unique<CommOverlapP2PBase>(std::move(problem), std::move(gemm));
  }
  return nullptr;
}

}  // namespace cpd
