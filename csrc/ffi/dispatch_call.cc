// One call of dispatch or combine, on CPU or a GPU: reads and checks its attributes and operands.
#include "ffi/dispatch_call.h"

#include <limits>

namespace ffi = xla::ffi;

namespace cpd {
namespace {

// -1 for types of less than a byte, and for types without elements.
int64_t BytesOf(ffi::DataType type) {
  switch (type) {
    case ffi::PRED:
    case ffi::F8E3M4:
    case ffi::F8E4M3:
    case ffi::F8E4M3B11FNUZ:
    case ffi::F8E4M3FNUZ:
    case ffi::F8E5M2FNUZ:
    case ffi::F8E8M0FNU: return 1;
    case ffi::C64: return 8;
    case ffi::C128: return 16;
    default: return ToDataType(type) == DataType::kOther ? -1 : ElementBytes(ToDataType(type));
  }
}

// The bytes of one row; -1 if no memory could hold it.
int64_t RowBytes(const ffi::AnyBuffer& array) {
  int64_t bytes = BytesOf(array.element_type());
  for (const int64_t dim : array.dimensions().last(array.dimensions().size() - 1)) {
    if (bytes < 0 || dim < 0 || __builtin_mul_overflow(bytes, dim, &bytes)) return -1;
  }
  return bytes;
}

// Reads the operands in order. Python has checked them; this checks what guards memory: the types,
// numbers of elements, and bytes of rows.
struct Reader {
  const DispatchOptions& options;
  const ffi::RemainingArgs& args;
  const ffi::RemainingRets& results;
  const int64_t num_held;
  DispatchCall& call;
  size_t next_arg = 0;
  size_t next_result = 0;

  Status Read() {
    size_t num_args = 0, num_arrays = 0;
    for (size_t p = 0; p < call.groups.size(); ++p) {
      for (const auto* has :
           {&options.has_src_offset, &options.has_weights, &options.has_fingerprint}) {
        if ((*has)[p] != 0) ++num_args;
      }
      num_args += 4 + options.num_arrays[p];
      num_arrays += options.num_arrays[p];  // checked: positive, and few in total
    }
    const size_t num_results = call.is_start ? 2 * num_arrays + 1 : num_arrays;
    const bool has_storage =
        call.is_dispatch() && !call.is_start && args.size() == num_args + num_arrays;
    if (results.size() != num_results || (args.size() != num_args && !has_storage)) {
      return NotOurs(call.op, "there are ", args.size(), " operands and ", results.size(),
                     " results, but num_arrays needs ", num_args, " and ", num_results);
    }
    for (size_t p = 0; p < call.groups.size(); ++p) {
      if (!HasMetadata(p)) return NotOurs(call.op, "metadata of plan ", p);
    }
    for (size_t p = 0; p < call.groups.size(); ++p) {
      int64_t count = kFingerprintSize;
      const bool is_there = options.has_fingerprint[p] != 0;
      if (is_there &&
          (!Integers(&call.groups[p].fingerprint, &count) || count != kFingerprintSize)) {
        return NotOurs(call.op, "fingerprint of plan ", p);
      }
    }
    for (size_t p = 0; p < call.groups.size(); ++p) {
      for (int64_t a = 0; a < options.num_arrays[p]; ++a) {
        if (const char* wrong = WrongArray(p)) {
          return NotOurs(call.op, "array ", a, " of plan ", p, " ", wrong);
        }
      }
    }
    return Status::Ok();
  }

  // The next operand, and its number of elements.
  bool Integers(IntArray* field, int64_t* count) {
    const auto buffer = args.get<ffi::AnyBuffer>(next_arg++);
    const auto type = buffer.has_value() ? ToIntType(buffer->element_type()) : std::nullopt;
    if (!type) return false;
    *field = {buffer->untyped_data(), *type};
    *count = NumElements(*buffer);
    return *count >= 0;
  }

  bool HasMetadata(size_t p) {
    OperandGroup& group = call.groups[p];
    int64_t counts = 0, slots = 0, targets = 0, offsets = 0, sources = 0;
    if (!Integers(&group.num_recv_tokens, &counts) || !Integers(&group.seq_len, &slots) ||
        !Integers(&group.dst_rank, &targets) || !Integers(&group.dst_offset, &offsets)) {
      return false;
    }
    const int64_t views = counts / (call.num_ranks + int64_t{1});
    if ((views != 1 && views != call.num_ranks) || views * (call.num_ranks + 1) != counts ||
        slots % views != 0 || (slots == 0 ? targets != 0 : targets % slots != 0) ||
        offsets != targets) {
      return false;
    }
    group.num_views = views;
    group.num_slots = slots / views;
    group.num_replicas = slots == 0 ? 1 : targets / slots;
    if (options.has_src_offset[p] != 0 &&
        (!Integers(&group.src_offset, &sources) || sources != slots)) {
      return false;
    }
    if (options.has_weights[p] == 0) return true;
    const auto weights = args.get<ffi::AnyBuffer>(next_arg++);
    if (call.is_dispatch() || !weights.has_value() || views != 1 ||
        (!IsArray(*weights, DataType::kF32, targets) &&
         !IsArray(*weights, DataType::kF64, targets))) {
      return false;
    }
    group.weights = weights->untyped_data();
    group.weight_type = ToDataType(weights->element_type());
    return true;
  }

  // Whether the array has the same number of rows for each rank that it holds.
  bool HoldsRows(const ffi::AnyBuffer& array, int64_t of_each) const {
    const int64_t num_rows = array.dimensions().front();
    return num_rows % num_held == 0 && num_rows / num_held == of_each;
  }

  // Reads the next array and its result; returns the first violated invariant, or nullptr.
  const char* WrongArray(size_t p) {
    OperandGroup& group = call.groups[p];
    const bool is_dispatch = call.is_dispatch();
    const auto in = args.get<ffi::AnyBuffer>(next_arg++);
    auto result = results.get<ffi::AnyBuffer>(next_result++);
    if (!in.has_value() || !result.has_value()) return "is not an array";
    const ffi::AnyBuffer out = **result;
    if (in->dimensions().size() == 0 || out.dimensions().size() == 0) return "is a scalar";
    const int64_t num_tokens = options.num_tokens[p], capacity = options.capacity[p];
    const int64_t rows_in = is_dispatch ? num_tokens : capacity;
    const int64_t rows_out = is_dispatch ? capacity : num_tokens;
    // An array without rows is padded: its rows do not count.
    if ((rows_in != 0 && !HoldsRows(*in, rows_in)) || !HoldsRows(out, rows_out)) {
      return "has other rows than the attributes say";
    }
    const int64_t bytes_in = RowBytes(*in), bytes_out = RowBytes(out);
    if (bytes_in < 0 || bytes_out < 0) return "has elements or rows of no size in bytes";
    const SumTypes types{ToDataType(in->element_type()), ToDataType(out.element_type())};
    if (is_dispatch ? bytes_in != bytes_out
                    : !SumIsSupported(types) || bytes_in / ElementBytes(types.in) !=
                                                    bytes_out / ElementBytes(types.out)) {
      return "and its result are of different types or shapes";
    }
    const RowArray read{static_cast<char*>(in->untyped_data()), rows_in, bytes_in};
    const RowArray written{static_cast<char*>(out.untyped_data()), rows_out, bytes_out};
    group.tokens.push_back(is_dispatch ? read : written);
    group.buffers.push_back(is_dispatch ? written : read);
    group.types.push_back(types);
    return nullptr;
  }
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
  return Reader{options, args, results, num_held, *call}.Read();
}

}  // namespace cpd
