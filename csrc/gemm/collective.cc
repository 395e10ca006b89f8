// Schedules in which ranks read from one another: without overlap, bulk, pipeline.
#include <string>
#include <utility>

#include "gemm/comm_overlap.h"

namespace cpd {

void NoOverlap::Record(int rank, RankStreams streams) const {
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

void CommOverlapBase::Record(int rank, RankStreams streams) const {
  if (p_.config.is_bulk()) {
    RecordBulk(rank, streams);
  } else {
    RecordPipeline(rank, streams);
  }
  Finish(rank, streams.compute);
}

void CommOverlapBase::RecordBulk(int rank, RankStreams streams) const {
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
    streams.communicate.Run(
        SpanKind::kCommunication, "own part", [this, &memory, bytes](Counters&) {
          arithmetic_->Copy({{memory.buffer, bytes, memory.aux_in, bytes, 1, bytes}});
        });
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
void CommOverlapBase::RecordPipeline(int rank, RankStreams streams) const {
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
        for (int peer = 0; peer < p_.num_ranks(); ++peer) counters.Add(peer, Computed(chunk, rank));
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

}  // namespace cpd
