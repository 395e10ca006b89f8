// The second and the fourth kernel of `dispatch`: rows go into the channels of the receiving ranks,
// and from there into the result. Rows for ranks of the same device go into the result at once.
#pragma once

#include "kernels/block.h"
#include "kernels/call.h"
#include "kernels/copy.h"
#include "kernels/fabric.h"
#include "kernels/plan.h"

namespace cpd::kernels {

struct PushScratch {
  int rank[kMulticast];
  int64_t row[kMulticast];  // the first one, of that rank
  char* to[kMulticast];
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
  const int64_t num_pieces = state.first_piece[call.num_parts];
  for (int64_t i = block.index; i < num_pieces; i += block.num_blocks) {
    const int64_t piece = rank.Turned(i, num_pieces);
    int p = 0;
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

// Where row `row` of an array goes at rank `to`: into its result or its channel.
CPD_DEVICE char* PlaceOf(const Rank& rank, const Part& part, const Array& array, int to,
                         int64_t row) {
  const Call& call = rank.call;
  if (rank.IsHere(to)) {
    return array.out + (rank.IndexHere(to) * part.capacity + row) * array.out_row_bytes;
  }
  return Half(call, to, rank.state()->epoch) + array.data + row * array.in_row_bytes;
}

// Copies the rows of a piece for some of its replicas: each array is read once.
CPD_DEVICE void PushRows(const Block& block, const Rank& rank, const Piece& piece,
                         PushScratch* scratch) {
  const Call& call = rank.call;
  const Part& part = piece.part;
  const int64_t n = piece.num_rows;
  const int64_t src_row = rank.slots(part)[piece.slot].src_row + piece.begin;
  const uint64_t epoch = rank.state()->epoch;
  CPD_NO_UNROLL
  for (int i = 0; i < scratch->num; ++i) {
    const int to = scratch->rank[i];
    uint64_t* tags = Tags(call, to, epoch, part) + scratch->row[i];
    const uint64_t tag = rank.IsHere(to) ? kInPlace | epoch : epoch;
    CPD_NO_UNROLL
    for (int64_t r = block.thread; r < n; r += block.num_threads) tags[r] = tag;
  }
  for (int a = part.first_array; a < part.first_array + part.num_arrays; ++a) {
    const Array& array = call.arrays[a];
    for (int i = block.thread; i < scratch->num; i += block.num_threads) {
      scratch->to[i] = PlaceOf(rank, part, array, scratch->rank[i], scratch->row[i]);
    }
    block.Sync();
    Copy(block, rank.in(part, array) + src_row * array.in_row_bytes, scratch->to, scratch->num,
         n * array.in_row_bytes);
    block.Sync();
  }
}

// Copies rows to all receiving ranks, except remote ones.
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
          scratch->rank[num] = static_cast<int>(dst);
          scratch->row[num] = piece.dst_offset[t] + piece.begin;
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

// Rows of a piece with this call's tag.
struct Written {
  uint32_t num_arrived;   // in the channel
  uint32_t num_in_place;  // in the result
};

// One of the three is added to, one is read, and one is cleared; they take turns.
struct UnpackScratch {
  Written written[3];
};

// Takes `n` rows of one array: all at once if their tags are the same, else row by row, some
// threads of the block each.
CPD_DEVICE void UnpackRows(const Block& block, const char* from, char* to, const uint64_t* tags,
                           uint64_t epoch, int64_t n, bool are_same, int64_t row_bytes) {
  Block takers = are_same ? block : RowTakers(block, row_bytes);
  if (are_same) takers.index = 0, takers.num_blocks = 1;
  const int64_t rows = are_same ? n : 1;
  if (takers.index >= takers.num_blocks) return;
  CPD_NO_UNROLL
  for (int64_t r = takers.index * rows; r < n; r += takers.num_blocks * rows) {
    char* row = to + r * row_bytes;
    if (tags[r] == epoch) {
      Copy(takers, from + r * row_bytes, &row, 1, rows * row_bytes);
    } else if (tags[r] != (kInPlace | epoch)) {
      Fill(takers, row, 0, rows * row_bytes);
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

// Counts the rows of a piece by their tags. `turn` is the number of the piece, modulo 3.
CPD_DEVICE Written CountWritten(const Block& block, const uint64_t* tags, uint64_t epoch, int64_t n,
                                int turn, UnpackScratch* scratch) {
  uint32_t arrived = 0, in_place = 0;
  for (int64_t r = block.thread; r < n; r += block.num_threads) {
    const uint64_t tag = tags[r];
    arrived += tag == epoch;
    in_place += tag == (kInPlace | epoch);
  }
  AddOfAll(&scratch->written[turn].num_arrived, arrived);
  AddOfAll(&scratch->written[turn].num_in_place, in_place);
  block.Sync();
  if (block.thread == 0) scratch->written[turn == 0 ? 2 : turn - 1] = {};
  return scratch->written[turn];
}

// Copies rows that arrived in the channel, and clears those that were not written. Every tag
// denotes one row: fewer tags than sent rows mean that a row was written twice.
CPD_DEVICE void Unpack(const Block& block, const Rank& rank, UnpackScratch* scratch) {
  const Call& call = rank.call;
  State* state = rank.state();
  const uint64_t epoch = state->epoch;
  if (state->failed != kFine) {
    Spoil(block, rank);
    return;
  }
  if (block.thread == 0) {
    for (Written& written : scratch->written) written = {};
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
      const Written written = CountWritten(block, tags + begin, epoch, n, turn, scratch);
      turn = turn == 2 ? 0 : turn + 1;
      num_written += written.num_arrived + written.num_in_place;
      if (written.num_in_place == n) continue;
      const bool are_same =
          written.num_arrived == n || written.num_arrived + written.num_in_place == 0;
      for (int a = part.first_array; a < part.first_array + part.num_arrays; ++a) {
        const Array& array = call.arrays[a];
        UnpackRows(block, half + array.data + begin * array.in_row_bytes,
                   rank.out(part, array) + begin * array.out_row_bytes, tags + begin, epoch, n,
                   are_same, array.in_row_bytes);
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
