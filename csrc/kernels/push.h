// The second and the fourth kernel of `dispatch`: rows go into the channels of the receiving ranks,
// and from there into the result.
#pragma once

#include "kernels/block.h"
#include "kernels/call.h"
#include "kernels/copy.h"
#include "kernels/fabric.h"
#include "kernels/plan.h"

namespace cpd::kernels {

struct PushScratch {
  char* half[kMulticast];
  int64_t dst_row[kMulticast];
  char* to[kMulticast];
  uint64_t* tags[kMulticast];
  int num;
};

// The last of `n` slots, by first piece, that begins at or before a piece. It contains the piece,
// since empty slots begin where the next one does.
CPD_DEVICE int64_t FindSlot(const Slot* slots, int64_t n, int64_t piece) {
  int64_t low = 0, high = n;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (slots[middle].first_piece <= piece ? low : high) = middle;
  }
  return low;
}

// Rows of a slot that a block moves at a time; whole shards if they are small.
struct Piece {
  const Part& part;
  int64_t slot;
  int64_t begin, num_rows;           // of the slot
  IntArray dst_rank, dst_offset;     // of all slots
  int64_t first_target, end_target;  // those of this slot
};

// Calls visit(piece) for each piece of this block, with all its threads.
template <typename Visit>
CPD_DEVICE void ForEachPiece(const Block& block, const Rank& rank, Visit visit) {
  const Call& call = rank.call;
  const State& state = *rank.state();
  if (state.failed != kFine) return;
  int p = 0;
  for (int64_t piece = block.index; piece < state.first_piece[call.num_parts];
       piece += block.num_blocks) {
    while (piece >= state.first_piece[p + 1]) ++p;
    const Part& part = call.parts[p];
    const int64_t s = FindSlot(rank.slots(part), part.num_slots, piece);
    const Slot slot = rank.slots(part)[s];
    const int64_t begin = (piece - slot.first_piece) * part.rows_per_piece;
    const int64_t rest = slot.num_rows - begin;
    const int64_t num_targets = part.num_slots * part.num_replicas;
    visit(Piece{part, s, begin, rest < part.rows_per_piece ? rest : part.rows_per_piece,
                rank.Field(part, part.dst_rank, num_targets),
                rank.Field(part, part.dst_offset, num_targets), s * part.num_replicas,
                (s + 1) * part.num_replicas});
  }
}

// Copies the rows of a piece for some of its replicas: each array is read once.
CPD_DEVICE void PushRows(const Block& block, const Rank& rank, const Piece& piece,
                         PushScratch* scratch) {
  const Call& call = rank.call;
  const Part& part = piece.part;
  const int64_t begin = piece.begin, n = piece.num_rows;
  const int64_t src_row = rank.slots(part)[piece.slot].src_row + begin;
  const uint64_t epoch = rank.state()->epoch;
  for (int i = block.thread; i < scratch->num; i += block.num_threads) {
    scratch->tags[i] =
        reinterpret_cast<uint64_t*>(scratch->half[i] + part.tags) + scratch->dst_row[i] + begin;
  }
  block.Sync();
  for (int i = 0; i < scratch->num; ++i) {
    for (int64_t r = block.thread; r < n; r += block.num_threads) scratch->tags[i][r] = epoch;
  }
  for (int a = part.first_array; a < part.first_array + part.num_arrays; ++a) {
    const Array& array = call.arrays[a];
    for (int i = block.thread; i < scratch->num; i += block.num_threads) {
      scratch->to[i] =
          scratch->half[i] + array.data + (scratch->dst_row[i] + begin) * array.in_row_bytes;
    }
    block.Sync();
    Copy(block, rank.in(part, array) + src_row * array.in_row_bytes, scratch->to, scratch->num,
         n * array.in_row_bytes);
    block.Sync();
  }
}

// Copies rows into the channels of all receiving ranks, except remote ones.
template <typename Fabric = Mapped>
CPD_DEVICE void Push(const Block& block, const Rank& rank, PushScratch* scratch) {
  const Call& call = rank.call;
  ForEachPiece(block, rank, [&](const Piece& piece) {
    for (int64_t t = piece.first_target; t < piece.end_target;) {
      int num = 0;  // t and num are equal on all threads
      for (; t < piece.end_target && num < kMulticast; ++t) {
        const int64_t dst = piece.dst_rank[t];
        if (dst < 0 || IsRemote<Fabric>(call, dst)) continue;
        if (block.thread == 0) {
          scratch->half[num] = Half(call, static_cast<int>(dst), rank.state()->epoch);
          scratch->dst_row[num] = piece.dst_offset[t];
        }
        ++num;
      }
      if (block.thread == 0) scratch->num = num;
      block.Sync();
      if (scratch->num > 0) PushRows(block, rank, piece, scratch);
      block.Sync();
    }
  });
}

// Three counters in turn: one is added to, one is read, and one is cleared.
struct UnpackScratch {
  uint32_t num_written[3];
};

// Takes `n` rows of one array, some written and some not; a few threads of the block take each row.
CPD_DEVICE void UnpackRows(const Block& block, const char* from, char* to, const uint64_t* tags,
                           uint64_t epoch, int64_t n, int64_t row_bytes) {
  Block few = block;
  few.num_threads = block.num_threads < 32 ? block.num_threads : 32;
  few.thread = block.thread % few.num_threads;
  for (int64_t r = block.thread / few.num_threads; r < n;
       r += block.num_threads / few.num_threads) {
    char* row = to + r * row_bytes;
    if (tags[r] == epoch) {
      Copy(few, from + r * row_bytes, &row, 1, row_bytes);
    } else {
      Fill(few, row, 0, row_bytes);
    }
  }
}

// Fills a result that has no valid plan: NaN for floats, -1 for signed integers.
CPD_DEVICE void Spoil(const Block& block, const Rank& rank) {
  const Call& call = rank.call;
  for (int p = 0; p < call.num_parts; ++p) {
    const Part& part = call.parts[p];
    const int64_t num_rows = call.is_dispatch ? part.capacity : part.num_tokens;
    const int64_t each = (num_rows + block.num_blocks - 1) / block.num_blocks;
    const int64_t begin = block.index * each;
    const int64_t n = begin + each < num_rows ? each : num_rows - begin;
    for (int a = part.first_array; a < part.first_array + part.num_arrays && n > 0; ++a) {
      const Array& array = call.arrays[a];
      Fill(block, rank.out(part, array) + begin * array.out_row_bytes, 0xff,
           n * array.out_row_bytes);
    }
  }
}

// Counts the rows of a piece that arrived. `turn` is the number of the piece, modulo 3.
CPD_DEVICE int64_t CountArrived(const Block& block, const uint64_t* tags, uint64_t epoch, int64_t n,
                                int turn, UnpackScratch* scratch) {
  uint32_t mine = 0;
  for (int64_t r = block.thread; r < n; r += block.num_threads) mine += tags[r] == epoch;
  AddOfAll(&scratch->num_written[turn], mine);
  block.Sync();
  if (block.thread == 0) scratch->num_written[turn == 0 ? 2 : turn - 1] = 0;
  return scratch->num_written[turn];
}

// Copies rows with this call's tag and clears the others. Every tag denotes one row that
// arrived: fewer tags than sent rows mean that a row was written twice.
CPD_DEVICE void Unpack(const Block& block, const Rank& rank, UnpackScratch* scratch) {
  const Call& call = rank.call;
  State* state = rank.state();
  const uint64_t epoch = state->epoch;
  if (state->failed != kFine) {
    Spoil(block, rank);
    return;
  }
  if (block.thread == 0) {
    for (uint32_t& count : scratch->num_written) count = 0;
  }
  block.Sync();
  const char* half = Half(call, rank.rank(), epoch);
  int turn = 0;
  for (int p = 0; p < call.num_parts; ++p) {
    const Part& part = call.parts[p];
    const uint64_t* tags = Tags(call, rank.rank(), epoch, part);
    uint64_t num_written = 0;
    for (int64_t begin = block.index * part.rows_per_piece; begin < part.capacity;
         begin += block.num_blocks * part.rows_per_piece) {
      const int64_t n =
          part.capacity - begin < part.rows_per_piece ? part.capacity - begin : part.rows_per_piece;
      const int64_t num_arrived = CountArrived(block, tags + begin, epoch, n, turn, scratch);
      turn = turn == 2 ? 0 : turn + 1;
      num_written += num_arrived;
      for (int a = part.first_array; a < part.first_array + part.num_arrays; ++a) {
        const Array& array = call.arrays[a];
        const char* from = half + array.data + begin * array.in_row_bytes;
        char* to = rank.out(part, array) + begin * array.out_row_bytes;
        if (num_arrived == n) {
          Copy(block, from, &to, 1, n * array.in_row_bytes);
        } else if (num_arrived == 0) {
          Fill(block, to, 0, n * array.out_row_bytes);
        } else {
          UnpackRows(block, from, to, tags + begin, epoch, n, array.in_row_bytes);
        }
      }
    }
    if (block.thread == 0 && num_written > 0) Add(&state->rows_written[p], num_written);
  }
  if (block.thread != 0 ||
      AddAndFetch(&state->blocks_done, 1) != static_cast<uint64_t>(block.num_blocks)) {
    return;
  }
  for (int p = 0; p < call.num_parts; ++p) {  // the last block sees the counts of all
    uint64_t sent = 0;
    for (int from = 0; from < call.num_ranks; ++from) {
      sent += Message(call, rank.rank(), epoch, from)[2 + p];
    }
    const uint64_t written = LoadAcquire(&state->rows_written[p]);
    if (sent == written) continue;
    ErrorRecord error{};
    error.failure = Failure::kOverlap;
    error.part = p;
    error.expected = static_cast<int64_t>(sent);
    error.seen = static_cast<int64_t>(written);
    Raise(rank, error);
  }
}

}  // namespace cpd::kernels
