// XLA FFI handlers of dispatch and combine on GPUs: operands in, kernels on the stream.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cuda/channels.h"
#include "cuda/kernels.h"
#include "ffi/common.h"
#include "ffi/cuda_targets.h"
#include "numerics/sum_rows.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace cpd {
namespace {

using Counts = ffi::Span<const int64_t>;

// Attributes that are known when the program is made; those with an entry per part are spans.
struct Options {
  bool is_dispatch;
  std::string_view axis;  // for messages
  int64_t num_ranks;
  int64_t deadline_ms;
  Counts has_src_offset;
  Counts num_arrays;
  Counts num_tokens;
  Counts capacity;
  Counts buffer;
  Counts places;            // of all ranks, group by group; -1: one device holds all of them
  std::string_view memory;  // "devices" of this process, or a "slab" per process

  bool is_on_one_device() const { return places.size() == 1 && places[0] == -1; }

  std::string op() const {
    return std::string(is_dispatch ? "dispatch" : "combine") + " over axis '" + std::string(axis) +
           "'";
  }
};

// Reads the operands one after another: the metadata of all parts, then the arrays of all parts.
class Reader {
 public:
  Reader(ffi::RemainingArgs args, ffi::RemainingRets results, const Options& options)
      : args_(args), results_(results), options_(options) {}

  // The elements of a field per rank: one view of it, or those of all ranks.
  int64_t Field(IntArray* field) {
    const auto buffer = args_.get<ffi::AnyBuffer>(next_arg_++);
    const auto type = buffer.has_value() ? ToIntType(buffer->element_type()) : std::nullopt;
    if (!type) return Bad();
    const auto count = static_cast<int64_t>(buffer->element_count());
    *field = {buffer->untyped_data(), *type};
    if (count % num_views_ != 0) return Bad();
    return count / num_views_;
  }

  void Metadata(size_t p, device::Part* part) {
    const int64_t num_ranks = options_.num_ranks;
    num_views_ = 1;
    const int64_t num_counts = Field(&part->num_recv);
    part->has_all_views = num_counts > num_ranks + 1;
    num_views_ = part->has_all_views ? num_ranks : 1;
    part->num_slots = Field(&part->seq_len);
    const int64_t num_targets = Field(&part->dst_rank);
    ok_ = ok_ && num_counts == num_views_ * (num_ranks + 1) &&
          Field(&part->dst_offset) == num_targets;
    if (options_.has_src_offset[p] != 0) ok_ = Field(&part->src_offset) == part->num_slots && ok_;
    part->num_replicas = part->num_slots > 0 ? num_targets / part->num_slots : 1;
    ok_ = ok_ && part->num_slots > 0 && part->num_slots * part->num_replicas == num_targets;
    part->num_tokens = options_.num_tokens[p];
    part->capacity = options_.capacity[p];
  }

  // `rows` exist for the plan, of each of `num_held` ranks.
  void Array(int64_t num_held, int64_t in_rows, int64_t out_rows, device::Array* array) {
    const auto arg = args_.get<ffi::AnyBuffer>(next_arg_++);
    auto result = results_.get<ffi::AnyBuffer>(next_result_++);
    if (!arg.has_value() || !result.has_value()) {
      Bad();
      return;
    }
    const ffi::AnyBuffer out = **result;
    array->in = static_cast<const char*>(arg->untyped_data());
    array->out = static_cast<char*>(out.untyped_data());
    array->in_row_bytes = RowBytes(*arg);
    array->out_row_bytes = RowBytes(out);
    array->in_type = ToDataType(arg->element_type());
    array->out_type = ToDataType(out.element_type());
    ok_ = ok_ && arg->dimensions()[0] >= num_held * in_rows &&
          out.dimensions()[0] >= num_held * out_rows;
  }

  bool ok() const { return ok_; }

 private:
  static int64_t RowBytes(const ffi::AnyBuffer& buffer) {
    const auto dims = buffer.dimensions();
    auto bytes = static_cast<int64_t>(ffi::ByteWidth(buffer.element_type()));
    for (size_t i = 1; i < dims.size(); ++i) bytes *= dims[i];
    return bytes;
  }

  int64_t Bad() {
    ok_ = false;
    return 0;
  }

  ffi::RemainingArgs args_;
  ffi::RemainingRets results_;
  const Options& options_;
  int64_t num_views_ = 1;
  size_t next_arg_ = 0;
  size_t next_result_ = 0;
  bool ok_ = true;
};

int NumBlocks(int device) {
  static std::atomic<int> known[64];
  std::atomic<int>& num_blocks = known[device & 63];
  if (num_blocks == 0) {
    int count = 0;
    if (NumResidentBlocks(&count) != cudaSuccess) {
      cudaGetLastError();
      count = 1;
    }
    num_blocks = count;
  }
  return num_blocks;
}

// Pieces of some 100 kB, and several for each block where there is as much.
int64_t RowsPerPiece(const device::Call& call, const device::Part& part, int num_blocks) {
  int64_t row_bytes = 0;
  for (int a = part.first_array; a < part.first_array + part.num_arrays; ++a) {
    row_bytes += call.arrays[a].in_row_bytes;
  }
  const int64_t rows = std::max(part.num_tokens, part.capacity);
  const int64_t bytes =
      std::clamp<int64_t>(rows * row_bytes / (4 * num_blocks), 32 << 10, 128 << 10);
  return std::max<int64_t>(1, bytes / std::max<int64_t>(1, row_bytes));
}

// Fills in what the operands and attributes tell.
Status ReadCall(const Options& options, ffi::RemainingArgs args, ffi::RemainingRets results,
                int64_t num_local, int num_blocks, device::Call* call) {
  const std::string op = options.op();
  const size_t num_parts = options.num_arrays.size();
  int64_t num_arrays = 0;
  for (const int64_t n : options.num_arrays) num_arrays += n;
  if (options.num_ranks > device::kMaxRanks || num_parts > device::kMaxParts ||
      num_arrays > device::kMaxArrays) {
    return Status::Invalid(op + ": " + std::to_string(options.num_ranks) + " ranks and " +
                           std::to_string(num_arrays) + " arrays; on GPUs one call takes at most " +
                           std::to_string(device::kMaxRanks) + " ranks and " +
                           std::to_string(device::kMaxArrays) +
                           " arrays. Stack arrays, or pass implementation='xla'.");
  }
  call->is_dispatch = options.is_dispatch;
  call->num_ranks = static_cast<int>(options.num_ranks);
  call->num_parts = static_cast<int>(num_parts);
  call->num_local = static_cast<int>(num_local);
  call->deadline_ns = static_cast<uint64_t>(options.deadline_ms) * 1'000'000;
  Reader reader(args, results, options);
  for (size_t p = 0; p < num_parts; ++p) reader.Metadata(p, &call->parts[p]);
  for (size_t p = 0; p < num_parts; ++p) {
    device::Part& part = call->parts[p];
    part.first_array = call->num_arrays;
    part.num_arrays = static_cast<int>(options.num_arrays[p]);
    const int64_t in_rows = options.is_dispatch ? part.num_tokens : part.capacity;
    const int64_t out_rows = options.is_dispatch ? part.capacity : part.num_tokens;
    for (int a = 0; a < part.num_arrays; ++a) {
      reader.Array(num_local, in_rows, out_rows, &call->arrays[call->num_arrays++]);
    }
    if (reader.ok()) part.rows_per_piece = RowsPerPiece(*call, part, num_blocks);
  }
  if (!reader.ok()) {
    return Status::Invalid(op +
                           ": the operands are not those of this version's primitives. Call it "
                           "through jax_cp_dispatch.");
  }
  for (int a = 0; a < call->num_arrays && !options.is_dispatch; ++a) {
    if (SumIsSupported({call->arrays[a].in_type, call->arrays[a].out_type})) continue;
    return Status::Invalid(op + ": array " + std::to_string(a) +
                           " has a dtype that cannot be summed. Cast it first.");
  }
  return Status::Ok();
}

ChannelKey KeyOf(const Options& options, const device::Call& call, const int64_t* places) {
  ChannelKey key;
  const auto add = [&](int64_t number) { key.layout += std::to_string(number) + ","; };
  add(call.is_dispatch);
  add(call.num_ranks);
  add(call.num_local);
  for (int p = 0; p < call.num_parts; ++p) {
    const device::Part& part = call.parts[p];
    add(part.capacity);
    add(part.num_slots);
    add(part.num_replicas);
    for (int a = part.first_array; a < part.first_array + part.num_arrays; ++a) {
      add(call.arrays[a].in_row_bytes);
    }
    key.layout += ";";
    key.buffers.push_back(options.buffer[p]);
  }
  key.places.assign(places, places + call.num_ranks);
  return key;
}

bool IsRecorded(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &status) == cudaSuccess &&
         status != cudaStreamCaptureStatusNone;
}

// Waits for each call and reports its own errors, instead of leaving them to a later one.
bool ChecksEachCall() {
  static const bool checks = [] {
    const char* value = std::getenv("JAX_CP_DISPATCH_CHECK");
    return value != nullptr && std::strcmp(value, "0") != 0 && *value != '\0';
  }();
  return checks;
}

Status Move(const Options& options, bool execute, int32_t device, cudaStream_t stream,
            const int32_t* rank_operand, ffi::RemainingArgs args, ffi::RemainingRets results) {
  const std::string op = options.op();
  if (const cudaError_t error = cudaSetDevice(device); error != cudaSuccess) {
    return {StatusCode::kInternal,
            op + ": cannot use GPU " + std::to_string(device) + ": " + cudaGetErrorString(error)};
  }
  const int64_t here = ChannelRegistry::Get().process() << 16 | device;
  const auto num_ranks = static_cast<size_t>(options.num_ranks);
  std::vector<int64_t> all(num_ranks, here);  // where one device holds all ranks
  const int64_t* places = all.data();
  int rank = 0;
  if (!options.is_on_one_device()) {
    const auto at = std::find(options.places.begin(), options.places.end(), here);
    if (at == options.places.end()) {
      return Status::Invalid(op + ": the program was made for other devices than GPU " +
                             std::to_string(device) + " of process " + std::to_string(here >> 16) +
                             ". Compile it again.");
    }
    const size_t index = at - options.places.begin();
    places = options.places.begin() + index / num_ranks * num_ranks;
    rank = static_cast<int>(index % num_ranks);
  }

  device::Call call{};
  const int64_t num_local = options.is_on_one_device() ? options.num_ranks : 1;
  const int num_blocks = NumBlocks(device);
  Status status = ReadCall(options, args, results, num_local, num_blocks, &call);
  if (!status.ok()) return status;
  const ChannelKey key = KeyOf(options, call, places);
  std::shared_ptr<Channel> channel;
  status = ChannelRegistry::Get().Find(op, key, call, options.memory == "slab",
                                       !execute || !IsRecorded(stream), &channel);
  if (!status.ok() || !execute) return status;

  call.first_rank = rank;
  call.rank_operand = options.is_on_one_device() ? nullptr : rank_operand;
  call.program = std::hash<std::string>{}(key.layout);
  device::LayOutChannel(&call);
  device::LayOutLocal(&call);
  channel->Bind(rank, &call);
  // Also after an error: the other ranks run this call too, and wait for this one.
  if (const cudaError_t error = LaunchCall(call, num_blocks, stream); error != cudaSuccess) {
    return {StatusCode::kInternal, op + ": launching failed: " + cudaGetErrorString(error)};
  }
  if (IsRecorded(stream)) return status;
  if (ChecksEachCall()) {
    if (const cudaError_t error = cudaStreamSynchronize(stream); error != cudaSuccess) {
      return {StatusCode::kInternal, op + ": failed: " + cudaGetErrorString(error)};
    }
  }
  const std::string message = channel->TakeError(op);
  return message.empty() ? status : Status::Invalid(message);
}

template <bool kIsDispatch, bool kExecute>
ffi::Error MoveIn(int32_t device, cudaStream_t stream, ffi::AnyBuffer rank, ffi::AnyBuffer,
                  ffi::RemainingArgs args, ffi::RemainingRets results, std::string_view axis,
                  int64_t num_ranks, int64_t deadline_ms, Counts has_src_offset, Counts num_arrays,
                  Counts num_tokens, Counts capacity, Counts buffer, Counts places,
                  std::string_view memory) {
  try {
    const Options options{kIsDispatch, axis,     num_ranks, deadline_ms, has_src_offset, num_arrays,
                          num_tokens,  capacity, buffer,    places,      memory};
    return ToError(Move(options, kExecute, device, stream,
                        static_cast<const int32_t*>(rank.untyped_data()), args, results));
  } catch (const std::exception& error) {
    return ToError({StatusCode::kInternal, std::string("jax_cp_dispatch: ") + error.what()});
  }
}

// The operands of both stages are those of the CPU's handlers; see ffi/dispatch.cc. Two attributes
// are added: where the ranks are, and which memory reaches them.
template <ffi::ExecutionStage kStage>
auto Binding() {
  return ffi::Ffi::Bind<kStage>()
      .template Ctx<ffi::DeviceOrdinal>()
      .template Ctx<ffi::PlatformStream<cudaStream_t>>()
      .template Arg<ffi::AnyBuffer>()  // rank: place on the axis, in device memory
      .template Arg<ffi::AnyBuffer>()  // group
      .RemainingArgs()
      .RemainingRets()
      .template Attr<std::string_view>("axis")
      .template Attr<int64_t>("num_ranks")
      .template Attr<int64_t>("deadline_ms")
      .template Attr<Counts>("has_src_offset")
      .template Attr<Counts>("num_arrays")
      .template Attr<Counts>("num_tokens")
      .template Attr<Counts>("capacity")
      .template Attr<Counts>("buffer")
      .template Attr<Counts>("places")
      .template Attr<std::string_view>("memory");
}

constexpr auto kInitialize = ffi::ExecutionStage::kInitialize;
constexpr auto kExecute = ffi::ExecutionStage::kExecute;

XLA_FFI_DEFINE_HANDLER(InitializeDispatch, (MoveIn<true, false>), Binding<kInitialize>());
XLA_FFI_DEFINE_HANDLER(InitializeCombine, (MoveIn<false, false>), Binding<kInitialize>());
XLA_FFI_DEFINE_HANDLER(ExecuteDispatch, (MoveIn<true, true>), Binding<kExecute>(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(ExecuteCombine, (MoveIn<false, true>), Binding<kExecute>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

std::vector<CudaTarget> CudaDispatchTargets() {
  return {{"jax_cp_dispatch.dispatch", InitializeDispatch, ExecuteDispatch},
          {"jax_cp_dispatch.combine", InitializeCombine, ExecuteCombine}};
}

}  // namespace cpd
