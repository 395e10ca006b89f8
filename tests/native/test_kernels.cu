// The GPU kernels on one GPU: one stream per rank, all ranks in one launch, and recorded calls that
// are replayed, against the same plain loops as test_device.cc; and those of attention, as in
// test_attention_kernels.cc. For compute-sanitizer, `test_kernels one-launch [WORLDS]` and
// `test_kernels attention [PROBLEMS]` do only one of these. Instead, `test_kernels time [FILE]`
// times the kernels, `test_kernels beside [FILE]` exchanges beside a GEMM, `test_kernels small
// [FILE]` small calls, and `test_kernels profile` runs some of them for a profiler.
#include <cuda_runtime_api.h>

#include <cctype>
#include <new>
#include <string>

#include "cuda/attention_kernels.h"
#include "cuda/kernels.h"

// Whether host and GPU may access managed memory at the same time, as these tests do. Otherwise
// mapped memory of the host has to serve.
inline bool HasManagedMemory() {
  static const bool has = [] {
    int device = 0, is_concurrent = 0;
    void* memory = nullptr;
    const bool can = cudaGetDevice(&device) == cudaSuccess &&
                     cudaDeviceGetAttribute(&is_concurrent, cudaDevAttrConcurrentManagedAccess,
                                            device) == cudaSuccess &&
                     is_concurrent != 0 && cudaMallocManaged(&memory, 16) == cudaSuccess;
    cudaGetLastError();
    cudaFree(memory);
    return can;
  }();
  return has;
}

// Memory that host and GPU share.
template <typename T>
struct Shared {
  using value_type = T;
  Shared() = default;
  template <typename U>
  Shared(const Shared<U>&) {}  // NOLINT: allocators convert
  T* allocate(size_t n) {
    void* memory = nullptr;
    const size_t bytes = n * sizeof(T) + 16;
    // With unified addresses, a GPU accesses mapped memory by the pointer of the host.
    const cudaError_t error =
        HasManagedMemory()
            ? cudaMallocManaged(&memory, bytes)
            : cudaHostAlloc(&memory, bytes, cudaHostAllocMapped | cudaHostAllocPortable);
    if (error != cudaSuccess) throw std::bad_alloc();
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, size_t) {
    HasManagedMemory() ? cudaFree(memory) : cudaFreeHost(memory);
  }
  template <typename U>
  bool operator==(const Shared<U>&) const {
    return true;
  }
  template <typename U>
  bool operator!=(const Shared<U>&) const {
    return false;
  }
};
#define CPD_TEST_ALLOCATOR Shared

#include "attention_results.h"
#include "beside_gemm.h"
#include "device_world.h"
#include "kernel_times.h"
#include "one_launch.h"
#include "small_times.h"

namespace {

using namespace cpd;           // NOLINT
using namespace cpd::kernels;  // NOLINT

// Launches, perhaps by recording and replaying.
template <typename F>
void RunRecorded(cudaStream_t stream, bool recorded, F launch) {
  if (!recorded) {
    launch();
  } else {
    const cudaGraphExec_t replay = Record(stream, launch);
    CUDA(cudaGraphLaunch(replay, stream));
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaGraphExecDestroy(replay));
  }
  CUDA(cudaStreamSynchronize(stream));
}

// Runs the kernels of attention.
struct AttentionLauncher {
  HeadType heads;
  cudaStream_t stream;
  bool recorded;

  void operator()(const AttendCall& call) const {
    RunRecorded(stream, recorded, [&] { CUDA(LaunchAttend(call, heads, stream)); });
  }
  void operator()(const GradientsCall& call) const {
    RunRecorded(stream, recorded, [&] { CUDA(LaunchGradients(call, heads, stream)); });
  }
};

// Launched and recorded, with the same bits. Tensor cores cut off what does not fit float32 when
// they add, instead of rounding it: of_lse.
template <typename Element, int H, int Hv>
AttentionErrors EqualsLoops(Rng& rng, const AttentionShape& shape, cudaStream_t stream) {
  const HeadType heads{std::is_same_v<Element, BF16> ? DataType::kBF16 : DataType::kF16, H, Hv};
  const AttentionLauncher launch{heads, stream, false}, replay{heads, stream, true};
  return RunAttention<Element, H, Hv>(rng, shape, 1e-5, [&](auto run) {
    const auto results = run(launch, launch);
    CHECK(run(replay, replay) == results);
    return results;
  });
}

void RunAttentions(Rng& rng, int num_problems, cudaStream_t stream) {
  CUDA(LoadAttentionKernels());
  AttentionErrors worst{};
  for (int i = 0; i < num_problems; ++i) {
    const AttentionShape shape = RandomAttentionShape(rng);
    Enlarge(&worst, EqualsLoops<BF16, 64, 64>(rng, shape, stream));
    Enlarge(&worst, EqualsLoops<BF16, 128, 128>(rng, shape, stream));
    if (i % 5 == 0) Enlarge(&worst, EqualsLoops<F16, 64, 64>(rng, shape, stream));
    if (i % 5 == 1) Enlarge(&worst, EqualsLoops<BF16, 96, 96>(rng, shape, stream));
    if (i % 5 == 2) Enlarge(&worst, EqualsLoops<BF16, 192, 128>(rng, shape, stream));
    if (i % 5 == 3) Enlarge(&worst, EqualsLoops<F16, 256, 256>(rng, shape, stream));
    if (i % 5 == 4) Enlarge(&worst, EqualsLoops<F16, 192, 128>(rng, shape, stream));
  }
  Print(stdout, worst);
}

// Every rank's call on its own stream, `times` in a row; recorded once and replayed, or not.
void Run(World& world, const std::vector<cudaStream_t>& streams, int times, bool recorded) {
  std::vector<Call> calls;
  for (int r = 0; r < world.num_ranks; ++r) calls.push_back(world.MakeCall(r));
  world.Clear();
  std::vector<cudaGraphExec_t> graphs(world.num_ranks);
  for (int r = 0; r < world.num_ranks && recorded; ++r) {
    graphs[r] = Record(streams[r], [&] { CUDA(LaunchCall(calls[r], 4, streams[r])); });
  }
  for (int i = 0; i < times; ++i) {
    for (int r = 0; r < world.num_ranks; ++r) {
      if (recorded) {
        CUDA(cudaGraphLaunch(graphs[r], streams[r]));
      } else {
        CUDA(LaunchCall(calls[r], 4, streams[r]));
      }
    }
  }
  CUDA(cudaDeviceSynchronize());
  for (const cudaGraphExec_t graph : graphs) {
    if (graph != nullptr) CUDA(cudaGraphExecDestroy(graph));
  }
}

// Large rows and strips, and some that are not aligned.
World LargeRows(Rng& rng, bool is_dispatch) {
  World world{};
  world.num_ranks = static_cast<int>(Draw(rng, 2, 4));
  world.is_dispatch = is_dispatch;
  world.use_src_offset = Draw(rng, 0, 1);
  world.rows_per_strip = Draw(rng, 1, 20);
  if (!is_dispatch) world.in_type = world.out_type = DataType::kF32;
  world.groups.push_back(MakeGroup(
      rng, world.num_ranks,
      {5, 2, 40, {16 * Draw(rng, 64, 512), 16 * Draw(rng, 1, 64), 4 * 251}, world.use_src_offset}));
  FillArrays(&world, rng, !is_dispatch);
  return world;
}

// All ranks in one launch, as every program for one GPU runs them; in several kernels, and in
// one.
void RunOneLaunch(Rng& rng, cudaStream_t stream) {
  for (const bool is_dispatch : {true, false}) {
    World world = Draw(rng, 0, 1) ? LargeRows(rng, is_dispatch) : RandomWorld(rng, is_dispatch);
    OneLaunch launch(world);
    for (int i = 0; i < 4; ++i) {
      launch.call.is_small = i % 2 == 1;
      launch.Clear();
      for (int j = 0; j < 3; ++j) CUDA(LaunchCall(launch.call, 4 * world.num_ranks, stream));
      CUDA(cudaStreamSynchronize(stream));
      launch.Store(&world);
      CheckMoved(world);
    }
  }
}

// Every rank on its stream, with a channel; also one whose plan is invalid.
void RunChannels(Rng& rng, int num_worlds, const std::vector<cudaStream_t>& streams) {
  for (int i = 0; i < num_worlds; ++i) {
    for (const bool is_dispatch : {true, false}) {
      World world = i % 2 == 0 ? RandomWorld(rng, is_dispatch) : LargeRows(rng, is_dispatch);
      for (const int way : {0, 1, 2, 3}) {
        const bool recorded = way % 2 == 1;
        world.is_small = way / 2 == 1;
        Run(world, streams, 3, recorded);
        CheckMoved(world);
      }
    }
  }
  World world = RandomWorld(rng, true, 2);
  world.groups[0].plans[1].seq_len[0] = -1;
  Run(world, streams, 1, false);
  CHECK(world.Take(1).failure == Failure::kLength);
  CHECK(world.Take(0).failure == Failure::kPeer);
}

}  // namespace

int main(int argc, char** argv) {
  int num_gpus = 0;
  if (cudaGetDeviceCount(&num_gpus) != cudaSuccess || num_gpus == 0) {
    std::printf("no GPU\n");
    return 77;
  }
  const bool is_named = argc > 1 && std::isdigit(argv[1][0]) == 0;
  const std::string name = is_named ? argv[1] : "";
  const char* argument = argc > 1 + is_named ? argv[1 + is_named] : nullptr;
  int num_blocks = 0;
  if (name != "attention") CUDA(NumResidentBlocks(&num_blocks));  // loads all kernels of exchanges
  if (name == "time") return TimeKernels(num_blocks, argument);
  if (name == "beside") return TimeBesideGemm(num_blocks, argument);
  if (name == "small") return TimeSmallCalls(num_blocks, argument);
  if (name == "profile") return ProfileKernels(num_blocks);
  Rng rng(11);
  std::vector<cudaStream_t> streams(4);
  for (cudaStream_t& stream : streams) {
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }
  const int times = argument ? std::atoi(argument) : 50;
  for (int i = 0; i < times && name != "attention"; ++i) RunOneLaunch(rng, streams[0]);
  if (!is_named) RunChannels(rng, times, streams);
  if (name != "one-launch") RunAttentions(rng, times, streams[0]);
  std::printf("ok\n");
}
