// GEMMs that overlap with communication: the schedules of all methods, and arithmetic on the CPU.
#include "gemm/comm_overlap.h"

#include <algorithm>

#include "numerics/rows.h"
#include "transport/team.h"

namespace cpd {
namespace {

// out = the sum of the sources in order (+ bias), rounded once.
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
    Epilogue epilogue;
    if (bias) epilogue.bias = bias + begin * out_bytes;
    char* to = out + begin * out_bytes;
    if (sum_type == DataType::kF64) {
      StoreRow(out_type, reinterpret_cast<const double*>(sums), epilogue, n, to);
    } else {
      StoreRow(out_type, reinterpret_cast<const float*>(sums), epilogue, n, to);
    }
  }
}

}  // namespace

void HostArithmetic::Sum(const SumTask& task) const {
  const int64_t bytes = ElementBytes(task.type), to_bytes = ElementBytes(task.to_type);
  // Rows without gaps between them count as one row.
  const bool is_one =
      task.pitch == task.num_columns && task.to_pitch == task.num_columns && task.bias == nullptr;
  const int64_t rows_at_once = is_one ? std::max<int64_t>(task.num_rows, 1) : 1;
  std::vector<const char*> parts(task.sources.size());
  if (task.num_columns == 0) return;
  for (int64_t row = 0; row < task.num_rows; row += rows_at_once) {
    for (size_t i = 0; i < parts.size(); ++i) {
      parts[i] = task.sources[i] + row * task.pitch * bytes;
    }
    SumAndRound(parts, task.type, task.bias, rows_at_once * task.num_columns, task.to_type,
                task.to + row * task.to_pitch * to_bytes);
  }
}

void HostArithmetic::Copy(const std::vector<RowCopy>& copies) const { CopyRows(copies); }

void HostArithmetic::Clear(char* rows, int64_t pitch, int64_t num_rows, int64_t row_bytes) const {
  if (row_bytes == 0) return;
  for (int64_t row = 0; row < num_rows; ++row) std::fill_n(rows + row * pitch, row_bytes, 0);
}

// ---- The common part of the schedules: chunks of a product; gathering and summing of rows.

namespace {

class CommOverlapCore : public CommOverlap {
 public:
  CommOverlapCore(OverlapProblem problem, std::shared_ptr<Arithmetic> arithmetic)
      : p_(std::move(problem)), arithmetic_(std::move(arithmetic)), offsets_(p_.rows.Offsets()) {}

  Schedule Record() const override {
    Schedule schedule(p_.num_ranks());
    for (int rank = 0; rank < p_.num_ranks(); ++rank) RecordRank(rank, schedule.of(rank));
    return schedule;
  }

  int num_signals() const override { return p_.num_ranks() * (1 + most_chunks()); }

 protected:
  virtual void RecordRank(int rank, RankStreams streams) const = 0;

  // The signals of one rank. A chunk has arrived when its rows are among the gathered ones, or its
  // rank's addend of a sum is. A rank has computed a chunk when the chunk can be sent or read.
  Signal Arrived(int chunk) const { return {chunk, "chunk " + std::to_string(chunk) + " arrived"}; }

  Signal Computed(int chunk, int by) const {
    return {p_.num_ranks() + by * most_chunks() + chunk,
            "chunk " + std::to_string(chunk) + " computed"};
  }

  // ---- The product and its chunks. Rows to multiply are among the gathered ones, or alone.

  void MultiplyAll(int rank) const {
    const bool gathers = p_.config.method == CommMethod::kNone;
    if (gathers && p_.scaling == Scaling::kTensor) {  // each chunk has its own scale
      for (int chunk = 0; chunk < p_.num_ranks(); ++chunk) MultiplyGathered(rank, chunk);
      return;
    }
    GemmTask task = WholeProduct(p_, p_.ranks[rank]);
    if (gathers) task.a = GatheredLhs(rank, 0);
    arithmetic_->Multiply(task);
  }

  void MultiplyAllTo(int rank, char* partial) const {
    arithmetic_->Multiply(PartialTask(rank, partial));
  }

  void MultiplyGathered(int rank, int chunk) const {
    MultiplyRows(rank, chunk, GatheredLhs(rank, chunk), offsets_[chunk], p_.rows.total());
  }

  // Reads the rows in their rank's memory.
  void MultiplyAlone(int rank, int chunk) const {
    const RankMemory& owner = p_.ranks[chunk];
    MultiplyRows(rank, chunk, LhsOf(p_, owner.lhs, owner.lhs_scales), 0, p_.rows.capacity);
  }

  // Chunks `chunk` and `chunk` + 1.
  void MultiplyGatheredPair(int rank, int chunk) const {
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

  // -> [B, capacity, n]
  void MultiplyPartial(int rank, int chunk, char* to) const {
    const int64_t in_lhs = RingOffsets(rank)[chunk];
    const int64_t row_bytes = p_.n * ElementBytes(p_.partial_type);
    for (int64_t batch = 0; batch < p_.rows.num_batches; ++batch) {
      GemmTask task = PartialTask(rank, to + batch * p_.rows.capacity * row_bytes);
      task.m = p_.rows.counts[chunk];
      task.a = task.a.FromRow(batch * p_.rows.total() + in_lhs);
      arithmetic_->Multiply(task);
    }
  }

  // -> output [B, capacity, n], reading the operands in place, in the memory of their ranks.
  void MultiplyOfAllRanks(int rank) const {
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
      arithmetic_->Clear(task.c + count * row_bytes, row_bytes, p_.rows.capacity - count,
                         row_bytes);
    }
  }

  // Computes columns [begin, end) of the product -> [B, total, end - begin].
  void MultiplyColumns(int rank, int64_t begin, int64_t end, char* to) const {
    GemmTask task = PartialTask(rank, to).FromColumn(begin);
    task.c = to;
    task.n = task.c_pitch = end - begin;
    arithmetic_->Multiply(task);
  }

  // ---- Communication.

  // [B, total, k] or aux_out [B, total, width]
  char* GatheredRows(int rank) const {
    const bool to_aux = p_.gathers_to_aux || p_.config.is_bulk();
    return to_aux && !p_.shares_only_buffers ? p_.ranks[rank].aux_out : p_.ranks[rank].buffer;
  }

  // The copies that add a chunk and its scales to what `to` gathers: from the chunk's owner, or
  // from where `from` has gathered it. Empty for a rank elsewhere.
  std::vector<RowCopy> OwnToGathered(int rank, int to) const {
    const RankMemory& memory = p_.ranks[rank];
    const char* own = p_.config.is_bulk() ? memory.aux_in : memory.lhs;
    return CopyChunk(rank, own, memory.lhs_scales, /*is_alone=*/true, to);
  }

  std::vector<RowCopy> GatheredToGathered(int chunk, int from, int to) const {
    // Rows gathered by another process are not visible here.
    if (p_.ranks[from].is_elsewhere) return OwnToGathered(chunk, to);
    return CopyChunk(chunk, GatheredRows(from), GatheredScales(from), /*is_alone=*/false, to);
  }

  // Copies the rank's own rows to all ranks, including itself.
  void AllGather(int rank, Stream& stream) const {
    for (int step = 1; step <= p_.num_ranks(); ++step) {  // own rows last: no other rank needs them
      const int peer = Rank(rank + step);
      stream.Put("own rows to rank " + std::to_string(peer), peer, OwnToGathered(rank, peer),
                 Arrived(rank));
    }
  }

  void WaitForAllChunks(int rank, Stream& stream) const {
    for (int step = 1; step <= p_.num_ranks(); ++step) {
      const int chunk = Rank(rank - step);
      stream.Wait(Arrived(chunk), 1, chunk);
    }
  }

  // All ranks know that this one has computed a chunk; this one waits for that of all ranks.
  void TellAll(int rank, int chunk, Stream& stream) const {
    for (int peer = 0; peer < p_.num_ranks(); ++peer) stream.Add(peer, Computed(chunk, rank));
  }

  void WaitForAll(int chunk, Stream& stream) const {
    for (int peer = 0; peer < p_.num_ranks(); ++peer) stream.Wait(Computed(chunk, peer), 1, peer);
  }

  // Copies an array of the rank itself.
  void CopyOwn(const char* name, char* to, const char* from, int64_t bytes, Stream& stream) const {
    stream.Run(SpanKind::kCommunication, name,
               [=](Counters&) { arithmetic_->Copy({{to, bytes, from, bytes, 1, bytes}}); });
  }

  // Copies a result that was gathered where other ranks reach it to its own array.
  bool KeepsGathered() const {
    const bool to_aux = p_.gathers_to_aux || p_.config.is_bulk();
    return p_.config.type == CommType::kAllGather && to_aux && p_.shares_only_buffers;
  }

  void KeepGathered(int rank, Stream& stream) const {
    if (!KeepsGathered()) return;
    const DataType type = p_.config.is_bulk() ? p_.aux_type : p_.lhs_type;
    const int64_t bytes = p_.rows.num_batches * p_.rows.total() * width() * ElementBytes(type);
    CopyOwn("gathered rows", p_.ranks[rank].aux_out, GatheredRows(rank), bytes, stream);
  }

  // Arrays [B, rows_of_batch, pitch] that are summed in this order.
  struct Sources {
    std::vector<const char*> first_rows;  // of batch 0
    int64_t rows_of_batch;
    int64_t pitch;  // elements
  };
  // The rows of `rank` in [B, total, pitch].
  Sources RowsOf(int rank, std::vector<const char*> whole, int64_t pitch) const {
    for (const char*& source : whole)
      source += offsets_[rank] * pitch * ElementBytes(summed_type());
    return {std::move(whole), p_.rows.total(), pitch};
  }

  // Writes the sum of the sources + bias to columns [begin, end) of output [B, capacity, n].
  void Reduce(int rank, const Sources& sources, int64_t begin, int64_t end) const {
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

  // `offset` bytes into each
  std::vector<const char*> Buffers(int64_t offset = 0) const {
    std::vector<const char*> buffers;
    for (const RankMemory& memory : p_.ranks) buffers.push_back(memory.buffer + offset);
    return buffers;
  }

  // The remaining work once the product is in the output.
  void Finish(int rank, Stream& stream) const {
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

  // chunks of the pipeline: at most one per column
  int num_column_chunks() const {
    return static_cast<int>(
        std::clamp<int64_t>(p_.config.num_splits, 1, std::max<int64_t>(p_.n, 1)));
  }

  // of rows or columns
  int most_chunks() const {
    const bool by_columns = p_.config.method == CommMethod::kPipeline;
    return std::max(p_.num_ranks(), by_columns ? num_column_chunks() : 1);
  }

  // modulo the number of ranks
  int Rank(int64_t rank) const {
    return static_cast<int>((rank % p_.num_ranks() + p_.num_ranks()) % p_.num_ranks());
  }

  // columns of the array that is gathered or summed
  int64_t width() const {
    if (p_.config.is_bulk()) return p_.aux_width;
    return p_.config.type == CommType::kAllGather ? p_.k : p_.n;
  }

  DataType summed_type() const { return p_.config.is_bulk() ? p_.aux_type : p_.partial_type; }

  const OverlapProblem p_;
  const std::shared_ptr<Arithmetic> arithmetic_;
  const std::vector<int64_t> offsets_;  // of chunks in rank order

 private:
  std::vector<int64_t> RingOffsets(int rank) const {
    if (!p_.in_ring_order) return offsets_;
    std::vector<int> order;
    for (int step = 1; step <= p_.num_ranks(); ++step) order.push_back(Rank(rank - step));
    return p_.rows.Offsets(order);
  }

  // [p], or lines stored as the gathered rows are
  char* GatheredScales(int rank) const {
    if (p_.scaling == Scaling::kNone) return nullptr;
    return p_.ranks[rank].buffer + GatheredScalesOffset(p_);
  }

  Matrix GatheredLhs(int rank, int chunk) const {
    const char* scales = GatheredScales(rank);
    if (p_.scaling == Scaling::kTensor) scales += chunk * sizeof(float);
    return LhsOf(p_, GatheredRows(rank), scales);
  }

  std::vector<RowCopy> CopyChunk(int chunk, const char* rows, const char* scales, bool is_alone,
                                 int to) const {
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

  // Without bias.
  GemmTask PartialTask(int rank, char* partial) const {
    GemmTask task = WholeProduct(p_, p_.ranks[rank]);
    task.epilogue = {};
    task.c = partial;
    task.c_type = p_.partial_type;
    return task;
  }

  void MultiplyRows(int rank, int chunk, const Matrix& lhs, int64_t first_row,
                    int64_t rows_of_batch) const {
    const int64_t in_output = RingOffsets(rank)[chunk];
    for (int64_t batch = 0; batch < p_.rows.num_batches; ++batch) {
      GemmTask task = WholeProduct(p_, p_.ranks[rank]).FromRow(batch * p_.rows.total() + in_output);
      task.m = p_.rows.counts[chunk];
      task.a = lhs.FromRow(batch * rows_of_batch + first_row);
      arithmetic_->Multiply(task);
    }
  }
};

// ---- Schedules in which ranks read from one another: without overlap, bulk, pipeline.

// Sequential: gathers, then multiplies; or multiplies, then reduces.
class NoOverlap final : public CommOverlapCore {
 public:
  using CommOverlapCore::CommOverlapCore;

 private:
  void RecordRank(int rank, RankStreams streams) const override {
    Stream& stream = streams.compute;
    if (p_.config.type == CommType::kAllGather) {
      AllGather(rank, stream);
      WaitForAllChunks(rank, stream);
      stream.Run(SpanKind::kComputation, "GEMM", [this, rank](Counters&) { MultiplyAll(rank); });
      KeepGathered(rank, stream);
      Finish(rank, stream);
      return;
    }
    stream.Run(SpanKind::kComputation, "GEMM",
               [this, rank](Counters&) { MultiplyAllTo(rank, p_.ranks[rank].buffer); });
    TellAll(rank, 0, stream);
    WaitForAll(0, stream);
    stream.Run(SpanKind::kCommunication, "reduce-scatter",
               [this, rank](Counters&) { Reduce(rank, RowsOf(rank, Buffers(), p_.n), 0, p_.n); });
    Finish(rank, stream);
  }
};

// Collective: a rank reads what the others have computed. Bulk and pipeline.
class CommOverlapBase final : public CommOverlapCore {
 public:
  using CommOverlapCore::CommOverlapCore;

 private:
  void RecordRank(int rank, RankStreams streams) const override {
    if (p_.config.is_bulk()) {
      RecordBulk(rank, streams);
    } else {
      RecordPipeline(rank, streams);
    }
    Finish(rank, streams.compute);
  }

  void RecordBulk(int rank, RankStreams streams) const {
    streams.compute.Run(SpanKind::kComputation, "GEMM",
                        [this, rank](Counters&) { MultiplyAll(rank); });
    if (p_.config.type == CommType::kAllGather) {
      AllGather(rank, streams.communicate);
      WaitForAllChunks(rank, streams.communicate);
      KeepGathered(rank, streams.communicate);
      return;
    }
    if (p_.shares_only_buffers) {
      const RankMemory& memory = p_.ranks[rank];
      const int64_t bytes =
          p_.rows.num_batches * p_.rows.total() * p_.aux_width * ElementBytes(p_.aux_type);
      CopyOwn("own part", memory.buffer, memory.aux_in, bytes, streams.communicate);
      TellAll(rank, 0, streams.communicate);
      WaitForAll(0, streams.communicate);
    }
    streams.communicate.Run(SpanKind::kCommunication, "reduce-scatter", [this, rank](Counters&) {
      std::vector<const char*> whole;
      for (const RankMemory& other : p_.ranks) {
        whole.push_back(p_.shares_only_buffers ? other.buffer : other.aux_in);
      }
      Reduce(rank, RowsOf(rank, std::move(whole), p_.aux_width), 0, p_.aux_width);
    });
  }

  // All ranks compute column chunk i, which is reduced while chunk i + 1 is computed. Chunks are
  // stored contiguously in the buffers.
  void RecordPipeline(int rank, RankStreams streams) const {
    const int num_splits = num_column_chunks();
    const int64_t column_bytes =
        p_.rows.num_batches * p_.rows.total() * ElementBytes(p_.partial_type);
    const auto first_column = [this, num_splits](int chunk) { return p_.n * chunk / num_splits; };
    const auto multiply = [=](int chunk) {
      const int64_t begin = first_column(chunk), end = first_column(chunk + 1);
      MultiplyColumns(rank, begin, end, p_.ranks[rank].buffer + begin * column_bytes);
    };
    const auto reduce = [&](int chunk) {
      WaitForAll(chunk, streams.communicate);
      const int64_t begin = first_column(chunk), end = first_column(chunk + 1);
      streams.communicate.Run(
          SpanKind::kCommunication, "reduce-scatter " + std::to_string(chunk), [=](Counters&) {
            Sources chunks = RowsOf(rank, Buffers(begin * column_bytes), end - begin);
            Reduce(rank, chunks, begin, end);
          });
    };
    if (p_.config.atomic) {
      streams.compute.Run(SpanKind::kComputation, "GEMM", [=](Counters& counters) {
        for (int chunk = 0; chunk < num_splits; ++chunk) {
          multiply(chunk);
          for (int peer = 0; peer < p_.num_ranks(); ++peer)
            counters.Add(peer, Computed(chunk, rank));
        }
      });
      for (int chunk = 0; chunk < num_splits; ++chunk) reduce(chunk);
      return;
    }
    for (int chunk = 0; chunk < num_splits; ++chunk) {
      streams.compute.Run(SpanKind::kComputation, "GEMM " + std::to_string(chunk),
                          [multiply, chunk](Counters&) { multiply(chunk); });
      TellAll(rank, chunk, streams.compute);
      if (!p_.config.overlap_first_gemm) {
        reduce(chunk);
      } else if (chunk > 0) {
        streams.communicate.Wait(Computed(chunk, rank), 1, rank);
        reduce(chunk - 1);
      }
    }
    if (p_.config.overlap_first_gemm) reduce(num_splits - 1);
  }
};

// ---- Schedules in which ranks put chunks to one another in a ring.

std::string Chunk(const char* what, int chunk) { return what + std::to_string(chunk); }

// Point to point: a rank puts chunks to one other rank at a time. Ring exchange.
class CommOverlapP2PBase final : public CommOverlapCore {
 public:
  using CommOverlapCore::CommOverlapCore;

 private:
  void RecordRank(int rank, RankStreams streams) const override {
    if (p_.config.type == CommType::kReduceScatter) {
      RecordReduceScatter(rank, streams);
    } else if (p_.config.aggregate) {
      RecordPairs(rank, streams);
    } else {
      RecordAllGather(rank, streams);
    }
    if (p_.config.aggregate) {  // its signals are for pairs, which the products have waited for
      KeepGathered(rank, streams.compute);
    } else if (KeepsGathered()) {
      WaitForAllChunks(rank, streams.communicate);
      KeepGathered(rank, streams.communicate);
    }
    if (p_.config.type == CommType::kAllGather && p_.in_ring_order && p_.ranks[rank].aux_out) {
      // The atomic ring returns the chunk that it received.
      const RankMemory& memory = p_.ranks[rank];
      const int64_t bytes =
          p_.rows.num_batches * p_.rows.capacity * p_.k * ElementBytes(p_.lhs_type);
      CopyOwn("own rows", memory.aux_out, memory.lhs, bytes, streams.communicate);
    }
    Finish(rank, streams.compute);
  }

  // Step i multiplies chunk r - i and sends it on at the same time. Without copies the GEMM reads
  // the rows in place, in their rank's memory, and waits for nothing.
  void RecordAllGather(int rank, RankStreams streams) const {
    const int p = p_.num_ranks(), next = Rank(rank + 1), previous = Rank(rank - 1);
    const bool copies = p_.config.copies;
    const auto multiply = [=](int chunk) {
      if (chunk == rank || !copies) {
        MultiplyAlone(rank, chunk);
      } else {
        MultiplyGathered(rank, chunk);
      }
    };
    if (p_.config.atomic) {
      streams.compute.Run(SpanKind::kComputation, "GEMM", [=](Counters& counters) {
        for (int step = 0; step < p; ++step) {
          const int chunk = Rank(rank - step);
          if (copies && step > 0 && !counters.WaitFor(Arrived(chunk), 1, previous)) return;
          multiply(chunk);
        }
      });
    }
    for (int step = 0; step < p; ++step) {
      const int chunk = Rank(rank - step);
      if (!p_.config.atomic) {
        if (copies && step > 0) streams.compute.Wait(Arrived(chunk), 1, previous);
        streams.compute.Run(SpanKind::kComputation, Chunk("GEMM ", chunk),
                            [multiply, chunk](Counters&) { multiply(chunk); });
      }
      if (!copies || step == p - 1) continue;
      if (step > 0) streams.communicate.Wait(Arrived(chunk), 1, previous);
      streams.communicate.Put(
          Chunk("send ", chunk), next,
          step == 0 ? OwnToGathered(rank, next) : GatheredToGathered(chunk, rank, next),
          Arrived(chunk));
    }
    if (p_.gathers_to_aux && !copies) {
      AllGather(rank, streams.communicate);
    } else if (p_.gathers_to_aux) {
      streams.communicate.Put(Chunk("keep ", rank), rank, OwnToGathered(rank, rank), Arrived(rank));
    }
  }

  // Neighbours swap their chunks; then pairs of chunks go around with stride 2.
  void RecordPairs(int rank, RankStreams streams) const {
    const int p = p_.num_ranks(), neighbour = rank ^ 1;
    const int next = Rank(rank + 2), previous = Rank(rank - 2);
    streams.communicate.Put(Chunk("send ", rank), neighbour, OwnToGathered(rank, neighbour),
                            Arrived(rank));
    streams.communicate.Put(Chunk("keep ", rank), rank, OwnToGathered(rank, rank), Arrived(rank));
    const auto wait = [&](Stream& stream, int step, int first) {
      if (step == 0) {
        stream.Wait(Arrived(rank), 1, rank);
        stream.Wait(Arrived(neighbour), 1, neighbour);
      } else {
        stream.Wait(Arrived(first), 1, previous);
      }
    };
    for (int step = 0; step < p / 2; ++step) {
      const int first = Rank(rank / 2 * 2 - 2 * step);
      wait(streams.compute, step, first);
      streams.compute.Run(SpanKind::kComputation, Chunk("GEMM ", first) + Chunk(", ", first + 1),
                          [this, rank, first](Counters&) { MultiplyGatheredPair(rank, first); });
      if (step == p / 2 - 1) break;
      wait(streams.communicate, step, first);
      auto copies = GatheredToGathered(first, rank, next);
      for (RowCopy& copy : GatheredToGathered(first + 1, rank, next)) {
        copies.push_back(copy);
      }
      streams.communicate.Put(Chunk("send ", first) + Chunk(", ", first + 1), next,
                              std::move(copies), Arrived(first));
    }
  }

  // Slots of the buffer hold row blocks. GEMM i computes block r + i + 1 into slot i, which then
  // goes to slot i + p of that rank; a rank's own block comes last, in slot p - 1.
  void RecordReduceScatter(int rank, RankStreams streams) const {
    if (!p_.config.copies) {
      streams.compute.Run(SpanKind::kComputation, "GEMM of all ranks",
                          [this, rank](Counters&) { MultiplyOfAllRanks(rank); });
      return;
    }
    const int p = p_.num_ranks();
    const int64_t slot_bytes =
        p_.rows.num_batches * p_.rows.capacity * p_.n * ElementBytes(p_.partial_type);
    const auto slot = [=](int of_rank, int index) {
      return p_.ranks[of_rank].buffer + index * slot_bytes;
    };
    const auto multiply = [=](int step) {
      MultiplyPartial(rank, Rank(rank + step + 1), slot(rank, step));
    };
    if (p_.config.atomic) {
      streams.compute.Run(SpanKind::kComputation, "GEMM", [=](Counters& counters) {
        for (int step = 0; step < p; ++step) {
          multiply(step);
          counters.Add(rank, Computed(step, rank));
        }
      });
    } else {
      for (int step = 0; step < p; ++step) {
        streams.compute.Run(SpanKind::kComputation, Chunk("GEMM ", Rank(rank + step + 1)),
                            [multiply, step](Counters&) { multiply(step); });
        streams.compute.Add(rank, Computed(step, rank));
      }
    }
    for (int step = 1; step < p; ++step) {
      const int peer = Rank(rank + step);
      const int64_t bytes = p_.rows.num_batches == 1
                                ? p_.rows.counts[peer] * p_.n * ElementBytes(p_.partial_type)
                                : slot_bytes;
      streams.communicate.Wait(Computed(step - 1, rank), 1, rank);
      streams.communicate.Put(
          Chunk("send ", peer), peer,
          {{slot(peer, step - 1 + p), bytes, slot(rank, step - 1), bytes, 1, bytes}},
          Arrived(rank));
    }
    // In rank order, whatever the order of arrival.
    Sources sources{{}, p_.rows.capacity, p_.n};
    for (int peer = 0; peer < p; ++peer) {
      sources.first_rows.push_back(slot(rank, peer == rank ? p - 1 : Rank(rank - peer) - 1 + p));
      if (peer != rank) streams.compute.Wait(Arrived(peer), 1, peer);
    }
    streams.compute.Run(SpanKind::kComputation, "sum",
                        [this, rank, sources](Counters&) { Reduce(rank, sources, 0, p_.n); });
  }
};

}  // namespace

std::unique_ptr<CommOverlap> MakeCommOverlap(OverlapProblem problem,
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
