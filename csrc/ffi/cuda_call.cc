// One custom call on a GPU: what its attributes and operands tell the kernels.
#include "ffi/cuda_call.h"

#include <algorithm>

#include "ffi/common.h"
#include "numerics/sum_rows.h"

namespace ffi = xla::ffi;

namespace cpd {
namespace {

// Reads the operands one after another: the metadata of all parts, then the arrays of all parts.
class Reader {
 public:
  Reader(ffi::RemainingArgs args, ffi::RemainingRets results, const CudaOptions& options)
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
  const CudaOptions& options_;
  int64_t num_views_ = 1;
  size_t next_arg_ = 0;
  size_t next_result_ = 0;
  bool ok_ = true;
};

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

}  // namespace

Status ReadCall(const CudaOptions& options, ffi::RemainingArgs args, ffi::RemainingRets results,
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

}  // namespace cpd
