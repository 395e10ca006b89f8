// Schedules in which ranks put chunks to one another in a ring.
#include <string>

#include "gemm/comm_overlap.h"

namespace cpd {
namespace {

std::string Chunk(const char* what, int chunk) { return what + std::to_string(chunk); }

}  // namespace

void CommOverlapP2PBase::Record(int rank, RankStreams streams) const {
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
    const int64_t bytes = p_.rows.num_batches * p_.rows.capacity * p_.k * ElementBytes(p_.lhs_type);
    streams.communicate.Run(
        SpanKind::kCommunication, "own rows", [this, &memory, bytes](Counters&) {
          arithmetic_->Copy({{memory.aux_out, bytes, memory.lhs, bytes, 1, bytes}});
        });
  }
  Finish(rank, streams.compute);
}

// Step i multiplies chunk r - i and sends it on at the same time. Without copies the GEMM reads the
// rows in place, in their rank's memory, and waits for nothing.
void CommOverlapP2PBase::RecordAllGather(int rank, RankStreams streams) const {
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
void CommOverlapP2PBase::RecordPairs(int rank, RankStreams streams) const {
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
    streams.communicate.Put(Chunk("send ", first) + Chunk(", ", first + 1), next, std::move(copies),
                            Arrived(first));
  }
}

// Slots of the buffer hold row blocks. GEMM i computes block r + i + 1 into slot i, which then goes
// to slot i + p of that rank; a rank's own block comes last, in slot p - 1.
void CommOverlapP2PBase::RecordReduceScatter(int rank, RankStreams streams) const {
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
        {{slot(peer, step - 1 + p), bytes, slot(rank, step - 1), bytes, 1, bytes}}, Arrived(rank));
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

}  // namespace cpd
