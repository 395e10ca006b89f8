// One dispatch or combine call on a GPU: turns attributes and operands into the kernels' parameter.
// Needs no CUDA.
#include "ffi/cuda/dispatch_call.h"

#include <algorithm>

#include "ffi/common.h"
#include "kernels/prepare.h"

namespace ffi = xla::ffi;

namespace cpd {
namespace {

constexpr char kCallIt[] = ". Call it through jax_cp_dispatch.";

Status NotInPlace(const std::string& op, size_t array) {
  return Status::Internal(op, ": array ", array, " and its result are in different places",
                          kCallIt);
}

}  // namespace

void GpuOptions::Read(AttributeReader* attributes) {
  attributes->Read("device_table", &device_table);
  attributes->Read("memory", &memory);
  attributes->Read("site", &site);
  attributes->Read("num_comm_sm", &num_comm_sm);
}

Status ReadOptions(const ffi::Dictionary& attributes, CudaOptions* options) {
  AttributeReader reader(attributes);
  ReadOptions(&reader, &options->call);
  options->Read(&reader);
  if (options->in_window()) reader.Read("partitions", &options->partitions);
  return reader.Finish();
}

Status LocateRanks(const std::string& op, int64_t here, int64_t num_ranks, Counts device_table,
                   RankLocation* location) {
  const auto count = static_cast<size_t>(num_ranks);
  if (device_table.size() == 1 && device_table[0] == -1) {
    *location = {std::vector<int64_t>(count, here), 0, 0, true};
    return Status::Ok();
  }
  if (device_table.size() % count != 0 || std::any_of(device_table.begin(), device_table.end(),
                                                      [](int64_t entry) { return entry < 0; })) {
    return Status::Invalid(op, ": device_table has ", device_table.size(),
                           " entries for groups of ", num_ranks,
                           " ranks, or one that is negative. Call it through jax_cp_dispatch.");
  }
  const auto at = std::find(device_table.begin(), device_table.end(), here);
  if (at == device_table.end()) {
    return Status::Invalid(op, ": the program was made for other devices than GPU ", here & 0xffff,
                           " of process ", here >> 16, ". Compile it again.");
  }
  const size_t index = at - device_table.begin();
  const int64_t* first = device_table.begin() + index / count * count;
  *location = {std::vector<int64_t>(first, first + count), static_cast<int>(index % count),
               static_cast<int>(index / count), false};
  return Status::Ok();
}

Status ReadCudaAttributes(Direction direction, const DispatchOptions& options, DispatchCall* call) {
  Status status = ReadAttributes(direction, options, call);
  if (!status.ok()) return status;
  int64_t num_arrays = 0;
  for (const int64_t n : options.num_arrays) num_arrays += n;
  if (call->num_ranks <= kernels::kMaxRanks && call->groups.size() <= kernels::kMaxOperandGroups &&
      num_arrays <= kernels::kMaxArrays) {
    return status;
  }
  return Status::Invalid(call->op, ": ", call->num_ranks, " ranks and ", num_arrays,
                         " arrays; on GPUs one call takes at most ", kernels::kMaxRanks,
                         " ranks and ", kernels::kMaxArrays,
                         " arrays. Stack arrays, or pass implementation='xla'.");
}

Status ReadCudaOperands(const DispatchOptions& options, const ffi::RemainingArgs& args,
                        const ffi::RemainingRets& results, int num_blocks, DispatchCall* call,
                        kernels::Call* on_device) {
  // More are not useful, and sizes would exceed 63 bits.
  constexpr int64_t kMostReplicas = 1 << 14;
  Status status = ReadOperands(options, args, results, on_device->num_local, call);
  if (!status.ok()) return status;
  on_device->is_dispatch = call->is_dispatch();
  on_device->num_ranks = call->num_ranks;
  on_device->num_groups = static_cast<int>(call->groups.size());
  on_device->deadline_ns = static_cast<uint64_t>(call->deadline.count()) * 1'000'000;
  for (size_t p = 0; p < call->groups.size(); ++p) {
    const OperandGroup& read = call->groups[p];
    if (read.num_slots < 1 || read.num_replicas < 1 || read.num_replicas > kMostReplicas) {
      return Status::Invalid(call->op, ": plan ", p, " has ", read.num_slots, " slots x ",
                             read.num_replicas, " replicas. Call it through jax_cp_dispatch.");
    }
    if (read.weights != nullptr) return NotOurs(call->op, "plan ", p, " has weights");
    kernels::OperandGroup& group = on_device->groups[p];
    group.num_recv_tokens = read.num_recv_tokens;
    group.seq_len = read.seq_len;
    group.dst_rank = read.dst_rank;
    group.dst_offset = read.dst_offset;
    group.src_offset = read.src_offset;
    group.fingerprint = read.fingerprint;
    group.has_all_views = read.num_views > 1;
    group.num_slots = read.num_slots;
    group.num_replicas = read.num_replicas;
    group.num_tokens = options.num_tokens[p];
    group.capacity = options.capacity[p];
    group.first_array = on_device->num_arrays;
    group.num_arrays = static_cast<int>(read.tokens.size());
    for (size_t a = 0; a < read.tokens.size(); ++a) {
      const RowArray& in = call->is_dispatch() ? read.tokens[a] : read.buffers[a];
      const RowArray& out = call->is_dispatch() ? read.buffers[a] : read.tokens[a];
      kernels::Array& array = on_device->arrays[on_device->num_arrays++];
      array.in = in.data;
      array.out = out.data;
      array.in_row_bytes = in.row_bytes;
      array.out_row_bytes = out.row_bytes;
      array.in_type = read.types[a].in;
      array.out_type = read.types[a].out;
    }
    group.rows_per_strip = kernels::RowsPerStrip(*on_device, group, num_blocks);
    group.rows_per_push = group.rows_per_strip;
  }
  return status;
}

Status ReadStart(const std::string& op, const kernels::Call& call,
                 const ffi::RemainingRets& results, ExchangePairs::Addresses* addresses,
                 char** held) {
  int64_t held_bytes = 0;
  for (size_t i = 0; i < results.size(); ++i) {
    auto result = results.get<ffi::AnyBuffer>(i);
    if (!result.has_value()) return Status::Invalid(op, ": a result is not an array", kCallIt);
    addresses->push_back((*result)->untyped_data());
    *held = static_cast<char*>((*result)->untyped_data());
    held_bytes = NumBytes(**result);
  }
  for (int a = 0; a < call.num_arrays; ++a) {
    if (call.arrays[a].in != (*addresses)[call.num_arrays + a]) return NotInPlace(op, a);
  }
  kernels::Call reads_copies = call;
  kernels::HeldFields fields;
  const int64_t need = kernels::HoldFields(&reads_copies, *held, &fields);
  if (held_bytes >= need) return Status::Ok();
  return Status::Invalid(op, ": the other operands need ", need, " bytes but their memory has ",
                         held_bytes, kCallIt);
}

Status ReadDone(const std::string& op, const ffi::RemainingArgs& args,
                const ffi::RemainingRets& results, ExchangePairs::Addresses* addresses) {
  for (size_t i = 0; i < args.size(); ++i) {
    const auto arg = args.get<ffi::AnyBuffer>(i);
    if (!arg.has_value()) return Status::Invalid(op, ": an operand is not an array", kCallIt);
    addresses->push_back(arg->untyped_data());
  }
  if (results.size() > args.size()) {
    return Status::Invalid(op, ": there are ", args.size(), " operands and ", results.size(),
                           " results", kCallIt);
  }
  for (size_t i = 0; i < results.size(); ++i) {
    auto result = results.get<ffi::AnyBuffer>(i);
    if (!result.has_value()) return Status::Invalid(op, ": a result is not an array", kCallIt);
    if ((*result)->untyped_data() != (*addresses)[i]) return NotInPlace(op, i);
  }
  return Status::Ok();
}

}  // namespace cpd
