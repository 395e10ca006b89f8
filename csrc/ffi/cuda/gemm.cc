// XLA FFI handlers of GEMMs on GPUs, alone or overlapped with communication: they read operands,
// then enqueue products and copies on streams. The host never waits.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/channels.h"
#include "cuda/kernels.h"
#include "cuda/overlap_queues.h"
#include "ffi/common.h"
#include "ffi/cuda/gemm_call.h"
#include "ffi/cuda/handlers.h"
#include "gemm/comm_overlap.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace cpd {
namespace {

GpuShare ShareOf(const CudaGemmOptions& options, int device) {
  constexpr int kBlocksPerSm = 8;
  int num_sms = 1;
  cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  const bool overlaps = static_cast<CommMethod>(options.call.comm_overlap_method) !=
                        CommMethod::kNone;  // without overlap, each has the device in turn
  const auto of_comm = static_cast<int>(std::clamp<int64_t>(options.num_comm_sm, 1, num_sms));
  GpuShare share;
  share.num_blocks = kBlocksPerSm * num_sms;
  share.num_comm_blocks =
      overlaps && options.set_sm_margin ? kBlocksPerSm * of_comm : share.num_blocks;
  share.use_copy_engine = options.call.problem.config.copies;
  share.lt.tf32 = options.tf32;
  share.lt.use_split_accumulator = options.use_split_accumulator;
  if (overlaps && options.set_sm_margin) share.lt.num_sms = std::max(1, num_sms - of_comm);
  return share;
}

Status MultiplyAlone(const std::string& op, const CudaGemmOptions& options, const StageOnDevice& at,
                     CudaGemmCall call) {
  const GpuShare share = ShareOf(options, at.device);
  GpuArithmetic arithmetic(op, at.device, share);
  OverlapProblem& problem = call.problem;
  const std::vector<GemmScratch>& scratch = call.scratch;
  problem.ranks.push_back(MemoryOf(options.call, problem, call.buffers[0]));
  const auto launch = [&](cudaStream_t on) {
    arithmetic.Choose(on, &scratch[0]);
    arithmetic.Prepare(&problem, 0, scratch);
    arithmetic.Multiply(WholeProduct(problem, problem.ranks[0]));
    arithmetic.Finish(problem, problem.ranks[0], nullptr);
    return arithmetic.status();
  };
  if (at.executes) return launch(at.stream);
  const Status ended = ExchangeStream::AwaitEnded(op, at.device, at.stream);
  if (!ended.ok()) return ended;
  const auto kernels = KernelsOf(ProgramOf(op, problem), problem, 0, 1, share.lt);
  return Rehearsal(&arithmetic, &scratch[0]).Run(op, at.device, kernels, launch);
}

ChannelKey KeyOf(const CudaGemmOptions& options, const RankLocation& location, int num_local,
                 int num_signals, int64_t buffer_bytes) {
  ChannelKey key;
  key.layout = "gemm";
  for (const int64_t number :
       {options.call.num_ranks, int64_t{num_local}, int64_t{num_signals}, buffer_bytes}) {
    key.layout += "," + std::to_string(number);
  }
  key.buffers = {options.call.comm_overlap_id};
  key.devices = location.devices;
  key.maker = "create_comm_overlap_buffer";
  return key;
}

void EndMeeting(const GemmBuffers& buffers, kernels::State* state, int num_blocks,
                cudaStream_t stream, const GpuArithmetic& arithmetic) {
  kernels::MeetingResults results{state, {}, {}};
  int i = 0;
  for (const ffi::AnyBuffer& result :
       {buffers.output, buffers.bias_grad, buffers.pre_gelu_out, buffers.aux_out}) {
    results.data[i] = static_cast<char*>(result.untyped_data());
    results.num_bytes[i++] = NumBytes(result);
  }
  arithmetic.Check(LaunchEnd(results, num_blocks, stream), "launching the end");
}

// The problem as GpuArithmetic::Prepare() changes it, for descriptions only.
OverlapProblem AsPrepared(OverlapProblem problem) {
  if (problem.scaling == Scaling::kNone) return problem;
  problem.rhs_transposed = true;
  problem.lhs_transposed = false;
  return problem;
}

Status Overlap(const std::string& op, const CudaGemmOptions& options, const StageOnDevice& at,
               const int32_t* rank_operand, const RankLocation& location, CudaGemmCall call) {
  const int device = at.device;
  const cudaStream_t stream = at.stream;
  const std::vector<GemmBuffers>& buffers = call.buffers;
  const std::vector<GemmScratch>& scratch = call.scratch;
  OverlapProblem& problem = call.problem;
  const auto num_ranks = static_cast<int>(options.call.num_ranks);
  const auto num_local = static_cast<int>(buffers.size());
  if (options.in_slab() && Slab::Get().NeedsNetwork(location.processes())) {
    return Status::Invalid(op,
                           ": some ranks reach each other over the network only, and products "
                           "overlap through mapped memory. Pass implementation='xla'.");
  }
  problem.config = OnGpus(problem.config);
  problem.shares_only_buffers = true;
  problem.ranks.resize(num_ranks);
  for (int i = 0; i < num_local; ++i) {
    problem.ranks[location.rank + i] = MemoryOf(options.call, problem, buffers[i]);
  }
  const int num_signals = MakeCommOverlap(problem, nullptr)->num_signals();
  const int64_t before_buffer = kernels::MeetingBytes(num_ranks, num_signals);
  const int64_t buffer_bytes = BufferBytes(problem);
  const ChannelShape shape{before_buffer + std::max<int64_t>(buffer_bytes, 1),
                           kernels::AlignUp(sizeof(kernels::State)),
                           num_local,
                           1,
                           std::chrono::milliseconds(options.call.deadline_ms),
                           options.in_slab()};
  const ChannelKey key = KeyOf(options, location, num_local, num_signals, buffer_bytes);
  std::shared_ptr<Channel> channel;
  Status status = ChannelRegistry::Get().Find(op, key, shape, &channel);
  const LanesKey of_lanes(device, num_local, options.gemm_priority, options.comm_priority);
  std::shared_ptr<Lanes> lanes;
  if (status.ok()) status = Lanes::Find(op, of_lanes, &lanes);
  if (status.ok()) {
    status = at.executes ? at.Meet(op, location, shape.deadline)
                         : ExchangeStream::AwaitEnded(op, device, stream);
  }
  if (!status.ok()) return status;

  for (int r = 0; r < num_ranks; ++r) {
    problem.ranks[r].buffer = channel->memory()[r] + before_buffer;
  }
  const GpuShare share = ShareOf(options, device);
  auto arithmetic = std::make_shared<GpuArithmetic>(op, device, share);
  const Channel::Local& local = channel->local(location.rank);
  kernels::Meeting meeting{};
  std::copy(channel->memory().begin(), channel->memory().end(), meeting.symmetric);
  meeting.state = reinterpret_cast<kernels::State*>(local.state);
  meeting.error = local.errors_on_device;
  meeting.rank_operand = rank_operand;
  meeting.deadline_ns = static_cast<uint64_t>(options.call.deadline_ms) * 1'000'000;
  const uint64_t program = ProgramOf(op, problem);
  meeting.program = kernels::ProgramWord(program, options.site);
  meeting.num_ranks = num_ranks;
  meeting.rank = location.rank;
  const bool meets = !location.on_one_device;
  if (!at.executes) {
    const auto kernels = KernelsOf(program, problem, location.rank, num_local, share.lt);
    Rehearsal rehearsal(arithmetic.get(), &scratch[0]);
    return rehearsal.Run(op, device, kernels, [&](cudaStream_t) {
      const auto core = MakeCommOverlap(AsPrepared(problem), arithmetic);
      return OverlapTeam(core->Record(), core->num_signals(), location.rank, num_local)
          .Enqueue(op, &rehearsal);
    });
  }
  // An error of an earlier call. Taken before the launch, after which this call may raise its own.
  std::string message = channel->TakeError(op);
  const auto launch = [&] {
    if (meets) arithmetic->Check(LaunchBegin(meeting, stream), "launching the begin");
    arithmetic->Choose(stream, &scratch[0]);
    arithmetic->Prepare(&problem, location.rank, scratch);
    const auto core = MakeCommOverlap(problem, arithmetic);
    OverlapTeam team(core->Record(), core->num_signals(), location.rank, num_local);
    {
      std::lock_guard<std::mutex> lock(lanes->mutex);
      OverlapQueues queues({op, device, location.group, location.rank, GpuSpans::Get().enabled()},
                           scratch, lanes.get(), arithmetic.get(), meets ? &meeting : nullptr);
      queues.Fork(stream);
      status = team.Enqueue(op, &queues);
      queues.Join(stream);
    }
    if (meets) EndMeeting(buffers[0], meeting.state, share.num_blocks, stream, *arithmetic);
  };
  arithmetic->Check(channel->Enqueue(op, location.rank, stream, launch), "ordering calls");
  if (status.ok()) status = arithmetic->status();
  return status.ok() ? EndCall(op, stream, std::move(message), channel.get()) : status;
}

Status Gemm(const StageOnDevice& at, const int32_t* rank, const ffi::RemainingArgs& args,
            const ffi::RemainingRets& results, const ffi::Dictionary& attributes) {
  CudaGemmOptions options;
  if (const Status status = ReadOptions(attributes, &options); !status.ok()) return status;
  const std::string op = options.op();
  const bool overlaps = options.overlaps();
  RankLocation location;
  Status status = CheckRanksOnGpu(op, options);
  if (status.ok()) {
    status = FindRank(op, at.device, options.num_ranks(), options.device_table, &location);
  }
  if (!status.ok()) return status;
  const bool has_all_ranks = overlaps && location.on_one_device;
  CudaGemmCall call;
  status = ReadGemmCall(op, options, args, results, has_all_ranks, &call);
  if (!status.ok()) return status;
  if (!overlaps) return MultiplyAlone(op, options, at, std::move(call));
  return Overlap(op, options, at, location.on_one_device ? nullptr : rank, location,
                 std::move(call));
}

template <bool kExecute>
ffi::Error GemmIn(int32_t device, cudaStream_t stream, CallBetweenGpus* state, ffi::RunId run,
                  CallContext context, ffi::BufferR0<ffi::S32> rank, ffi::BufferR0<ffi::S32>,
                  ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Dictionary attributes) {
  const StageOnDevice at{kExecute, device, stream, &state->meeting, run.run_id, context};
  return ToError(
      at.End(Caught([&] { return Gemm(at, rank.typed_data(), args, results, attributes); })));
}

}  // namespace

std::vector<Target> CudaGemmTargets() {
  // Not recorded into command buffers: there, the wait for another rank and the signal to it are on
  // branches that CUDA may run in any order.
  return {BetweenGpus<GemmIn<false>, GemmIn<true>>("jax_cp_dispatch.gemm")};
}

}  // namespace cpd
