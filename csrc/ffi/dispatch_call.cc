// One call of dispatch or combine, on CPU or a GPU: reads and checks its attributes and operands.
#include "ffi/dispatch_call.h"

#include <algorithm>
#include <limits>

#include "ffi/common.h"

namespace ffi = xla::ffi;

namespace cpd {
namespace {

using Dims = ffi::Span<const int64_t>;

std::string Text(Dims dims) {
  std::string text = "[";
  for (const int64_t dim : dims) text += (text.size() > 1 ? ", " : "") + std::to_string(dim);
  return text + "]";
}

Dims Without(Dims dims, size_t num_leading) { return dims.last(dims.size() - num_leading); }

// -1 for types of less than a byte, and for types without elements.
int64_t BytesOf(ffi::DataType type) {
  switch (type) {
    case ffi::PRED:
    case ffi::F8E3M4:
    case ffi::F8E4M3:
    case ffi::F8E4M3B11FNUZ:
    case ffi::F8E4M3FNUZ:
    case ffi::F8E5M2FNUZ:
    case ffi::F8E8M0FNU:
      return 1;
    case ffi::C64:
      return 8;
    case ffi::C128:
      return 16;
    default:
      return ToDataType(type) == DataType::kOther ? -1 : ElementBytes(ToDataType(type));
  }
}

// The bytes of one row; -1 if no memory could hold it.
int64_t RowBytes(Dims dims, int64_t element_bytes) {
  int64_t bytes = element_bytes;
  for (const int64_t dim : Without(dims, 1)) {
    if (dim < 0 || __builtin_mul_overflow(bytes, dim, &bytes)) return -1;
  }
  return bytes;
}

// Reads the operands in order.
class Reader {
 public:
  Reader(const DispatchOptions& options, const ffi::RemainingArgs& args,
         const ffi::RemainingRets& results, int64_t num_held, DispatchCall* call)
      : options_(options), args_(args), results_(results), num_held_(num_held), call_(*call) {}

  Status Read() {
    int64_t num_fields = 0;
    size_t num_arrays = 0;
    for (size_t p = 0; p < call_.groups.size(); ++p) {
      num_fields += options_.has_src_offset[p] != 0 ? 5 : 4;
      if (options_.has_weights[p] != 0) ++num_fields;
      if (options_.has_fingerprint[p] != 0) ++num_fields;
      num_arrays += options_.num_arrays[p];  // checked: positive, and few in total
    }
    const size_t num_args = num_fields + num_arrays;
    const size_t num_results = call_.is_start ? 2 * num_arrays + 1 : num_arrays;
    const bool has_storage =
        call_.is_dispatch() && !call_.is_start && args_.size() == num_args + num_arrays;
    if (results_.size() != num_results || (args_.size() != num_args && !has_storage)) {
      return NotOurs(call_.op, "there are ", args_.size(), " operands and ", results_.size(),
                     " results, but num_arrays needs ", num_args, " and ", num_results);
    }
    Status status;
    for (size_t p = 0; p < call_.groups.size() && status.ok(); ++p) status = Metadata(p);
    for (size_t p = 0; p < call_.groups.size() && status.ok(); ++p) status = Fingerprint(p);
    for (size_t p = 0; p < call_.groups.size() && status.ok(); ++p) status = Arrays(p);
    return status;
  }

 private:
  // Reads one field of the metadata. Its dimensions: that of views, if any, then `num_dims` (or one
  // less).
  Status Field(size_t p, const char* name, size_t num_dims, IntArray* field, Dims* dims) {
    const auto buffer = args_.get<ffi::AnyBuffer>(next_arg_++);
    const auto type = buffer.has_value() ? ToIntType(buffer->element_type()) : std::nullopt;
    if (!type) return NotOurs(call_.op, name, " of plan ", p, " has no integers of 32 or 64 bits");
    *field = {buffer->untyped_data(), *type};
    *dims = buffer->dimensions();
    const size_t leading = has_views_dim_ ? 1 : 0;
    const bool fits =
        dims->size() == leading + num_dims || (num_dims == 2 && dims->size() == leading + 1);
    if (fits && (!has_views_dim_ || dims->front() == num_views_)) return Status::Ok();
    return NotOurs(call_.op, name, " of plan ", p, " has shape ", Text(*dims));
  }

  Status Metadata(size_t p) {
    OperandGroup& group = call_.groups[p];
    const int64_t num_ranks = call_.num_ranks;
    Dims counts, slots, targets, offsets;
    // The first field tells whether there is a dimension of views.
    has_views_dim_ = false;
    Status status = Field(p, "num_recv_tokens", 2, &group.num_recv_tokens, &counts);
    if (!status.ok()) return status;
    has_views_dim_ = counts.size() == 2;
    num_views_ = has_views_dim_ ? counts.front() : 1;
    if (counts.back() != num_ranks + 1 || (num_views_ != 1 && num_views_ != num_ranks)) {
      return NotOurs(call_.op, "num_recv_tokens of plan ", p, " has shape ", Text(counts),
                     " but there are ", num_ranks, " ranks");
    }
    group.num_views = num_views_;
    const size_t leading = has_views_dim_ ? 1 : 0;
    status = Field(p, "seq_len", 1, &group.seq_len, &slots);
    if (status.ok()) status = Field(p, "dst_rank", 2, &group.dst_rank, &targets);
    if (status.ok()) status = Field(p, "dst_offset", 2, &group.dst_offset, &offsets);
    if (status.ok() && options_.has_src_offset[p] != 0) {
      Dims sources;
      status = Field(p, "src_offset", 1, &group.src_offset, &sources);
      if (status.ok() && !(sources == slots)) {
        return NotOurs(call_.op, "src_offset of plan ", p, " has shape ", Text(sources),
                       " but seq_len ", Text(slots));
      }
    }
    if (!status.ok()) return status;
    group.num_slots = slots.back();
    group.num_replicas = targets.size() == leading + 2 ? targets.back() : 1;
    if (targets[leading] != group.num_slots || !(offsets == targets)) {
      return NotOurs(call_.op, "dst_rank and dst_offset of plan ", p, " have shapes ",
                     Text(targets), " and ", Text(offsets), " but seq_len ", Text(slots));
    }
    if (options_.has_weights[p] == 0) return status;
    const auto weights = args_.get<ffi::AnyBuffer>(next_arg_++);
    if (call_.is_dispatch() || !weights.has_value() || !(weights->dimensions() == targets) ||
        num_views_ != 1 ||
        (weights->element_type() != ffi::F32 && weights->element_type() != ffi::F64)) {
      return NotOurs(call_.op, "weights of plan ", p, " are not those of the rows of one rank");
    }
    group.weights = weights->untyped_data();
    group.weight_type = ToDataType(weights->element_type());
    return status;
  }

  Status Fingerprint(size_t p) {
    if (options_.has_fingerprint[p] == 0) return Status::Ok();
    Dims dims;
    has_views_dim_ = false;
    Status status = Field(p, "fingerprint", 1, &call_.groups[p].fingerprint, &dims);
    if (status.ok() && dims.front() != kFingerprintSize) {
      status = NotOurs(call_.op, "fingerprint of plan ", p, " has shape ", Text(dims));
    }
    return status;
  }

  // Whether the array has the same number of rows for each rank that it holds.
  bool HoldsRows(Dims dims, int64_t of_each) const {
    return dims.front() % num_held_ == 0 && dims.front() / num_held_ == of_each;
  }

  Status Arrays(size_t p) {
    OperandGroup& group = call_.groups[p];
    const bool is_dispatch = call_.is_dispatch();
    const int64_t num_tokens = options_.num_tokens[p], capacity = options_.capacity[p];
    const int64_t rows_in = is_dispatch ? num_tokens : capacity;
    const int64_t rows_out = is_dispatch ? capacity : num_tokens;
    const auto num_arrays =
        static_cast<size_t>(options_.num_arrays[p]);  // at most as many as were passed
    group.tokens.reserve(num_arrays);
    group.buffers.reserve(num_arrays);
    group.types.reserve(num_arrays);
    for (int64_t a = 0; a < options_.num_arrays[p]; ++a) {
      const auto arg = args_.get<ffi::AnyBuffer>(next_arg_++);
      auto result = results_.get<ffi::AnyBuffer>(next_result_++);
      const auto wrong = [&](const auto&... what) {
        return NotOurs(call_.op, "array ", a, " of plan ", p, " ", what...);
      };
      if (!arg.has_value() || !result.has_value()) return wrong("is not an array");
      const ffi::AnyBuffer out = **result;
      const Dims dims_in = arg->dimensions(), dims_out = out.dimensions();
      if (dims_in.size() == 0 || dims_out.size() == 0) return wrong("is a scalar");
      if (!(Without(dims_in, 1) == Without(dims_out, 1))) {
        return wrong("has rows of shape ", Text(Without(dims_in, 1)), " but its result of ",
                     Text(Without(dims_out, 1)));
      }
      // An array without rows is padded: its rows do not count.
      if ((rows_in != 0 && !HoldsRows(dims_in, rows_in)) || !HoldsRows(dims_out, rows_out)) {
        return wrong("has ", dims_in.front(), " rows and its result ", dims_out.front(),
                     ", but the attributes say ", rows_in, " and ", rows_out, " for each of ",
                     num_held_, " ranks");
      }
      const ffi::DataType type_in = arg->element_type(), type_out = out.element_type();
      const auto is_complex = [](ffi::DataType type) {
        return ToRealType(type) != ToDataType(type);
      };
      const SumTypes types{ToDataType(type_in), ToDataType(type_out)};
      if (is_dispatch ? type_in != type_out
                      : !SumIsSupported(types) || (type_in != type_out &&
                                                   (is_complex(type_in) || is_complex(type_out)))) {
        return wrong(is_dispatch ? "and its result are of different types"
                                 : "has types that cannot be summed");
      }
      const int64_t bytes_in = RowBytes(dims_in, BytesOf(type_in));
      const int64_t bytes_out = RowBytes(dims_out, BytesOf(type_out));
      if (bytes_in < 0 || bytes_out < 0) return wrong("has elements or rows of no size in bytes");
      const RowArray in{static_cast<char*>(arg->untyped_data()), rows_in, bytes_in};
      const RowArray written{static_cast<char*>(out.untyped_data()), rows_out, bytes_out};
      group.tokens.push_back(is_dispatch ? in : written);
      group.buffers.push_back(is_dispatch ? written : in);
      group.types.push_back(types);
    }
    return Status::Ok();
  }

  const DispatchOptions& options_;
  const ffi::RemainingArgs& args_;
  const ffi::RemainingRets& results_;
  const int64_t num_held_;
  DispatchCall& call_;
  bool has_views_dim_ = false;
  int64_t num_views_ = 1;
  size_t next_arg_ = 0;
  size_t next_result_ = 0;
};

}  // namespace

void ReadOptions(AttributeReader* attributes, DispatchOptions* options) {
  AttributeReader& a = *attributes;
  DispatchOptions& o = *options;
  o.Read(attributes);
  a.Read("capacity_names", &o.capacity_names);
  a.Read("has_src_offset", &o.has_src_offset);
  a.Read("has_weights", &o.has_weights);
  a.Read("has_fingerprint", &o.has_fingerprint);
  a.Read("num_arrays", &o.num_arrays);
  a.Read("num_tokens", &o.num_tokens);
  a.Read("capacity", &o.capacity);
  a.Read("buffer", &o.buffer);
}

Status ReadAttributes(Direction direction, const DispatchOptions& options, DispatchCall* call) {
  constexpr int64_t kMostArrays = 1 << 16;  // far more than any call has
  call->direction = direction;
  call->op = options.OverAxis();
  if (options.num_ranks < 1 || options.num_ranks >= std::numeric_limits<int>::max()) {
    return NotOurs(call->op, "num_ranks is ", options.num_ranks);
  }
  if (!options.HasDeadline()) {
    return NotOurs(call->op, "deadline_ms is ", options.deadline_ms, "; it needs to be in 1..",
                   kLongestDeadline.count());
  }
  call->num_ranks = static_cast<int>(options.num_ranks);
  call->deadline = std::chrono::milliseconds(options.deadline_ms);
  const size_t num_groups = options.num_arrays.size();
  for (const auto* of_groups :
       {&options.has_src_offset, &options.has_weights, &options.has_fingerprint,
        &options.num_tokens, &options.capacity, &options.buffer}) {
    if (num_groups > 0 && num_groups <= kMostArrays && of_groups->size() == num_groups) continue;
    return NotOurs(call->op, "num_arrays has ", num_groups, " entries, another attribute ",
                   of_groups->size());
  }
  for (size_t p = 0; p < num_groups; ++p) {
    if (options.num_arrays[p] < 1 || options.num_arrays[p] > kMostArrays) {
      return NotOurs(call->op, "num_arrays is ", options.num_arrays[p], " for plan ", p);
    }
    for (const int64_t rows : {options.num_tokens[p], options.capacity[p]}) {
      if (rows < 0 || rows >= kMostRows)
        return NotOurs(call->op, "plan ", p, " is for ", rows, " rows");
    }
  }
  call->groups.resize(num_groups);
  return Status::Ok();
}

Status ReadOperands(const DispatchOptions& options, const ffi::RemainingArgs& args,
                    const ffi::RemainingRets& results, int64_t num_held, DispatchCall* call) {
  return Reader(options, args, results, num_held, call).Read();
}

}  // namespace cpd
