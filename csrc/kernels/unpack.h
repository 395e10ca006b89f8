// The fourth kernel of `dispatch`: rows go from the channel into the result.
#pragma once

#include "kernels/block.h"
#include "kernels/call.h"
#include "kernels/copy.h"

namespace cpd::kernels {

// What the tags of some rows say.
struct Tagged {
  const uint64_t* tags;
  uint64_t epoch;

  CPD_DEVICE bool IsWritten(int64_t row) const {
    return (tags[row] & kEpochOfTag) == (epoch & kEpochOfTag);
  }
  // Whether the row is in the channel, not in the result.
  CPD_DEVICE bool IsReady(int64_t row) const { return IsWritten(row) && !(tags[row] & kInPlace); }
};

// Rows of a strip.
struct Written {
  uint32_t num;  // in all
  uint32_t num_ready;
};

// Tags that a thread loads at once where no row passes through the channel.
constexpr int kTagsInFlight = 8;

struct UnpackScratch {
  // One of the three is added to, one is read, and one is cleared; they take turns.
  Written written[3];
  // Where no row does: written rows of each group; others in all groups, and those of this turn.
  uint32_t num_written[kMaxOperandGroups];
  uint32_t num_unwritten;
  uint32_t unwritten[kTagsInFlight * kMaxThreads];
  uint32_t overlaps;  // whether the last block has found that rows overlap
};

// Fills a result that has no valid plan: NaN for floats, -1 for signed integers.
CPD_DEVICE void Spoil(const Block& block, const Rank& rank) {
  const Call& call = rank.call;
  for (int p = 0; p < call.num_groups; ++p) {
    const OperandGroup& group = call.groups[p];
    const int64_t num_rows = call.is_dispatch ? group.capacity : group.num_tokens;
    const int64_t each = (num_rows + block.num_blocks - 1) / block.num_blocks;
    const int64_t begin = block.index * each;
    const int64_t n = begin + each < num_rows ? each : num_rows - begin;
    for (int a = group.first_array; a < group.first_array + group.num_arrays && n > 0; ++a) {
      const Array& array = call.arrays[a];
      Fill(block, rank.out(group, array) + begin * array.out_row_bytes, 0xff,
           n * array.out_row_bytes);
    }
  }
}

// Counts the rows of a strip by their tags. `turn` is the number of the strip, modulo 3.
CPD_DEVICE Written CountWritten(const Block& block, const Tagged& tagged, int64_t n, int turn,
                                UnpackScratch* scratch) {
  uint32_t num = 0, num_ready = 0;
  for (int64_t r = block.thread; r < n; r += block.num_threads) {
    num += tagged.IsWritten(r);
    num_ready += tagged.IsReady(r);
  }
  AddOfAll(&scratch->written[turn].num, num);
  AddOfAll(&scratch->written[turn].num_ready, num_ready);
  block.Sync();
  if (block.thread == 0) scratch->written[turn == 0 ? 2 : turn - 1] = {};
  return scratch->written[turn];
}

// Rows of one array that arrived, and where they go.
struct ArrivedRows {
  const char* from;
  char* to;
  int64_t num_rows, row_bytes;
  bool are_same;  // whether all have the same tag
};

// Takes rows of one array: all at once if their tags are the same, else row by row, some threads of
// the block each.
CPD_DEVICE void UnpackRows(const Block& block, const Tagged& tagged, const ArrivedRows& arrived) {
  const int64_t n = arrived.num_rows, row_bytes = arrived.row_bytes;
  const Block takers = arrived.are_same ? AllTakers(block) : RowTakers(block, row_bytes);
  const int64_t rows = arrived.are_same ? n : 1;
  if (takers.index >= takers.num_blocks) return;
  CPD_NO_UNROLL
  for (int64_t r = takers.index * rows; r < n; r += takers.num_blocks * rows) {
    char* row = arrived.to + r * row_bytes;
    if (tagged.IsReady(r)) {
      Copy(takers, arrived.from + r * row_bytes, &row, 1, rows * row_bytes);
    } else if (!tagged.IsWritten(r)) {
      Fill(takers, row, 0, rows * row_bytes);
    }
  }
}

// Takes the rows of a group, clears rows that were not written, and counts those that were.
CPD_DEVICE void UnpackGroup(const Block& block, const Rank& rank, int p, int* turn,
                            UnpackScratch* scratch) {
  const Call& call = rank.call;
  const OperandGroup& group = call.groups[p];
  State* state = rank.state();
  const char* half = Half(call, rank.rank(), state->epoch);
  const int64_t num_strips = (group.capacity + group.rows_per_strip - 1) / group.rows_per_strip;
  for (int64_t strip = block.index; strip < num_strips; strip += block.num_blocks) {
    const int64_t begin = rank.Turned(strip, num_strips) * group.rows_per_strip;
    const int64_t n = group.capacity - begin < group.rows_per_strip ? group.capacity - begin
                                                                    : group.rows_per_strip;
    const Tagged tagged{Tags(call, rank.rank(), state->epoch, group) + begin, state->epoch};
    const Written written = CountWritten(block, tagged, n, *turn, scratch);
    *turn = *turn == 2 ? 0 : *turn + 1;
    if (block.thread == 0 && written.num > 0) Add(&state->rows_written[p], written.num);
    if (written.num_ready == 0 && written.num == n) continue;
    const bool are_same = written.num_ready == n || written.num == 0;
    for (int a = group.first_array; a < group.first_array + group.num_arrays; ++a) {
      const Array& array = call.arrays[a];
      const ArrivedRows arrived{half + array.data + begin * array.in_row_bytes,
                                rank.out(group, array) + begin * array.out_row_bytes, n,
                                array.in_row_bytes, are_same};
      UnpackRows(block, tagged, arrived);
    }
  }
}

CPD_DEVICE void UnpackGroups(const Block& block, const Rank& rank, UnpackScratch* scratch) {
  if (block.thread == 0) {
    for (Written& written : scratch->written) written = {};
  }
  block.Sync();
  int turn = 0;
  for (int p = 0; p < rank.call.num_groups; ++p) {
    UnpackGroup(block, rank, p, &turn, scratch);
  }
}

// Clears the rows of a group that were not written; the others are in place. Returns how many of
// those this thread has seen. `num_cleared`: by the block, so far.
CPD_DEVICE uint32_t ClearGroup(const Block& block, const Rank& rank, int p, uint32_t* num_cleared,
                               UnpackScratch* scratch) {
  const OperandGroup& group = rank.call.groups[p];
  const int64_t capacity = group.capacity;
  const uint64_t epoch = rank.state()->epoch;
  const Tagged tagged{Tags(rank.call, rank.rank(), epoch, group), epoch};
  // After 8 rows, whose tags have 64 bytes, the next block takes its turn: all of them share a long
  // run of rows that were not written.
  const int run = block.num_threads % 8 == 0 ? 8 : 1;
  const int64_t mine =
      int64_t{block.thread / run * block.num_blocks + block.index} * run + block.thread % run;
  const int64_t step = int64_t{block.num_threads} * block.num_blocks;
  uint32_t num_written = 0;
  CPD_NO_UNROLL
  for (int64_t first = 0; first < capacity; first += kTagsInFlight * step) {
    uint64_t tags[kTagsInFlight];
    CPD_UNROLL
    for (int k = 0; k < kTagsInFlight; ++k) {
      const int64_t row = first + mine + k * step;
      tags[k] = row < capacity ? tagged.tags[row] : epoch;
    }
    uint32_t unwritten = 0;  // by bit
    CPD_UNROLL
    for (int k = 0; k < kTagsInFlight; ++k) {
      const bool is_written = (tags[k] & kEpochOfTag) == (epoch & kEpochOfTag);
      num_written += is_written && first + mine + k * step < capacity;
      unwritten |= uint32_t{!is_written} << k;
    }
    CPD_NO_UNROLL
    for (int k = 0; unwritten >> k != 0; ++k) {
      if ((unwritten >> k & 1) == 0) continue;
      const uint32_t at = Append(&scratch->num_unwritten) - *num_cleared;
      scratch->unwritten[at] = static_cast<uint32_t>(mine + k * step);
    }
    block.Sync();
    const uint32_t num = scratch->num_unwritten - *num_cleared;
    for (int a = group.first_array; a < group.first_array + group.num_arrays && num > 0; ++a) {
      const Array& array = rank.call.arrays[a];
      const Block takers = RowTakers(block, array.out_row_bytes);
      if (takers.index >= takers.num_blocks) continue;
      char* out = rank.out(group, array) + first * array.out_row_bytes;
      CPD_NO_UNROLL
      for (uint32_t u = takers.index; u < num; u += takers.num_blocks) {
        Fill(takers, out + scratch->unwritten[u] * array.out_row_bytes, 0, array.out_row_bytes);
      }
    }
    *num_cleared += num;
    block.Sync();
  }
  return num_written;
}

// The last phase where one device holds all ranks: rows that were written are in place.
CPD_DEVICE void ClearGroups(const Block& block, const Rank& rank, UnpackScratch* scratch) {
  if (block.thread == 0) {
    scratch->num_unwritten = 0;
    for (uint32_t& num : scratch->num_written) num = 0;
  }
  block.Sync();
  uint32_t num_cleared = 0;
  for (int p = 0; p < rank.call.num_groups; ++p) {
    AddOfAll(&scratch->num_written[p], ClearGroup(block, rank, p, &num_cleared, scratch));
  }
  block.Sync();
  CPD_NO_UNROLL
  for (int p = 0; p < rank.call.num_groups && block.thread == 0; ++p) {
    Add(&rank.state()->rows_written[p], scratch->num_written[p]);
  }
}

// Whether rows were written twice: every tag denotes one row, and there are fewer than rows sent.
CPD_DEVICE bool FindOverlap(const Rank& rank) {
  const Call& call = rank.call;
  State* state = rank.state();
  bool overlaps = false;
  for (int p = 0; p < call.num_groups; ++p) {
    uint64_t sent = 0;
    for (int from = 0; from < call.num_ranks; ++from) {
      sent += Message(call, rank.rank(), state->epoch, from)[2 + p];
    }
    const uint64_t written = LoadAcquire(&state->rows_written[p]);
    if (sent == written) continue;
    ErrorRecord error =
        ErrorOf(Failure::kOverlap, static_cast<int64_t>(sent), static_cast<int64_t>(written));
    error.group = p;
    Raise(rank, error);
    overlaps = true;
  }
  return overlaps;
}

// Takes all rows that have not been taken, and clears those that were not written. If some were
// written twice, the last block spoils the result: it alone sees the counts of all blocks, and
// their rows are there.
CPD_DEVICE void Unpack(const Block& block, const Rank& rank, UnpackScratch* scratch) {
  State* state = rank.state();
  Block spoilers = block;
  bool is_spoiled = state->failed != kFine;
  if (!is_spoiled) {
    if (HoldsAllRanks(rank.call)) {
      ClearGroups(block, rank, scratch);
    } else {
      UnpackGroups(block, rank, scratch);
    }
    block.Sync();
    if (block.thread == 0) {
      const auto num_blocks = static_cast<uint64_t>(block.num_blocks);
      const bool is_last = AddAndFetch(&state->blocks_done, 1) == num_blocks;
      scratch->overlaps = is_last && FindOverlap(rank);
    }
    block.Sync();
    is_spoiled = scratch->overlaps != 0;
    spoilers.index = 0;
    spoilers.num_blocks = 1;
  }
  if (is_spoiled) Spoil(spoilers, rank);
}

}  // namespace cpd::kernels
