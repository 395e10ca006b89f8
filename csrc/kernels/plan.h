// The first kernel of a call: one block per rank checks its plan and cuts it into strips.
#pragma once

#include "kernels/block.h"
#include "kernels/call.h"

namespace cpd::kernels {

// ---- How the ranks of a call reach each other: a parameter of its kernels, the fabric.
//
// A network has, besides `kHasNetwork`, for memory at this rank's own addresses and rank `pe`:
//   Put(block, to, from, bytes, pe)   a block copies to the peer; done when it is quiet
//   Get(block, to, from, bytes, pe)   the same from the peer
//   Quiet()                           waits until all puts and gets of this process are done
//   PutSignal(to, from, bytes, signal, value, pe)   a put, and a signal that is not seen before it
//   SetSignal(signal, value, pe)
//   Observe(signal, value)            a signal has been seen here: makes visible what came before
// The last four are called by one thread. `from` of a put and `to` of a get are in the channel too.

// All ranks map each other's memory.
struct Mapped {
  static constexpr bool kHasNetwork = false;
};

// Whether a rank is reached over the network.
template <typename Fabric>
CPD_DEVICE bool IsRemote(const Call& call, int64_t rank) {
  if constexpr (Fabric::kHasNetwork) {
    return call.pe[rank] >= 0;
  } else {
    return false;
  }
}

// ---- Prefix sums over a block's items, in order.

// Each of some threads or blocks owns the items [begin, end) of n.
struct Share {
  int64_t begin, end;
};

CPD_DEVICE Share ShareOf(int index, int num, int64_t n) {
  const int64_t each = (n + num - 1) / num;
  const int64_t begin = index * each < n ? index * each : n;
  return {begin, begin + each < n ? begin + each : n};
}

CPD_DEVICE Share ShareOf(const Block& block, int64_t n) {
  return ShareOf(block.thread, block.num_threads, n);
}

// The sum of `mine` over the threads before this one; `*total` becomes the sum over all threads.
// `scratch` holds 2 * kMaxThreads numbers and is free again after the next Sync.
CPD_DEVICE int64_t SumBefore(const Block& block, int64_t mine, int64_t* scratch, int64_t* total) {
  int64_t* from = scratch;
  int64_t* to = scratch + kMaxThreads;
  from[block.thread] = mine;
  block.Sync();
  for (int step = 1; step < block.num_threads; step *= 2) {
    to[block.thread] = from[block.thread] + (block.thread >= step ? from[block.thread - step] : 0);
    block.Sync();
    int64_t* other = from;
    from = to;
    to = other;
  }
  *total = from[block.num_threads - 1];
  const int64_t before = from[block.thread] - mine;
  block.Sync();
  return before;
}

// ---- Checks and strips.

// More rows than any array has; sums of many of them stay below 2^63.
constexpr int64_t kManyRows = int64_t{1} << 40;
constexpr uint64_t kNowhere = ~uint64_t{0};

struct PlanScratch {
  int64_t scan[2 * kMaxThreads];
  uint64_t first_bad;
};

CPD_DEVICE int64_t Clamp(int64_t rows) {
  return rows < 0 ? 0 : rows < kManyRows ? rows : kManyRows;
}

// A slot without destination may be longer than the array; none of it moves.
CPD_DEVICE int64_t NumStrips(const OperandGroup& group, int64_t rows) {
  return rows > group.num_tokens ? 0 : (rows + group.rows_per_push - 1) / group.rows_per_push;
}

// The error in replica `c` of slot `s`, if any: the checks of csrc/dispatch/dispatch.cc that one
// rank can make.
CPD_DEVICE ErrorRecord CheckTarget(const Rank& rank, const OperandGroup& group, int64_t src_row,
                                   int64_t s, int64_t c) {
  const Call& call = rank.call;
  const int64_t target = s * group.num_replicas + c;
  const int64_t num_targets = group.num_slots * group.num_replicas;
  const int64_t num_rows = rank.Field(group, group.seq_len, group.num_slots)[s];
  ErrorRecord error{};
  if (num_rows < 0 || src_row < 0) {
    error = ErrorOf(Failure::kLength, src_row, num_rows);
  } else if (num_rows > 0) {
    const int64_t dst = rank.Field(group, group.dst_rank, num_targets)[target];
    if (dst == -1) return error;
    if (dst < -1 || dst >= call.num_ranks) {
      error = ErrorOf(Failure::kDstRank, 0, dst);
    } else if (num_rows > group.num_tokens || src_row > group.num_tokens - num_rows) {
      error = ErrorOf(Failure::kTokens, src_row, num_rows);
    } else {
      const int64_t dst_row = rank.Field(group, group.dst_offset, num_targets)[target];
      if (dst_row < 0 || dst_row > kManyRows) {
        error = ErrorOf(Failure::kDstOffset, 0, dst_row);
      } else if (dst_row > group.capacity - num_rows) {
        error = ErrorOf(Failure::kCapacity, 0, dst_row + num_rows);
        error.peer = dst;
      }
    }
  }
  error.slot = s;
  error.replica = c;
  return error;
}

// Writes where the slots of a group begin, and the strips in which they move.
CPD_DEVICE void CutSlots(const Block& block, const Rank& rank, int p, PlanScratch* scratch) {
  const OperandGroup& group = rank.call.groups[p];
  Slot* slots = rank.slots(group);
  const IntArray seq_len = rank.Field(group, group.seq_len, group.num_slots);
  const IntArray src_offset =
      group.src_offset ? rank.Field(group, group.src_offset, group.num_slots) : IntArray{};
  const Share mine = ShareOf(block, group.num_slots);
  int64_t rows = 0, strips = 0, total;
  for (int64_t s = mine.begin; s < mine.end; ++s) {
    const int64_t n = Clamp(seq_len[s]);
    rows += n;
    strips += NumStrips(group, n);
  }
  int64_t row = SumBefore(block, rows, scratch->scan, &total);
  int64_t strip = SumBefore(block, strips, scratch->scan, &total);
  const int64_t first = rank.state()->first_strip[p];
  for (int64_t s = mine.begin; s < mine.end; ++s) {
    const int64_t n = Clamp(seq_len[s]);
    slots[s] = {src_offset ? src_offset[s] : row, n, first + strip};
    row += n;
    strip += NumStrips(group, n);
  }
  block.Sync();
  if (block.thread == 0) rank.state()->first_strip[p + 1] = first + total;
  block.Sync();
}

// The checksum of the plan that a rank follows; 0 without a fingerprint.
CPD_DEVICE uint64_t ChecksumOfPlan(const Call& call, int p) {
  const IntArray& fingerprint = call.groups[p].fingerprint;
  return fingerprint ? static_cast<uint64_t>(fingerprint[0]) : 0;
}

// Checks that the plan was made for this rank, and for the batch that it sees.
CPD_DEVICE bool CheckFingerprint(const Block& block, const Rank& rank, int p) {
  const IntArray& fingerprint = rank.call.groups[p].fingerprint;
  if (!fingerprint) return true;
  for (int64_t i = 1; i < kFingerprintSize; i += 2) {
    if (fingerprint[i] == fingerprint[i + 1]) continue;
    if (block.thread == 0) {
      ErrorRecord error = ErrorOf(Failure::kBatch, fingerprint[i], fingerprint[i + 1]);
      error.group = p;
      error.slot = i / 2;
      Raise(rank, error);
    }
    return false;
  }
  return true;
}

// Checks every target of a group and counts the rows and strips of each rank; raises the first
// error.
CPD_DEVICE bool CheckGroup(const Block& block, const Rank& rank, int p, PlanScratch* scratch) {
  const Call& call = rank.call;
  const OperandGroup& group = call.groups[p];
  const Slot* slots = rank.slots(group);
  uint64_t* sent = rank.sent(p);
  const int64_t num_targets = group.num_slots * group.num_replicas;
  const IntArray dst_rank = rank.Field(group, group.dst_rank, num_targets);
  if (block.thread == 0) scratch->first_bad = kNowhere;
  for (int r = block.thread; r < call.num_ranks; r += block.num_threads) sent[r] = 0;
  block.Sync();
  for (int64_t t = block.thread; t < num_targets; t += block.num_threads) {
    const int64_t s = t / group.num_replicas;
    if (CheckTarget(rank, group, slots[s].src_row, s, t % group.num_replicas).failure !=
        Failure::kNone) {
      Lower(&scratch->first_bad, t);
    } else if (slots[s].num_rows > 0 && dst_rank[t] >= 0) {
      Add(&sent[dst_rank[t]], slots[s].num_rows);
      Add(&rank.state()->strips_left[dst_rank[t]], NumStrips(group, slots[s].num_rows));
    }
  }
  block.Sync();
  const int64_t need = rank.Field(group, group.num_recv_tokens, call.num_ranks + 1)[call.num_ranks];
  const bool is_bad = scratch->first_bad != kNowhere || need > group.capacity;
  if (is_bad && block.thread == 0) {
    ErrorRecord error{};
    if (scratch->first_bad != kNowhere) {
      const auto t = static_cast<int64_t>(scratch->first_bad);
      const int64_t s = t / group.num_replicas;
      error = CheckTarget(rank, group, slots[s].src_row, s, t % group.num_replicas);
    } else {
      error = ErrorOf(Failure::kCapacity, 0, need);
      error.peer = rank.rank();
    }
    error.group = p;
    Raise(rank, error);
  }
  block.Sync();
  return !is_bad;
}

// Assigns a staging place to the rows that combine fetches, by slot and replica. There is enough
// space unless ranges overlap on the rank that holds them.
template <typename Fabric>
CPD_DEVICE bool CutFetches(const Block& block, const Rank& rank, int p, PlanScratch* scratch) {
  const Call& call = rank.call;
  const OperandGroup& group = call.groups[p];
  const Slot* slots = rank.slots(group);
  const IntArray dst_rank = rank.Field(group, group.dst_rank, group.num_slots * group.num_replicas);
  int64_t* first_fetched = rank.first_fetched(group);
  const Share mine = ShareOf(block, group.num_slots);
  int64_t rows = 0, total;
  for (int64_t s = mine.begin; s < mine.end; ++s) {
    first_fetched[s] = rows;  // from the thread's own first slot
    for (int64_t c = 0; c < group.num_replicas && slots[s].num_rows > 0; ++c) {
      const int64_t dst = dst_rank[s * group.num_replicas + c];
      if (dst >= 0 && IsRemote<Fabric>(call, dst)) rows += slots[s].num_rows;
    }
  }
  const int64_t before = SumBefore(block, rows, scratch->scan, &total);
  for (int64_t s = mine.begin; s < mine.end; ++s) first_fetched[s] += before;
  if (total > group.staged_rows && block.thread == 0) {
    ErrorRecord error = ErrorOf(Failure::kFetched, group.staged_rows, total);
    error.group = p;
    Raise(rank, error);
  }
  return total <= group.staged_rows;
}

// Begins the rank's next call. A rejected plan moves nothing and tells every rank.
template <typename Fabric = Mapped>
CPD_DEVICE void Prepare(const Block& block, const Rank& rank, PlanScratch* scratch) {
  const Call& call = rank.call;
  State* state = rank.state();
  if (block.thread == 0) {
    state->epoch += 1;
    state->failed = state->broken ? kGivenUp : kFine;
    state->blocks_sent = 0;
    state->blocks_done = 0;
    state->first_strip[0] = 0;
    for (int p = 0; p < call.num_groups; ++p) state->rows_written[p] = 0;
  }
  for (int r = block.thread; r < call.num_ranks; r += block.num_threads) state->strips_left[r] = 0;
  block.Sync();
  bool is_fine = true;
  if (call.rank_operand && *call.rank_operand != rank.rank()) {
    is_fine = false;
    if (block.thread == 0) Raise(rank, ErrorOf(Failure::kRank, rank.rank(), *call.rank_operand));
  }
  for (int p = 0; p < call.num_groups; ++p) {
    CutSlots(block, rank, p, scratch);
    is_fine = is_fine && CheckFingerprint(block, rank, p);
    is_fine = is_fine && CheckGroup(block, rank, p, scratch);
    if constexpr (Fabric::kHasNetwork) {
      if (!call.is_dispatch) is_fine = is_fine && CutFetches<Fabric>(block, rank, p, scratch);
    }
  }
  if (block.thread == 0) {
    if (state->broken) {
      Raise(rank, ErrorOf(Failure::kBroken));
    } else if (!is_fine) {
      state->failed = kRefused;
    }
  }
}

}  // namespace cpd::kernels
