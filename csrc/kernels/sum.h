// The second and the fourth kernel of `combine`: every rank exposes its rows in its channel, and
// the owners pull and sum them. Rows of ranks of the same device are read where they are.
#pragma once

#include <type_traits>

#include "kernels/block.h"
#include "kernels/call.h"
#include "kernels/copy.h"
#include "kernels/fabric.h"
#include "kernels/plan.h"
#include "kernels/sources.h"
#include "kernels/unpack.h"

namespace cpd::kernels {

// Where rows of a group lie in a channel: those of each array at `base` plus its offset.
struct RowsInChannel {
  int64_t num_rows;
  char* base;
  int64_t Array::* offset;
};

// Copies the first rows of a group into this rank's own channel.
CPD_DEVICE void CopyIn(const Block& block, const Rank& rank, const OperandGroup& group,
                       const RowsInChannel& rows) {
  const int64_t num_rows = rows.num_rows;
  for (int64_t begin = block.index * group.rows_per_strip; begin < num_rows;
       begin += block.num_blocks * group.rows_per_strip) {
    const int64_t n =
        num_rows - begin < group.rows_per_strip ? num_rows - begin : group.rows_per_strip;
    for (int a = group.first_array; a < group.first_array + group.num_arrays; ++a) {
      const Array& array = rank.call.arrays[a];
      char* to = rows.base + array.*rows.offset + begin * array.in_row_bytes;
      Copy(block, rank.in(group, array) + begin * array.in_row_bytes, &to, 1,
           n * array.in_row_bytes);
    }
  }
}

// Exposes y to other devices: copies it into this rank's channel.
CPD_DEVICE void Stage(const Block& block, const Rank& rank) {
  const Call& call = rank.call;
  const State& state = *rank.state();
  if (state.failed != kFine) return;
  for (int p = 0; p < call.num_groups; ++p) {
    const OperandGroup& group = call.groups[p];
    CopyIn(block, rank, group,
           {group.capacity, Half(call, rank.rank(), state.epoch), &Array::data});
  }
}

// Small integers, added in one word: no carry leaves the highest bit of any.
template <uint32_t kHighest>
struct Packed {
  uint32_t word;

  friend CPD_DEVICE Packed operator+(Packed a, Packed b) {
    return {((a.word & ~kHighest) + (b.word & ~kHighest)) ^ ((a.word ^ b.word) & kHighest)};
  }
};

// Adds up 16 bytes of input at a time, kInFlight times per thread.
template <typename In, typename Acc, typename Out, typename Fabric>
CPD_DEVICE void SumVectors(const Block& takers, const Sources<Fabric>& sources, const Array& array,
                           const OwnedRow& owned) {
  constexpr int kWide = 16 / sizeof(In);
  using Wide = Elements<In, kWide>;
  const int64_t count = array.in_row_bytes / 16, step = takers.num_threads;
  CPD_NO_UNROLL
  for (int64_t i = takers.thread; i < count; i += kInFlight * step) {
    Acc sums[kInFlight][kWide] = {};
    bool is_first = true;
    CPD_NO_UNROLL
    for (int64_t s = 0; s < owned.num_gathered; ++s) {
      const Source& source = owned.gathered[s];
      if (!owned.IsIn(source)) continue;
      const char* row = Global(sources.RowOf(source, array, owned.row));
      const auto* from = reinterpret_cast<const Wide*>(row) + i;
      Wide values[kInFlight] = {};
      CPD_UNROLL
      for (int k = 0; k < kInFlight; ++k) {
        if (i + k * step < count) values[k] = from[k * step];
      }
      CPD_UNROLL
      for (int k = 0; k < kInFlight; ++k) {
        CPD_UNROLL
        for (int e = 0; e < kWide; ++e) {
          const auto value = static_cast<Acc>(values[k].items[e]);
          sums[k][e] = is_first ? value : static_cast<Acc>(sums[k][e] + value);  // keeps -0
        }
      }
      is_first = false;
    }
    auto* to = reinterpret_cast<Elements<Out, kWide>*>(owned.to) + i;
    CPD_UNROLL
    for (int k = 0; k < kInFlight; ++k) {
      if (i + k * step >= count) continue;
      Elements<Out, kWide> sum;
      CPD_UNROLL
      for (int e = 0; e < kWide; ++e) {
        if constexpr (std::is_same_v<Acc, Out>) {
          sum.items[e] = sums[k][e];
        } else {
          sum.items[e] = Round<Out>(sums[k][e]);
        }
      }
      to[k * step] = sum;
    }
  }
}

// Adds up element by element: rows without alignment, or with more sources than are gathered.
template <typename In, typename Acc, typename Out, typename Fabric>
CPD_DEVICE void SumElements(const Block& takers, const Sources<Fabric>& sources, const Array& array,
                            const OwnedRow& owned) {
  const int64_t count = array.in_row_bytes / static_cast<int64_t>(sizeof(In));
  CPD_NO_UNROLL
  for (int64_t i = takers.thread; i < count; i += takers.num_threads) {
    Acc sum{};
    bool is_first = true;
    sources.ForEachOf(owned, [&](const Source& source) {
      const char* row = Global(sources.RowOf(source, array, owned.row));
      const auto value = static_cast<Acc>(reinterpret_cast<const In*>(row)[i]);
      sum = is_first ? value : static_cast<Acc>(sum + value);
      is_first = false;
    });
    reinterpret_cast<Out*>(owned.to)[i] = Round<Out>(sum);
  }
}

// `Wide` replaces all three types where rows are aligned, if it is given.
template <typename In, typename Acc, typename Out, typename Wide = void, typename Fabric>
CPD_DEVICE void SumRow(const Block& takers, const Sources<Fabric>& sources, const Array& array,
                       const OwnedRow& owned, bool is_wide) {
  if (!is_wide) {
    SumElements<In, Acc, Out>(takers, sources, array, owned);
  } else if constexpr (std::is_void_v<Wide>) {
    SumVectors<In, Acc, Out>(takers, sources, array, owned);
  } else {
    SumVectors<Wide, Wide, Wide>(takers, sources, array, owned);
  }
}

template <typename... Arguments>
CPD_DEVICE void SumByType(DataType in, DataType out, const Arguments&... arguments) {
  const bool widen = in != out;
  switch (in) {
    case DataType::kBF16:
      return widen ? SumRow<BF16, float, float>(arguments...)
                   : SumRow<BF16, float, BF16>(arguments...);
    case DataType::kF16:
      return widen ? SumRow<F16, float, float>(arguments...)
                   : SumRow<F16, float, F16>(arguments...);
    case DataType::kF32:
      return SumRow<float, float, float>(arguments...);
    case DataType::kF64:
      return SumRow<double, double, double>(arguments...);
    case DataType::kI8:
    case DataType::kU8:  // integers wrap, signed or not
      return SumRow<uint8_t, uint8_t, uint8_t, Packed<0x80808080>>(arguments...);
    case DataType::kI16:
    case DataType::kU16:
      return SumRow<uint16_t, uint16_t, uint16_t, Packed<0x80008000>>(arguments...);
    case DataType::kI32:
    case DataType::kU32:
      return SumRow<uint32_t, uint32_t, uint32_t>(arguments...);
    case DataType::kI64:
    case DataType::kU64:
      return SumRow<uint64_t, uint64_t, uint64_t>(arguments...);
    case DataType::kE4M3:
    case DataType::kE5M2:
    case DataType::kOther:
      return;  // rejected by the handler
  }
}

// Pulls a strip of one array. The sources of a row are found once; most rows have one, whose bits
// they keep. A strip of one source is pulled like one long row.
template <typename Fabric>
CPD_DEVICE void PullRows(const Block& block, const Sources<Fabric>& sources, const Array& array,
                         const OwnedStrip& strip) {
  const bool is_whole = array.in_type == array.out_type && strip.IsWhole();
  const Block takers = is_whole ? AllTakers(block) : RowTakers(block, array.in_row_bytes);
  const int64_t rows = is_whole ? strip.end - strip.begin : 1;
  if (takers.index >= takers.num_blocks) return;
  char* out = sources.rank.out(sources.group, array);
  const uint64_t places = reinterpret_cast<uint64_t>(array.in) | reinterpret_cast<uint64_t>(out);
  const bool is_wide =
      strip.num_gathered <= kMaxSources && array.in_row_bytes % 16 == 0 && places % 16 == 0;
  CPD_NO_UNROLL
  for (int64_t row = strip.begin + takers.index; row < strip.end; row += takers.num_blocks * rows) {
    const OwnedRow owned{row, strip.gathered, strip.num_gathered, out + row * array.out_row_bytes};
    const char* from = nullptr;
    int num = 0;
    sources.ForEachOf(owned, [&](const Source& source) {
      if (num++ == 0) from = sources.RowOf(source, array, row);
    });
    char* to = owned.to;
    if (num == 0) {
      Fill(takers, to, 0, rows * array.out_row_bytes);
    } else if (num == 1 && array.in_type == array.out_type) {
      Copy(takers, Global(from), &to, 1, rows * array.in_row_bytes);
    } else {
      SumByType(array.in_type, array.out_type, takers, sources, array, owned, is_wide);
    }
  }
}

// Each block pulls one run of rows, of different ranks at the same time, in strips.
template <typename Fabric = Mapped>
CPD_DEVICE void Pull(const Block& block, const Rank& rank, SumScratch* scratch) {
  const Call& call = rank.call;
  if (rank.state()->failed != kFine) {
    Spoil(block, rank);
    return;
  }
  for (int p = 0; p < call.num_groups; ++p) {
    const OperandGroup& group = call.groups[p];
    const Sources<Fabric> sources{rank, group};
    const Share mine = ShareOf(block.index, block.num_blocks, group.num_tokens);
    int64_t num_gathered = sources.Gather(block, mine.begin, mine.end, scratch);
    const bool has_few = num_gathered <= kFewSources;
    for (int64_t begin = mine.begin; begin < mine.end; begin += group.rows_per_strip) {
      const int64_t end =
          begin + group.rows_per_strip < mine.end ? begin + group.rows_per_strip : mine.end;
      if (!has_few) num_gathered = sources.Gather(block, begin, end, scratch);
      for (int a = group.first_array; a < group.first_array + group.num_arrays; ++a) {
        PullRows(block, sources, call.arrays[a], {begin, end, scratch->sources, num_gathered});
      }
    }
  }
}

}  // namespace cpd::kernels
