// XLA FFI handlers of dispatch and combine on the CPU transports.
#include "dispatch/dispatch.h"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "dispatch/dispatch_buffers.h"
#include "ffi/common.h"
#include "ffi/cpu/call_site.h"
#include "ffi/dispatch_call.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace cpd {
namespace {

struct DispatchState : CallState<DispatchState> {
  static constexpr char kTypeName[] = "jax_cp_dispatch.Dispatch";
  DispatchOptions options;
  CallSite site;

  void Read(AttributeReader* attributes) {
    ReadOptions(attributes, &options);
    site.Read(attributes, options.num_ranks);
  }
};

// The registered buffers that one rank uses in one exchange; released on destruction.
class BufferUse {
 public:
  BufferUse() = default;
  BufferUse(const BufferUse&) = delete;
  BufferUse& operator=(const BufferUse&) = delete;
  ~BufferUse() {
    for (const int64_t id : ids_) DispatchBuffers::Get().Release(id);
  }

  Status Acquire(int64_t id, const std::string& op) {
    ids_.reserve(ids_.size() + 1);
    Status status = DispatchBuffers::Get().Acquire(id, op);
    if (status.ok()) ids_.push_back(id);
    return status;
  }

 private:
  std::vector<int64_t> ids_;
};

ffi::Future Move(Direction direction, const DispatchState& state, ffi::ThreadPool pool,
                 const CallingRank& calling, const ffi::RemainingArgs& args,
                 const ffi::RemainingRets& results) {
  const DispatchOptions& options = state.options;
  DispatchCall call;
  Status status = ReadAttributes(direction, options, &call);
  if (status.ok()) status = ReadOperands(options, args, results, /*num_held=*/1, &call);
  if (!status.ok()) return Failed(status);  // the same on every rank: they are part of the program

  Exchange exchange;
  exchange.op = call.op;
  exchange.num_ranks = call.num_ranks;
  exchange.deadline = call.deadline;
  exchange.reader = [direction = call.direction,
                     num_ranks = call.num_ranks](std::string_view bytes) {
    return ReadDispatchContribution(direction, num_ranks, bytes);
  };
  Transport* transport = nullptr;
  status = state.site.Describe(calling, &exchange, &transport);
  if (!status.ok()) return Failed(status);
  MessageNames names{options.capacity_names, exchange.processes};
  exchange.planner = [is_dispatch = call.is_dispatch(), op = call.op, names = std::move(names)](
                         const auto& ranks, WorkList* work) {
    return is_dispatch ? PlanDispatch(op, ranks, work, names) : PlanCombine(op, ranks, work, names);
  };

  auto promise = std::make_shared<ffi::Promise>();
  ffi::Future future(*promise);
  auto use = std::make_unique<BufferUse>();
  for (size_t p = 0; p < call.groups.size() && status.ok(); ++p) {
    OperandGroup& group = call.groups[p];
    // A rank out of range must not index the metadata; the transport rejects it.
    group.Select(std::clamp(calling.rank, 0, call.num_ranks - 1));
    for (const RowArray& array : call.is_dispatch() ? group.buffers : group.tokens) {
      PreferHugePages(array.data, array.num_bytes());
    }
    if (options.buffer[p] != 0) status = use->Acquire(options.buffer[p], exchange.op);
  }
  if (!status.ok()) {
    use.reset();
    transport->Refuse(exchange, status, CompleteWith(std::move(promise), nullptr));
    return future;
  }
  auto mine = std::make_unique<DispatchContribution>();
  mine->direction = call.direction;
  mine->num_ranks = call.num_ranks;
  mine->groups = std::move(call.groups);
  // Read only once: the answer comes from a file.
  static const int num_helpers =
      std::max(1, static_cast<int>(std::thread::hardware_concurrency()) - 1);
  transport->Join(exchange, calling.rank, std::move(mine),
                  CompleteWith(std::move(promise), std::move(use)), num_helpers,
                  [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); });
  return future;
}

template <Direction kDirection>
ffi::Future MoveIn(ffi::ThreadPool pool, const DispatchState* state, ffi::RunId run_id,
                   ffi::BufferR0<ffi::S32> rank, ffi::BufferR0<ffi::S32> group,
                   ffi::RemainingArgs args, ffi::RemainingRets results) {
  try {
    const CallingRank calling{run_id.run_id, *rank.typed_data(), *group.typed_data()};
    return Move(kDirection, *state, pool, calling, args, results);
  } catch (const std::exception& error) {  // no memory or no thread: this rank never arrives
    return Failed(Status::Internal("jax_cp_dispatch: ", error.what()));
  }
}

auto Binding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Ctx<ffi::State<DispatchState>>()
      .Ctx<ffi::RunId>()               // the same on all ranks of one execution
      .Arg<ffi::BufferR0<ffi::S32>>()  // rank: place on the axis
      .Arg<ffi::BufferR0<ffi::S32>>()  // group: place on the other axes of the mesh
      .RemainingArgs()                 // metadata and arrays; see ReadOperands
      .RemainingRets();
}

}  // namespace

std::vector<Target> DispatchTargets() {
  return {{"jax_cp_dispatch.dispatch", Instantiate<DispatchState>,
           Handle<MoveIn<Direction::kDispatch>, Binding>},
          {"jax_cp_dispatch.combine", Instantiate<DispatchState>,
           Handle<MoveIn<Direction::kCombine>, Binding>}};
}

}  // namespace cpd
