// XLA FFI handlers of dispatch and combine on GPUs: they read operands and launch kernels.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cuda/channels.h"
#include "cuda/kernels.h"
#include "cuda/memory.h"
#include "ffi/common.h"
#include "ffi/cuda/dispatch_call.h"
#include "ffi/cuda/handlers.h"
#include "ffi/cuda/nccl_window.h"
#include "kernels/prepare.h"
#include "kernels/small.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace cpd {
namespace {

// Blocks that the device runs at once. Also loads the kernels, once per device.
Status FindNumResident(const std::string& op, int device, int* num_resident) {
  static std::atomic<int> known[64];
  std::atomic<int>& found = known[device & 63];
  if (found == 0) {
    int count = 0;
    if (const cudaError_t error = NumResidentBlocks(&count); error != cudaSuccess) {
      cudaGetLastError();
      return Status::Internal(op, ": loading kernels on GPU ", device,
                              " failed: ", cudaGetErrorString(error),
                              ". Rebuild the package for this GPU, or pass implementation='xla'.");
    }
    found = count;
  }
  *num_resident = found;
  return Status::Ok();
}

ChannelKey KeyOf(const CudaOptions& options, const kernels::Call& call,
                 const std::vector<int64_t>& devices) {
  ChannelKey key;
  const auto add = [&](int64_t number) { key.layout += std::to_string(number) + ","; };
  add(call.is_dispatch);
  add(call.num_ranks);
  add(call.num_local);
  if (call.has_network) key.layout += "network,";
  for (int p = 0; p < call.num_groups; ++p) {
    const kernels::OperandGroup& group = call.groups[p];
    if (call.has_network) {  // these are also the sizes of the staging area
      add(group.num_tokens);
      add(static_cast<bool>(group.src_offset));
    }
    add(group.capacity);
    add(group.num_slots);
    add(group.num_replicas);
    for (int a = group.first_array; a < group.first_array + group.num_arrays; ++a) {
      add(call.arrays[a].in_row_bytes);
    }
    key.layout += ";";
    key.buffers.push_back(options.call.buffer[p]);
  }
  key.devices = devices;
  return key;
}

// Finds the ranks that this one reaches over the network. All ranks agree whether there are any.
void FindRemotes(const CudaOptions& options, const RankLocation& location, kernels::Call* call) {
  if (!options.in_slab()) return;
  const std::vector<int64_t> processes = location.processes();
  call->has_network = Slab::Get().NeedsNetwork(processes);
  for (size_t r = 0; r < processes.size(); ++r) {
    const bool is_remote = Slab::Get().IsRemote(processes[location.rank], processes[r]);
    call->pe[r] = is_remote ? static_cast<int32_t>(processes[r]) : -1;
  }
}

// A call in one piece, or the first of two; see gpu_schedule/exchange_pairs.h.
enum class Part : uint8_t { kWhole, kStart };

// Enqueues a call whose kernels run beside the program. They read copies of the small operands.
Status StartBeside(const std::string& op, ExchangeStream* own,
                   const ExchangePairs::Addresses& arrays, char* held, const StageOnDevice& at,
                   const std::function<cudaError_t()>& launch, kernels::Call* call) {
  kernels::HeldFields fields;
  kernels::HoldFields(call, held, &fields);
  cudaError_t error = LaunchHold(fields, at.stream);
  const bool is_started =
      error == cudaSuccess && own->pairs.Start(arrays, at.stream, own->stream, [&] {
        error = launch();
        return error == cudaSuccess;
      });
  if (is_started) return Status::Ok();
  return Status::Internal(op, ": launching failed: ", cudaGetErrorString(error));
}

Status Move(Direction direction, Part part, const CudaOptions& options, const StageOnDevice& at,
            const int32_t* rank_operand, const ffi::RemainingArgs& args,
            const ffi::RemainingRets& results) {
  DispatchCall read;
  read.is_start = part == Part::kStart;
  RankLocation location;
  Status status = ReadCudaAttributes(direction, options.call, &read);
  const std::string& op = read.op;
  if (status.ok())
    status = FindRank(op, at.device, read.num_ranks, options.device_table, &location);
  void* communicator = nullptr;
  if (status.ok() && options.in_window()) {
    status = AskForCommunicator(op, options, at.context, &communicator);
  }
  if (!status.ok()) return status;

  kernels::Call call{};
  call.first_rank = location.rank;
  call.num_local = location.on_one_device ? read.num_ranks : 1;
  call.rank_operand = location.on_one_device ? nullptr : rank_operand;
  int num_resident = 0;
  status = FindNumResident(op, at.device, &num_resident);
  if (!status.ok()) return status;
  const int num_blocks =
      kernels::NumMoveBlocks(options.num_comm_sm, num_resident, location.on_one_device);
  status = ReadCudaOperands(options.call, args, results, num_blocks, &read, &call);
  if (!status.ok()) return status;
  FindRemotes(options, location, &call);
  kernels::ChooseSmall(&call, num_resident);
  ChannelKey key = KeyOf(options, call, location.devices);
  key.communicator = communicator;
  call.program = kernels::ProgramWord(std::hash<std::string>{}(key.layout), options.site);
  std::shared_ptr<Channel> channel;
  ChannelShape shape;
  shape.bytes = kernels::LayOutChannel(&call);
  kernels::LayOutLocal(&call);
  shape.local_bytes = call.local_bytes;
  shape.num_local = call.num_local;
  shape.num_groups = call.num_groups;
  shape.deadline = read.deadline;
  shape.in_slab = options.in_slab();
  if (options.in_window()) {
    shape.rank = location.rank;
    shape.window = [&](const SlabRequest& request, std::vector<char*>* memory) {
      if (!at.executes) return RegisterWindow(request, call, communicator, memory);
      return Status::Internal(op,
                              ": XLA runs this call with another communicator than it has "
                              "initialized it with. Compile the program again.");
    };
  }
  status = ChannelRegistry::Get().Find(op, key, shape, &channel);
  if (!status.ok()) return status;
  ExchangePairs::Addresses arrays;
  char* held = nullptr;
  ExchangeStream* own = nullptr;
  if (part == Part::kStart) {
    status = ReadStart(op, call, results, &arrays, &held);
    if (status.ok()) status = ExchangeStream::Find(op, at.device, &own);
    if (!status.ok()) return status;
    if (!at.executes && !own->pairs.AnnounceStart(arrays)) {
      return Status::Internal(op, ": making events failed.");
    }
  }
  if (!at.executes) return ExchangeStream::AwaitEnded(op, at.device, at.stream);
  // A program that has a communicator meets all devices once it is initialized.
  if (!options.in_window()) status = at.Meet(op, location, read.deadline);
  if (!status.ok()) return status;

  std::copy(channel->memory().begin(), channel->memory().end(), call.symmetric);
  call.local = channel->local(location.rank).state;
  call.errors = channel->local(location.rank).errors_on_device;
  // An error of an earlier call. Taken before the launch, after which this call may raise its own.
  std::string message = channel->TakeError(op);
  // Launch even after an error: the other ranks run this call too, and wait for this one.
  const auto enqueue_on = [&](cudaStream_t stream) {
    cudaError_t launched = cudaSuccess;
    const cudaError_t ordered = channel->Enqueue(
        op, location.rank, stream, [&] { launched = LaunchCall(call, num_blocks, stream); });
    return launched != cudaSuccess ? launched : ordered;
  };
  // If this call ends with an error, so does the program, without the second call.
  if (own != nullptr && message.empty() && !ChecksEachCall() && own->pairs.IsPair(arrays)) {
    return StartBeside(op, own, arrays, held, at, [&] { return enqueue_on(own->stream); }, &call);
  }
  status = CudaStatus(enqueue_on(at.stream), op, ": launching");
  return status.ok() ? EndCall(op, at.stream, std::move(message), channel.get()) : status;
}

template <Direction kDirection, Part kPart, bool kExecute>
ffi::Error MoveIn(int32_t device, cudaStream_t stream, CallBetweenGpus* state, ffi::RunId run,
                  CallContext context, ffi::BufferR0<ffi::S32> rank, ffi::BufferR0<ffi::S32>,
                  ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Dictionary attributes) {
  const StageOnDevice at{kExecute, device, stream, &state->meeting, run.run_id, context};
  return ToError(at.End(Caught([&] {
    CudaOptions options;
    const Status status = ReadOptions(attributes, &options);
    return status.ok() ? Move(kDirection, kPart, options, at, rank.typed_data(), args, results)
                       : status;
  })));
}

// The second of two calls: returns its first operands, in place, once the exchange has written
// them.
template <bool kExecute>
ffi::Error Done(int32_t device, cudaStream_t stream, ffi::RemainingArgs args,
                ffi::RemainingRets results, ffi::Dictionary) {
  const std::string op = "the end of an exchange";
  return ToError(Caught([&] {
    ExchangePairs::Addresses arrays;
    ExchangeStream* own = nullptr;
    Status status = ReadDone(op, args, results, &arrays);
    cudaSetDevice(device);
    if (status.ok()) status = ExchangeStream::Find(op, device, &own);
    if (!status.ok()) return status;
    if (!kExecute) {
      own->pairs.AnnounceDone(arrays);
    } else if (!own->pairs.Done(arrays, stream)) {
      return Status::Internal(op, ": waiting failed.");
    }
    return status;
  }));
}

template <ffi::ExecutionStage kStage>
auto BindDone() {
  return ffi::Ffi::Bind<kStage>()
      .template Ctx<ffi::DeviceOrdinal>()
      .template Ctx<ffi::PlatformStream<cudaStream_t>>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

// Before XLA initializes a program with windows: they need the communicator of their ranks.
ffi::Error Request(CallContext context, ffi::Dictionary attributes) {
  return ToError(Caught([&] {
    CudaOptions options;
    DispatchCall read;
    Status status = ReadOptions(attributes, &options);
    if (status.ok()) status = ReadCudaAttributes(Direction::kDispatch, options.call, &read);
    return status.ok() ? AskForCommunicator(read.op, options, context, nullptr) : status;
  }));
}

auto BindRequest() {
  return ffi::Ffi::Bind<ffi::ExecutionStage::kPrepare>().Ctx<CallContext>().Attrs();
}

// Exchanges are not recorded into command buffers: XLA would run a recording as one chain, without
// any overlap.
template <Direction kDirection, Part kPart>
constexpr auto TargetOf =
    BetweenGpus<MoveIn<kDirection, kPart, false>, MoveIn<kDirection, kPart, true>>;

template <Direction kDirection>
Target InWindow(const char* name) {
  Target target = TargetOf<kDirection, Part::kWhole>(name);
  target.prepare = Handle<Request, BindRequest>;
  return target;
}

}  // namespace

std::vector<Target> CudaDispatchTargets() {
  return {TargetOf<Direction::kDispatch, Part::kWhole>("jax_cp_dispatch.dispatch"),
          TargetOf<Direction::kCombine, Part::kWhole>("jax_cp_dispatch.combine"),
          InWindow<Direction::kDispatch>("jax_cp_dispatch.dispatch_window"),
          InWindow<Direction::kCombine>("jax_cp_dispatch.combine_window"),
          TargetOf<Direction::kDispatch, Part::kStart>("jax_cp_dispatch.dispatch_start"),
          TargetOf<Direction::kCombine, Part::kStart>("jax_cp_dispatch.combine_start"),
          {"jax_cp_dispatch.exchange_done", Handle<Done<true>, BindDone<kExecute>>,
           Handle<Done<false>, BindDone<kInitialize>>}};
}

}  // namespace cpd
