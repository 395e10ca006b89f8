// Coverage-guided fuzzing of how the handlers of dispatch and combine read a call: any attributes,
// and any number, shapes and types of arrays, are rejected or describe valid memory. For a call on
// CPU, the ranks' exchange is then planned and run; for a call on a GPU, all memory is touched that
// its kernels may touch, in one call or between two. See fuzz.sh.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "ffi/cuda/dispatch_call.h"
#include "fuzz_ffi.h"
#include "kernels/prepare.h"

namespace cpd {
namespace {

using Numbers = std::vector<int64_t>;

// The description of a call, before and after something in it becomes invalid.
struct Program {
  Direction direction;
  int64_t num_ranks, deadline_ms;
  Numbers has_src_offset, has_weights, has_fingerprint, num_arrays, num_tokens, capacity, buffer,
      device_table;
  std::vector<Shape> args, results;
  size_t num_fields = 0;  // of args, which are metadata and fingerprints
  bool is_start = false;  // the first call of two

  DispatchOptions options() const {
    DispatchOptions o;
    o.op = "dispatch";
    o.axis = "cp";
    o.num_ranks = num_ranks;
    o.deadline_ms = deadline_ms;
    o.capacity_names = "first,second";
    o.has_src_offset = has_src_offset;
    o.has_weights = has_weights;
    o.has_fingerprint = has_fingerprint;
    o.num_arrays = num_arrays;
    o.num_tokens = num_tokens;
    o.capacity = capacity;
    o.buffer = buffer;
    return o;
  }
};

Program Write(Chooser& c, int64_t num_held_of, bool is_start = false) {
  constexpr XLA_FFI_DataType kIntegers[] = {XLA_FFI_DataType_S32, XLA_FFI_DataType_U32,
                                            XLA_FFI_DataType_S64, XLA_FFI_DataType_U64};
  constexpr XLA_FFI_DataType kTypes[] = {XLA_FFI_DataType_F32, XLA_FFI_DataType_BF16,
                                         XLA_FFI_DataType_S8, XLA_FFI_DataType_F64,
                                         XLA_FFI_DataType_C64};
  Program p;
  p.direction = c.Flag() ? Direction::kDispatch : Direction::kCombine;
  const bool is_dispatch = p.direction == Direction::kDispatch;
  const int64_t num_ranks = c.Number(1, 4), num_held = num_held_of == 0 ? 1 : num_ranks;
  std::vector<Shape> fingerprints, arrays;
  for (int64_t group = c.Number(1, 2); group > 0; --group) {
    const int64_t num_slots = c.Number(0, 4), replicas = c.Number(0, 3);
    const int64_t views = c.Number(0, 2);  // none, one, or all
    const bool has_src_offset = c.Flag();
    p.has_src_offset.push_back(has_src_offset);
    p.has_weights.push_back(!is_dispatch && views == 0 && num_held_of == 0 && c.Flag());
    p.has_fingerprint.push_back(c.Flag());
    p.num_arrays.push_back(c.Number(1, 2));
    p.num_tokens.push_back(c.Number(0, 6));
    p.capacity.push_back(c.Number(0, 6));
    p.buffer.push_back(0);
    const auto field = [&](Numbers tail) {
      if (views > 0) tail.insert(tail.begin(), views == 1 ? 1 : num_ranks);
      p.args.push_back({c.Type(kIntegers[c.Number(0, 3)]), c.Dims(std::move(tail))});
    };
    field({num_ranks + 1});
    field({num_slots});
    for (int i = 0; i < 2; ++i)
      field(replicas > 0 ? Numbers{num_slots, replicas} : Numbers{num_slots});
    if (has_src_offset) field({num_slots});
    if (p.has_weights.back() != 0) {
      const XLA_FFI_DataType type = c.Flag() ? XLA_FFI_DataType_F32 : XLA_FFI_DataType_F64;
      p.args.push_back(
          {c.Type(type), c.Dims(replicas > 0 ? Numbers{num_slots, replicas} : Numbers{num_slots})});
    }
    if (p.has_fingerprint.back() != 0) {
      fingerprints.push_back({c.Type(kIntegers[c.Number(0, 3)]), c.Dims({kFingerprintSize})});
    }
    for (int64_t a = 0; a < p.num_arrays.back(); ++a) {
      Numbers in = {num_held * (is_dispatch ? p.num_tokens : p.capacity).back()};
      Numbers out = {num_held * (is_dispatch ? p.capacity : p.num_tokens).back()};
      if (in[0] == 0) in[0] = num_held;  // padded
      for (int64_t n = c.Number(0, 2); n > 0; --n) {
        in.push_back(c.Number(0, 3));
        out.push_back(in.back());
      }
      const XLA_FFI_DataType type = kTypes[c.Number(0, 4)];
      const bool widens = !is_dispatch && type == XLA_FFI_DataType_BF16 && c.Flag();
      arrays.push_back({c.Type(type), c.Dims(std::move(in))});
      p.results.push_back({c.Type(widens ? XLA_FFI_DataType_F32 : type), c.Dims(std::move(out))});
    }
  }
  p.args.insert(p.args.end(), fingerprints.begin(), fingerprints.end());
  p.num_fields = p.args.size();
  p.args.insert(p.args.end(), arrays.begin(), arrays.end());
  p.is_start = is_start;
  if (is_start) {  // the arrays, in place, and memory for copies of all else, as in pair.py
    int64_t num_floats = 4;
    for (size_t i = 0; i < p.num_fields; ++i) {
      Shape field = p.args[i];
      num_floats += (Arrays::Fit(&field) + 15) / 16 * 4;
    }
    p.results.insert(p.results.end(), arrays.begin(), arrays.end());
    p.results.push_back({c.Type(XLA_FFI_DataType_F32), c.Dims({num_floats})});
  } else if (c.Flag() && is_dispatch) {
    p.args.insert(p.args.end(), p.results.begin(), p.results.end());
  }

  p.num_ranks = c.MostlyOrHostile(num_ranks);
  p.deadline_ms = c.MostlyOrHostile(5000);
  for (Numbers* list : {&p.has_src_offset, &p.has_weights, &p.has_fingerprint, &p.num_arrays,
                        &p.num_tokens, &p.capacity, &p.buffer}) {
    for (int64_t& number : *list) number = c.MostlyOrHostile(number);
    if (c.Seldom()) list->resize(c.Number(0, 3));
  }
  if (c.Seldom()) p.args.resize(c.Number(0, p.args.size()));
  if (c.Seldom()) p.args.push_back({XLA_FFI_DataType_F32, {1}});
  if (c.Seldom()) p.results.resize(c.Number(0, p.results.size()));
  if (c.Seldom()) p.results.push_back({XLA_FFI_DataType_F32, {1}});
  p.device_table = {-1};
  if (num_held_of == 0) {
    p.device_table.clear();
    for (int64_t i = c.Mostly(2 * num_ranks, 0, 9); i > 0; --i) {
      p.device_table.push_back(c.MostlyOrHostile(i));
    }
  }
  return p;
}

// All operands and results of one rank. `results`, if asked for, keeps the latter.
Frame Make(const Program& program, Chooser& c, Arrays* arrays,
           std::vector<XLA_FFI_Buffer*>* results = nullptr) {
  Frame frame;
  std::vector<XLA_FFI_Buffer*> sent;
  for (size_t i = 0; i < program.args.size(); ++i) {
    XLA_FFI_Buffer* arg = arrays->Make(program.args[i]);
    frame.AddArg(arg);
    if (i < program.num_fields) {
      arrays->FillWithIntegers(&c);
    } else {
      sent.push_back(arg);
    }
  }
  for (size_t i = 0; i < program.results.size(); ++i) {
    const size_t array = i - sent.size();  // of those that a first call returns in place
    const bool in_place = program.is_start && array < sent.size() && !c.Seldom();
    XLA_FFI_Buffer* result = in_place ? sent[array] : arrays->Make(program.results[i]);
    frame.AddResult(result);
    if (results != nullptr) results->push_back(result);
  }
  return frame;
}

void RunOnCpu(Chooser& c) {
  const Program program = Write(c, /*num_held_of=*/0);
  std::vector<Arrays> arrays(4);
  std::vector<std::unique_ptr<Contribution>> ranks;
  DispatchCall call;
  for (int rank = 0; rank == 0 || rank < call.num_ranks; ++rank) {
    const DispatchOptions options = program.options();
    call = {};
    if (IsRefused(ReadAttributes(program.direction, options, &call), call.op)) return;
    Frame frame = Make(program, c, &arrays.at(rank % 4));
    if (IsRefused(ReadOperands(options, frame.args(), frame.results(), 1, &call), call.op)) return;
    auto mine = std::make_unique<DispatchContribution>();
    mine->direction = call.direction;
    mine->num_ranks = call.num_ranks;
    for (OperandGroup& group : call.groups) group.Select(rank);
    mine->groups = std::move(call.groups);
    ranks.push_back(std::move(mine));
  }
  WorkList work;
  const Status status =
      call.is_dispatch() ? PlanDispatch(call.op, ranks, &work) : PlanCombine(call.op, ranks, &work);
  if (IsRefused(status, call.op)) return;
  for (int64_t task = 0; task < work.num_tasks; ++task) work.run(task);
}

// Reads what the kernels may read and writes what they may write.
void Touch(const kernels::Call& call) {
  volatile int64_t seen = 0;
  for (int p = 0; p < call.num_groups; ++p) {
    const kernels::OperandGroup& group = call.groups[p];
    const int64_t views = group.has_all_views ? call.num_ranks : 1;
    const int64_t targets = group.num_slots * group.num_replicas;
    const auto read = [&](const IntArray& field, int64_t count) {
      for (int64_t i = 0; i < views * count; ++i) seen = seen + field[i] % 2;
    };
    read(group.num_recv_tokens, call.num_ranks + 1);
    read(group.seq_len, group.num_slots);
    read(group.dst_rank, targets);
    read(group.dst_offset, targets);
    if (group.src_offset) read(group.src_offset, group.num_slots);
    for (int64_t i = 0; group.fingerprint && i < kFingerprintSize; ++i)
      seen = seen + group.fingerprint[i] % 2;
    const int64_t in_rows = call.is_dispatch ? group.num_tokens : group.capacity;
    const int64_t out_rows = call.is_dispatch ? group.capacity : group.num_tokens;
    if (group.rows_per_strip < 1 || group.rows_per_push < 1) __builtin_trap();
    for (int a = group.first_array; a < group.first_array + group.num_arrays; ++a) {
      const kernels::Array& array = call.arrays[a];
      for (int64_t i = 0; i < call.num_local * in_rows * array.in_row_bytes; ++i) {
        seen = seen + array.in[i];
      }
      for (int64_t i = 0; i < call.num_local * out_rows * array.out_row_bytes; ++i) {
        array.out[i] = 0;
      }
    }
  }
}

// Events and streams that do nothing.
class NoOrder final : public StreamOrder {
 public:
  void* MakeEvent() override { return this; }
  bool Record(void*, void*) override { return true; }
  bool Wait(void*, void*) override { return true; }
  bool IsOver(void*) override { return true; }
};

// The second call takes all results of the first, and returns `num_arrays` of them in place; or
// something in it is invalid. Only with the same arrays are the two a pair.
void ReadSecondCall(Chooser& c, const std::string& op, const ExchangePairs::Addresses& first,
                    std::vector<XLA_FFI_Buffer*> operands, int num_arrays, Arrays* arrays) {
  std::vector<XLA_FFI_Buffer*> results(operands.begin(), operands.begin() + num_arrays);
  for (auto* list : {&operands, &results}) {
    if (c.Seldom()) list->resize(c.Number(0, list->size()));
    if (c.Seldom()) list->push_back(arrays->Make({XLA_FFI_DataType_F32, {1}}));
    if (!list->empty() && c.Seldom()) {
      (*list)[c.Number(0, list->size() - 1)] = arrays->Make({XLA_FFI_DataType_F32, {1}});
    }
  }
  Frame frame;
  for (XLA_FFI_Buffer* buffer : operands) frame.AddArg(buffer);
  for (XLA_FFI_Buffer* buffer : results) frame.AddResult(buffer);
  bool is_same = operands.size() == first.size();
  for (size_t i = 0; is_same && i < first.size(); ++i) is_same = operands[i]->data == first[i];
  ExchangePairs::Addresses second;
  if (IsRefused(ReadDone(op, frame.args(), frame.results(), &second), op)) return;
  for (size_t i = 0; i < results.size(); ++i) {
    if (results[i]->data != operands.at(i)->data) __builtin_trap();
  }
  NoOrder order;
  ExchangePairs pairs(&order);
  if (!pairs.AnnounceStart(first)) __builtin_trap();
  pairs.AnnounceDone(second);
  if (pairs.IsPair(first) != is_same) __builtin_trap();
}

void ReadOnGpu(Chooser& c) {
  const bool has_all_ranks = c.Flag();
  const Program program = Write(c, has_all_ranks ? 1 : 0, c.Flag());
  const DispatchOptions options = program.options();
  DispatchCall call;
  call.is_start = program.is_start;
  if (IsRefused(ReadCudaAttributes(program.direction, options, &call), call.op)) return;
  RankLocation location;
  if (IsRefused(LocateRanks(call.op, 1, call.num_ranks, program.device_table, &location), call.op))
    return;
  if (location.rank < 0 || location.rank >= call.num_ranks || location.group < 0 ||
      static_cast<int>(location.devices.size()) != call.num_ranks) {
    __builtin_trap();
  }
  Arrays arrays;
  std::vector<XLA_FFI_Buffer*> results;
  Frame frame = Make(program, c, &arrays, &results);
  const int32_t rank = 0;
  kernels::Call on_device{};
  on_device.rank_operand = location.on_one_device ? nullptr : &rank;
  on_device.num_local = location.on_one_device ? call.num_ranks : 1;
  const int num_blocks = kernels::NumMoveBlocks(
      c.MostlyOrHostile(64), static_cast<int>(c.Number(1, 200)), location.on_one_device);
  if (num_blocks < 1) __builtin_trap();
  if (IsRefused(
          ReadCudaOperands(options, frame.args(), frame.results(), num_blocks, &call, &on_device),
          call.op)) {
    return;
  }
  on_device.has_network = c.Flag();
  if (kernels::LayOutChannel(&on_device) <= 0 || kernels::LayOutLocal(&on_device) <= 0) {
    __builtin_trap();
  }
  if (program.is_start) {
    ExchangePairs::Addresses first;
    char* held = nullptr;
    if (IsRefused(ReadStart(call.op, on_device, frame.results(), &first, &held), call.op)) return;
    kernels::HeldFields fields;
    kernels::HoldFields(&on_device, held, &fields);
    for (int i = 0; i < fields.num; ++i) kernels::Hold({0, 1, i, fields.num, nullptr}, fields);
    ReadSecondCall(c, call.op, first, results, on_device.num_arrays, &arrays);
  }
  Touch(on_device);
}

}  // namespace
}  // namespace cpd

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t num_bytes) {
  cpd::Chooser chooser(bytes, num_bytes);
  if (chooser.Flag()) {
    cpd::RunOnCpu(chooser);
  } else {
    cpd::ReadOnGpu(chooser);
  }
  return 0;
}
