// The kernels around a product: binds kernels/product.h and kernels/meeting.h to a GPU's blocks.
#include <algorithm>

#include "cuda/kernels.h"
#include "kernels/copy.h"

namespace cpd {
namespace {

using namespace kernels;  // NOLINT: this file is its other half

constexpr int kThreads = 256;
constexpr int64_t kPieceBytes = 64 << 10;  // of a copy: bytes that a block moves at a time

__device__ Block ThisBlock() {
  return {static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x), static_cast<int>(blockIdx.x),
          static_cast<int>(gridDim.x)};
}

template <typename In, typename Out>
__global__ void __launch_bounds__(kThreads) SumKernel(const __grid_constant__ SumCall call) {
  StoreSums<In, Out>(ThisBlock(), call);
}

template <typename In, typename Out>
__global__ void __launch_bounds__(kThreads)
    ColumnsKernel(const __grid_constant__ ColumnsCall call) {
  __shared__ ColumnsScratch scratch;
  SumColumns<In, Out>(ThisBlock(), call, &scratch);
}

__global__ void __launch_bounds__(kThreads)
    TransposeKernel(const __grid_constant__ TransposeCall call) {
  __shared__ TransposeScratch scratch;
  Transpose(ThisBlock(), call, &scratch);
}

__global__ void __launch_bounds__(kThreads)
    SwizzleKernel(const __grid_constant__ SwizzleCall call) {
  Swizzle(ThisBlock(), call);
}

__global__ void __launch_bounds__(kThreads)
    CopyKernel(char* to, const char* from, int64_t num_bytes) {
  for (int64_t begin = blockIdx.x * kPieceBytes; begin < num_bytes;
       begin += gridDim.x * kPieceBytes) {
    char* piece = to + begin;
    Copy(ThisBlock(), from + begin, &piece, 1,
         num_bytes - begin < kPieceBytes ? num_bytes - begin : kPieceBytes);
  }
}

__global__ void __launch_bounds__(kMaxRanks) BeginKernel(const __grid_constant__ Meeting meeting) {
  __shared__ BeginScratch scratch;
  Begin(ThisBlock(), meeting, &scratch);
}

__global__ void __launch_bounds__(32)
    TellKernel(const __grid_constant__ Meeting meeting, int peer, int signal) {
  Tell(meeting, peer, signal);
}

__global__ void __launch_bounds__(32)
    WaitForKernel(const __grid_constant__ Meeting meeting, int peer, int signal) {
  WaitFor(meeting, peer, signal);
}

__global__ void __launch_bounds__(kThreads)
    EndKernel(const __grid_constant__ MeetingResults results) {
  End(ThisBlock(), results);
}

using Sum = void (*)(SumCall);
using Columns = void (*)(ColumnsCall);

// Returns f(an element of this type): of 16 bits, else float.
template <typename F>
auto OfType(DataType type, F f) {
  if (type == DataType::kBF16) return f(BF16{});
  return type == DataType::kF16 ? f(F16{}) : f(float{});
}

Sum SumOf(DataType in, DataType out) {
  return OfType(in, [&](auto x) {
    return OfType(out, [](auto y) -> Sum { return SumKernel<decltype(x), decltype(y)>; });
  });
}

Columns ColumnsOf(DataType in, DataType out) {
  const auto from = [&](auto x) {
    return OfType(out, [](auto y) -> Columns { return ColumnsKernel<decltype(x), decltype(y)>; });
  };
  if (in == DataType::kE4M3) return from(E4M3{});
  return in == DataType::kE5M2 ? from(E5M2{}) : OfType(in, from);
}

unsigned Blocks(int64_t wanted, int most) {
  return static_cast<unsigned>(std::clamp<int64_t>(wanted, 1, std::max(1, most)));
}

}  // namespace

cudaError_t LaunchSum(const SumCall& call, int num_blocks, cudaStream_t stream) {
  if (call.num_rows == 0 || call.num_columns == 0) return cudaSuccess;
  const unsigned blocks = Blocks(call.num_rows, num_blocks);
  SumOf(call.type, call.to_type)<<<blocks, kThreads, 0, stream>>>(call);
  return cudaGetLastError();
}

cudaError_t LaunchColumns(const ColumnsCall& call, int num_blocks, cudaStream_t stream) {
  const int64_t at_once = call.by_column == 1 ? kColumns : 1;
  const unsigned blocks = Blocks((call.num_columns + at_once - 1) / at_once, num_blocks);
  ColumnsOf(call.type, call.out_type)<<<blocks, kThreads, 0, stream>>>(call);
  return cudaGetLastError();
}

cudaError_t LaunchTranspose(const TransposeCall& call, int num_blocks, cudaStream_t stream) {
  const int64_t tiles = ((call.num_rows + kTransposeTile - 1) / kTransposeTile) *
                        ((call.num_columns + kTransposeTile - 1) / kTransposeTile);
  TransposeKernel<<<Blocks(tiles, num_blocks), kThreads, 0, stream>>>(call);
  return cudaGetLastError();
}

cudaError_t LaunchSwizzle(const SwizzleCall& call, int num_blocks, cudaStream_t stream) {
  SwizzleKernel<<<Blocks(call.num_lines * call.num_blocks / 512, num_blocks), kThreads, 0,
                  stream>>>(call);
  return cudaGetLastError();
}

cudaError_t LaunchCopy(char* to, const char* from, int64_t num_bytes, int num_blocks,
                       cudaStream_t stream) {
  if (num_bytes == 0) return cudaSuccess;
  const unsigned blocks = Blocks((num_bytes + kPieceBytes - 1) / kPieceBytes, num_blocks);
  CopyKernel<<<blocks, kThreads, 0, stream>>>(to, from, num_bytes);
  return cudaGetLastError();
}

cudaError_t LaunchBegin(const Meeting& meeting, cudaStream_t stream) {
  BeginKernel<<<1, kMaxRanks, 0, stream>>>(meeting);
  return cudaGetLastError();
}

cudaError_t LaunchTell(const Meeting& meeting, int peer, int signal, cudaStream_t stream) {
  TellKernel<<<1, 1, 0, stream>>>(meeting, peer, signal);
  return cudaGetLastError();
}

cudaError_t LaunchWaitFor(const Meeting& meeting, int peer, int signal, cudaStream_t stream) {
  WaitForKernel<<<1, 1, 0, stream>>>(meeting, peer, signal);
  return cudaGetLastError();
}

cudaError_t LaunchEnd(const MeetingResults& results, int num_blocks, cudaStream_t stream) {
  int64_t num_bytes = 0;
  for (const int64_t bytes : results.num_bytes) num_bytes = std::max(num_bytes, bytes);
  EndKernel<<<Blocks(num_bytes / (4 * kThreads), num_blocks), kThreads, 0, stream>>>(results);
  return cudaGetLastError();
}

cudaError_t LoadProductKernels() {
  constexpr DataType kWide[] = {DataType::kF32, DataType::kBF16, DataType::kF16};
  cudaError_t error = cudaSuccess;
  cudaFuncAttributes attributes;
  const auto load = [&](auto* kernel) {
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel);
  };
  for (const DataType out : kWide) {
    for (const DataType in : kWide) load(SumOf(in, out));
    for (const DataType in :
         {DataType::kF32, DataType::kBF16, DataType::kF16, DataType::kE4M3, DataType::kE5M2}) {
      load(ColumnsOf(in, out));
    }
  }
  load(TransposeKernel);
  load(SwizzleKernel);
  load(CopyKernel);
  load(BeginKernel);
  load(TellKernel);
  load(WaitForKernel);
  load(EndKernel);
  return error;
}

}  // namespace cpd
