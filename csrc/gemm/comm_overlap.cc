// The common part of the schedules: chunks of a product; gathering and summing of rows.
#include "gemm/comm_overlap.h"

#include <algorithm>
#include <numeric>

namespace cpd {

CommOverlapCore::CommOverlapCore(OverlapProblem problem, std::shared_ptr<Arithmetic> arithmetic)
    : p_(std::move(problem)), arithmetic_(std::move(arithmetic)), offsets_(p_.rows.Offsets()) {}

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
  if (p_.config.is_bulk()) return p_.aux_width;
  return p_.config.type == CommType::kAllGather ? p_.k : p_.n;
}

DataType CommOverlapCore::summed_type() const {
  return p_.config.is_bulk() ? p_.aux_type : p_.partial_type;
}

std::vector<int64_t> CommOverlapCore::RingOffsets(int rank) const {
  if (!p_.in_ring_order) return offsets_;
  std::vector<int> order;
  for (int step = 1; step <= p_.num_ranks(); ++step) order.push_back(Rank(rank - step));
  return p_.rows.Offsets(order);
}

// ---- The product and its chunks.

Matrix CommOverlapCore::GatheredLhs(int rank, int chunk) const {
  const char* scales = GatheredScales(rank);
  if (p_.scaling == Scaling::kTensor) scales += chunk * sizeof(float);
  return LhsOf(p_, GatheredRows(rank), scales);
}

GemmTask CommOverlapCore::PartialTask(int rank, char* partial) const {
  GemmTask task = WholeProduct(p_, p_.ranks[rank]);
  task.epilogue = {};
  task.c = partial;
  task.c_type = p_.partial_type;
  return task;
}

void CommOverlapCore::MultiplyAll(int rank) const {
  const bool gathers = p_.config.method == CommMethod::kNone;
  if (gathers && p_.scaling == Scaling::kTensor) {  // each chunk has its own scale
    for (int chunk = 0; chunk < p_.num_ranks(); ++chunk) MultiplyGathered(rank, chunk);
    return;
  }
  GemmTask task = WholeProduct(p_, p_.ranks[rank]);
  if (gathers) task.a = GatheredLhs(rank, 0);
  arithmetic_->Multiply(task);
}

void CommOverlapCore::MultiplyAllTo(int rank, char* partial) const {
  arithmetic_->Multiply(PartialTask(rank, partial));
}

void CommOverlapCore::MultiplyRows(int rank, int chunk, const Matrix& lhs, int64_t first_row,
                                   int64_t rows_of_batch) const {
  const int64_t in_output = RingOffsets(rank)[chunk];
  for (int64_t batch = 0; batch < p_.rows.num_batches; ++batch) {
    GemmTask task = WholeProduct(p_, p_.ranks[rank]).FromRow(batch * p_.rows.total() + in_output);
    task.m = p_.rows.counts[chunk];
    task.a = lhs.FromRow(batch * rows_of_batch + first_row);
    arithmetic_->Multiply(task);
  }
}

void CommOverlapCore::MultiplyGathered(int rank, int chunk) const {
  MultiplyRows(rank, chunk, GatheredLhs(rank, chunk), offsets_[chunk], p_.rows.total());
}

void CommOverlapCore::MultiplyAlone(int rank, int chunk) const {
  const RankMemory& owner = p_.ranks[chunk];
  MultiplyRows(rank, chunk, LhsOf(p_, owner.lhs, owner.lhs_scales), 0, p_.rows.capacity);
}

void CommOverlapCore::MultiplyGatheredPair(int rank, int chunk) const {
  if (p_.scaling == Scaling::kTensor) {
    MultiplyGathered(rank, chunk);
    MultiplyGathered(rank, chunk + 1);
    return;
  }
  for (int64_t batch = 0; batch < p_.rows.num_batches; ++batch) {
    const int64_t row = batch * p_.rows.total() + offsets_[chunk];
    GemmTask task = WholeProduct(p_, p_.ranks[rank]).FromRow(row);
    task.m = p_.rows.counts[chunk] + p_.rows.counts[chunk + 1];
    task.a = GatheredLhs(rank, chunk).FromRow(row);
    arithmetic_->Multiply(task);
  }
}

void CommOverlapCore::MultiplyPartial(int rank, int chunk, char* to) const {
  const int64_t in_lhs = RingOffsets(rank)[chunk];
  const int64_t row_bytes = p_.n * ElementBytes(p_.partial_type);
  for (int64_t batch = 0; batch < p_.rows.num_batches; ++batch) {
    GemmTask task = PartialTask(rank, to + batch * p_.rows.capacity * row_bytes);
    task.m = p_.rows.counts[chunk];
    task.a = task.a.FromRow(batch * p_.rows.total() + in_lhs);
    arithmetic_->Multiply(task);
  }
}

void CommOverlapCore::MultiplyOfAllRanks(int rank) const {
  const int64_t row_bytes = p_.n * ElementBytes(p_.output_type);
  const int64_t count = p_.rows.counts[rank];
  for (int64_t batch = 0; batch < p_.rows.num_batches; ++batch) {
    GemmTask task = WholeProduct(p_, p_.ranks[rank]);
    task.m = count;
    task.c += batch * p_.rows.capacity * row_bytes;
    for (int peer = 0; peer < p_.num_ranks(); ++peer) {
      const GemmTask of_peer = WholeProduct(p_, p_.ranks[peer]);
      const int64_t row = batch * p_.rows.total() + RingOffsets(peer)[rank];
      const Factors factors{p_.k, of_peer.a.FromRow(row), of_peer.b};
      if (peer > 0) {
        task.more.push_back(factors);
      } else {
        task.a = factors.a;
        task.b = factors.b;
      }
    }
    arithmetic_->Multiply(task);
    arithmetic_->Clear(task.c + count * row_bytes, row_bytes, p_.rows.capacity - count, row_bytes);
  }
}

void CommOverlapCore::MultiplyColumns(int rank, int64_t begin, int64_t end, char* to) const {
  GemmTask task = PartialTask(rank, to).FromColumn(begin);
  task.c = to;
  task.n = task.c_pitch = end - begin;
  arithmetic_->Multiply(task);
}

// ---- Communication.

char* CommOverlapCore::GatheredRows(int rank) const {
  const bool to_aux = p_.gathers_to_aux || p_.config.is_bulk();
  return to_aux && !p_.shares_only_buffers ? p_.ranks[rank].aux_out : p_.ranks[rank].buffer;
}

char* CommOverlapCore::GatheredScales(int rank) const {
  if (p_.scaling == Scaling::kNone) return nullptr;
  return p_.ranks[rank].buffer + GatheredScalesOffset(p_);
}

std::vector<RowCopy> CommOverlapCore::CopyChunk(int chunk, const char* rows, const char* scales,
                                                bool is_alone, int to) const {
  if (p_.ranks[to].is_elsewhere) return {};  // that process knows the destination
  std::vector<RowCopy> copies;
  const auto copy = [&](const char* from, int64_t bytes, char* gathered) {  // bytes of a row
    for (int64_t batch = 0; batch < p_.rows.num_batches; ++batch) {
      const int64_t there = batch * p_.rows.total() + offsets_[chunk];
      const int64_t here = is_alone ? batch * p_.rows.capacity : there;
      copies.push_back({gathered + there * bytes, bytes, from + here * bytes, bytes,
                        p_.rows.counts[chunk], bytes});
    }
  };
  copy(rows, width() * ElementBytes(p_.config.is_bulk() ? p_.aux_type : p_.lhs_type),
       GatheredRows(to));
  if (p_.config.is_bulk()) return copies;
  if (p_.scaling == Scaling::kBlocks) {
    copy(scales, ScalesPitch(p_, /*of_lhs=*/true), GatheredScales(to));
  } else if (p_.scaling == Scaling::kTensor) {
    constexpr auto kBytes = static_cast<int64_t>(sizeof(float));
    const char* from = is_alone ? scales : scales + chunk * kBytes;
    copies.push_back({GatheredScales(to) + chunk * kBytes, kBytes, from, kBytes, 1, kBytes});
  }
  return copies;
}

std::vector<RowCopy> CommOverlapCore::OwnToGathered(int rank, int to) const {
  const RankMemory& memory = p_.ranks[rank];
  const char* own = p_.config.is_bulk() ? memory.aux_in : memory.lhs;
  return CopyChunk(rank, own, memory.lhs_scales, /*is_alone=*/true, to);
}

std::vector<RowCopy> CommOverlapCore::GatheredToGathered(int chunk, int from, int to) const {
  // Rows gathered by another process are not visible here.
  if (p_.ranks[from].is_elsewhere) return OwnToGathered(chunk, to);
  return CopyChunk(chunk, GatheredRows(from), GatheredScales(from), /*is_alone=*/false, to);
}

void CommOverlapCore::AllGather(int rank, Stream& stream) const {
  for (int step = 1; step <= p_.num_ranks(); ++step) {  // own rows last: no other rank needs them
    const int peer = Rank(rank + step);
    stream.Put("own rows to rank " + std::to_string(peer), peer, OwnToGathered(rank, peer),
               Arrived(rank));
  }
}

void CommOverlapCore::Finish(int rank, Stream& stream) const {
  const RankMemory& memory = p_.ranks[rank];
  if (!memory.bias_grad && p_.scaling != Scaling::kBlocks) return;
  const bool gathers = p_.config.gathers_lhs();
  // A pair of chunks has one signal, which its product has waited for.
  const bool waits = gathers && memory.lhs_swizzled && !p_.config.aggregate;
  if (waits) WaitForAllChunks(rank, stream);
  const char* lhs_scales = gathers ? GatheredScales(rank) : memory.lhs_scales;
  stream.Run(SpanKind::kComputation, "bias gradient, scales",
             [=, &memory](Counters&) { arithmetic_->Finish(p_, memory, lhs_scales); });
}

void CommOverlapCore::WaitForAllChunks(int rank, Stream& stream) const {
  for (int step = 1; step <= p_.num_ranks(); ++step) {
    const int chunk = Rank(rank - step);
    stream.Wait(Arrived(chunk), 1, chunk);
  }
}

void CommOverlapCore::TellAll(int rank, int chunk, Stream& stream) const {
  for (int peer = 0; peer < p_.num_ranks(); ++peer) stream.Add(peer, Computed(chunk, rank));
}

void CommOverlapCore::WaitForAll(int chunk, Stream& stream) const {
  for (int peer = 0; peer < p_.num_ranks(); ++peer) stream.Wait(Computed(chunk, peer), 1, peer);
}

bool CommOverlapCore::KeepsGathered() const {
  const bool to_aux = p_.gathers_to_aux || p_.config.is_bulk();
  return p_.config.type == CommType::kAllGather && to_aux && p_.shares_only_buffers;
}

void CommOverlapCore::KeepGathered(int rank, Stream& stream) const {
  if (!KeepsGathered()) return;
  const DataType type = p_.config.is_bulk() ? p_.aux_type : p_.lhs_type;
  const int64_t bytes = p_.rows.num_batches * p_.rows.total() * width() * ElementBytes(type);
  stream.Run(SpanKind::kCommunication, "gathered rows", [this, rank, bytes](Counters&) {
    arithmetic_->Copy({{p_.ranks[rank].aux_out, bytes, GatheredRows(rank), bytes, 1, bytes}});
  });
}

CommOverlapCore::Sources CommOverlapCore::RowsOf(int rank, std::vector<const char*> whole,
                                                 int64_t pitch) const {
  for (const char*& source : whole) source += offsets_[rank] * pitch * ElementBytes(summed_type());
  return {std::move(whole), p_.rows.total(), pitch};
}

std::vector<const char*> CommOverlapCore::Buffers(int64_t offset) const {
  std::vector<const char*> buffers;
  for (const RankMemory& memory : p_.ranks) buffers.push_back(memory.buffer + offset);
  return buffers;
}

void CommOverlapCore::Reduce(int rank, const Sources& sources, int64_t begin, int64_t end) const {
  const bool is_bulk = p_.config.is_bulk();
  const DataType from_type = summed_type();
  const DataType to_type = is_bulk ? p_.aux_type : p_.output_type;
  const int64_t from_bytes = ElementBytes(from_type), to_bytes = ElementBytes(to_type);
  char* output = is_bulk ? p_.ranks[rank].aux_out : p_.ranks[rank].output;
  const char* bias = is_bulk ? nullptr : p_.ranks[rank].bias;
  const int64_t count = p_.rows.counts[rank], capacity = p_.rows.capacity;
  SumTask task;
  task.type = from_type;
  task.pitch = sources.pitch;
  task.to_pitch = width();
  task.num_rows = count;
  task.num_columns = end - begin;
  task.bias = bias ? bias + begin * to_bytes : nullptr;
  task.to_type = to_type;
  for (int64_t batch = 0; batch < p_.rows.num_batches; ++batch) {
    const int64_t from = batch * sources.rows_of_batch * sources.pitch * from_bytes;
    task.sources = sources.first_rows;
    for (const char*& source : task.sources) source += from;
    task.to = output + (batch * capacity * width() + begin) * to_bytes;
    arithmetic_->Sum(task);
    // Capacity beyond this rank's rows.
    arithmetic_->Clear(task.to + count * width() * to_bytes, width() * to_bytes, capacity - count,
                       (end - begin) * to_bytes);
  }
}

std::unique_ptr<CommOverlapCore> MakeCommOverlap(OverlapProblem problem,
                                                 std::shared_ptr<Arithmetic> arithmetic) {
  switch (problem.config.method) {
    case CommMethod::kNone:
      return std::make_unique<NoOverlap>(std::move(problem), std::move(arithmetic));
    case CommMethod::kBulk:
    case CommMethod::kPipeline:
      return std::make_unique<CommOverlapBase>(std::move(problem), std::move(arithmetic));
    case CommMethod::kRingExchange:
      return std::make_unique<CommOverlapP2PBase>(std::move(problem), std::move(arithmetic));
  }
  return nullptr;
}

}  // namespace cpd
