// The second and the fourth kernel of `combine`: every rank exposes its rows in its channel, and
// the owners pull and sum them.
#pragma once

#include <type_traits>

#include "kernels/block.h"
#include "kernels/call.h"
#include "kernels/copy.h"
#include "kernels/fabric.h"
#include "kernels/plan.h"
#include "kernels/push.h"

namespace cpd::kernels {

// Copies rows [0, num_rows) of a part into this rank's own channel, from the address `place`.
CPD_DEVICE void CopyIn(const Block& block, const Rank& rank, const Part& part, int64_t num_rows,
                       char* base, int64_t Array::* place) {
  for (int64_t begin = block.index * part.rows_per_piece; begin < num_rows;
       begin += block.num_blocks * part.rows_per_piece) {
    const int64_t n =
        num_rows - begin < part.rows_per_piece ? num_rows - begin : part.rows_per_piece;
    for (int a = part.first_array; a < part.first_array + part.num_arrays; ++a) {
      const Array& array = rank.call.arrays[a];
      char* to = base + array.*place + begin * array.in_row_bytes;
      Copy(block, rank.in(part, array) + begin * array.in_row_bytes, &to, 1,
           n * array.in_row_bytes);
    }
  }
}

// Exposes y: copies it into this rank's channel.
CPD_DEVICE void Stage(const Block& block, const Rank& rank) {
  const Call& call = rank.call;
  const State& state = *rank.state();
  if (state.failed != kFine) return;
  for (int p = 0; p < call.num_parts; ++p) {
    CopyIn(block, rank, call.parts[p], call.parts[p].capacity, Half(call, rank.rank(), state.epoch),
           &Array::data);
  }
}

// Rows [begin, end) of the owner, as one rank holds them: row r is its row r + shift.
struct Source {
  int64_t begin, end;
  int64_t shift;
  const char* half;  // the start of the channel for fetched rows
};

// If a piece of rows has more sources, they are looked up row by row, which is slow.
constexpr int kMaxSources = 256;

struct SumScratch {
  int64_t scan[2 * kMaxThreads];
  Source sources[kMaxSources];
};

// The sources of an owner's rows, in the order of slots, then replicas.
template <typename Fabric>
struct Sources {
  const Rank& rank;
  const Part& part;
  const Slot* slots;
  IntArray dst_rank, dst_offset;

  CPD_DEVICE Sources(const Rank& rank, const Part& part)
      : rank(rank),
        part(part),
        slots(rank.slots(part)),
        dst_rank(rank.Field(part, part.dst_rank, part.num_slots * part.num_replicas)),
        dst_offset(rank.Field(part, part.dst_offset, part.num_slots * part.num_replicas)) {}

  // `num_fetched`: remote replicas of the slot before this one.
  CPD_DEVICE Source At(int64_t s, int64_t c, int64_t num_fetched) const {
    const int64_t t = s * part.num_replicas + c;
    const Slot& slot = slots[s];
    if (IsRemote<Fabric>(rank.call, dst_rank[t])) {
      const int64_t first = rank.first_fetched(part)[s] + num_fetched * slot.num_rows;
      return {slot.src_row, slot.src_row + slot.num_rows, first - slot.src_row, rank.channel()};
    }
    return {slot.src_row, slot.src_row + slot.num_rows, dst_offset[t] - slot.src_row,
            Half(rank.call, static_cast<int>(dst_rank[t]), rank.state()->epoch)};
  }

  // Calls visit(source) for each source in slots [first, last) that overlaps rows [begin, end).
  template <typename Visit>
  CPD_DEVICE void ForEach(int64_t first, int64_t last, int64_t begin, int64_t end,
                          Visit visit) const {
    for (int64_t s = first; s < last; ++s) {
      const Slot& slot = slots[s];
      if (slot.num_rows == 0 || slot.src_row >= end || slot.src_row + slot.num_rows <= begin) {
        continue;
      }
      int64_t num_fetched = 0;
      for (int64_t c = 0; c < part.num_replicas; ++c) {
        const int64_t dst = dst_rank[s * part.num_replicas + c];
        if (dst < 0) continue;
        visit(At(s, c, num_fetched));
        num_fetched += IsRemote<Fabric>(rank.call, dst);
      }
    }
  }

  CPD_DEVICE const char* RowOf(const Source& source, const Array& array, int64_t row) const {
    const bool is_fetched = Fabric::kHasNetwork && source.half == rank.channel();
    return source.half + (is_fetched ? array.staged : array.data) +
           (row + source.shift) * array.in_row_bytes;
  }

  // Gathers the sources of rows [begin, end) in `scratch`; returns their number, even if they do
  // not fit.
  CPD_DEVICE int64_t Gather(const Block& block, int64_t begin, int64_t end,
                            SumScratch* scratch) const {
    const Share mine = ShareOf(block, part.num_slots);
    int64_t count = 0, total;
    ForEach(mine.begin, mine.end, begin, end, [&](const Source&) { ++count; });
    int64_t at = SumBefore(block, count, scratch->scan, &total);
    if (total <= kMaxSources) {
      ForEach(mine.begin, mine.end, begin, end,
              [&](const Source& source) { scratch->sources[at++] = source; });
    }
    block.Sync();
    return total;
  }
};

template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Elements {
  T items[N];
};

// N adjacent elements: accumulates them, and writes the sum.
template <typename In, typename Acc, typename Out, int N>
struct Sum {
  Elements<In, N> first{};
  Acc sums[N] = {};
  int count = 0;

  CPD_DEVICE void Add(const char* from) {
    const auto next = *reinterpret_cast<const Elements<In, N>*>(from);
    if (count++ == 0) {
      first = next;
      CPD_UNROLL
      for (int i = 0; i < N; ++i) sums[i] = static_cast<Acc>(next.items[i]);
    } else {
      CPD_UNROLL
      for (int i = 0; i < N; ++i) sums[i] += static_cast<Acc>(next.items[i]);
    }
  }

  CPD_DEVICE void Write(char* to) const {
    auto* out = reinterpret_cast<Elements<Out, N>*>(to);
    if constexpr (std::is_same_v<In, Out>) {
      if (count == 1) {  // nothing to round: bit for bit
        *out = first;
        return;
      }
    }
    Elements<Out, N> result;
    CPD_UNROLL
    for (int i = 0; i < N; ++i) result.items[i] = count ? Round<Out>(sums[i]) : Round<Out>(Acc{});
    *out = result;
  }
};

// Sums rows [begin, end) of one array, from the gathered sources or, if there are too many, from
// all.
template <typename In, typename Acc, typename Out, int N, typename Fabric>
CPD_DEVICE void SumRowsOf(const Block& block, const Sources<Fabric>& sources, const Array& array,
                          char* out, int64_t begin, int64_t end, int64_t num_gathered,
                          const SumScratch& scratch) {
  const int64_t per_row = array.out_row_bytes / static_cast<int64_t>(sizeof(Out) * N);
  const int64_t count = (end - begin) * per_row;
  for (int64_t i = block.thread; i < count; i += block.num_threads) {
    const int64_t row = begin + i / per_row;
    const int64_t column = i % per_row;
    Sum<In, Acc, Out, N> sum;
    const auto add = [&](const Source& source) {
      if (row < source.begin || row >= source.end) return;
      sum.Add(sources.RowOf(source, array, row) + column * static_cast<int64_t>(sizeof(In) * N));
    };
    if (num_gathered <= kMaxSources) {
      for (int k = 0; k < num_gathered; ++k) add(scratch.sources[k]);
    } else {
      sources.ForEach(0, sources.part.num_slots, row, row + 1, add);
    }
    sum.Write(out + row * array.out_row_bytes + column * static_cast<int64_t>(sizeof(Out) * N));
  }
}

// 16 bytes of input at a time, if rows and the result are aligned to that.
template <typename In, typename Acc, typename Out, typename Fabric>
CPD_DEVICE void SumArray(const Block& block, const Sources<Fabric>& sources, const Array& array,
                         char* out, int64_t begin, int64_t end, int64_t num_gathered,
                         const SumScratch& scratch) {
  constexpr int kWide = 16 / sizeof(In);
  if (array.in_row_bytes % 16 == 0 && reinterpret_cast<uint64_t>(out) % 16 == 0) {
    SumRowsOf<In, Acc, Out, kWide>(block, sources, array, out, begin, end, num_gathered, scratch);
  } else {
    SumRowsOf<In, Acc, Out, 1>(block, sources, array, out, begin, end, num_gathered, scratch);
  }
}

template <typename... Arguments>
CPD_DEVICE void SumByType(const Array& array, const Arguments&... arguments) {
  const bool widen = array.in_type != array.out_type;
  switch (array.in_type) {
    case DataType::kBF16:
      return widen ? SumArray<BF16, float, float>(arguments...)
                   : SumArray<BF16, float, BF16>(arguments...);
    case DataType::kF16:
      return widen ? SumArray<F16, float, float>(arguments...)
                   : SumArray<F16, float, F16>(arguments...);
    case DataType::kF32:
      return SumArray<float, float, float>(arguments...);
    case DataType::kF64:
      return SumArray<double, double, double>(arguments...);
    case DataType::kI8:
    case DataType::kU8:  // integers wrap, signed or not
      return SumArray<uint8_t, uint8_t, uint8_t>(arguments...);
    case DataType::kI16:
    case DataType::kU16:
      return SumArray<uint16_t, uint16_t, uint16_t>(arguments...);
    case DataType::kI32:
    case DataType::kU32:
      return SumArray<uint32_t, uint32_t, uint32_t>(arguments...);
    case DataType::kI64:
    case DataType::kU64:
      return SumArray<uint64_t, uint64_t, uint64_t>(arguments...);
    case DataType::kE4M3:
    case DataType::kE5M2:
    case DataType::kOther:
      return;  // rejected by the handler
  }
}

template <typename Fabric = Mapped>
CPD_DEVICE void Pull(const Block& block, const Rank& rank, SumScratch* scratch) {
  const Call& call = rank.call;
  if (rank.state()->failed != kFine) {
    Spoil(block, rank);
    return;
  }
  for (int p = 0; p < call.num_parts; ++p) {
    const Part& part = call.parts[p];
    const Sources<Fabric> sources(rank, part);
    for (int64_t begin = block.index * part.rows_per_piece; begin < part.num_tokens;
         begin += block.num_blocks * part.rows_per_piece) {
      const int64_t end = begin + part.rows_per_piece < part.num_tokens
                              ? begin + part.rows_per_piece
                              : part.num_tokens;
      const int64_t num_gathered = sources.Gather(block, begin, end, scratch);
      for (int a = part.first_array; a < part.first_array + part.num_arrays; ++a) {
        const Array& array = call.arrays[a];
        SumByType(array, block, sources, array, rank.out(part, array), begin, end, num_gathered,
                  *scratch);
      }
      block.Sync();
    }
  }
}

}  // namespace cpd::kernels
