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

template <Direction kDirection>
ffi::Future Move(const RankCallState<DispatchOptions>& state, const CallingRank& calling,
                 ffi::ThreadPool pool, const ffi::RemainingArgs& args,
                 const ffi::RemainingRets& results) {
  const DispatchOptions& options = state.options;
  DispatchCall call;
  Status status = ReadAttributes(kDirection, options, &call);
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
  // The registered buffers that this rank uses; released on destruction.
  auto uses = std::make_shared<std::vector<std::shared_ptr<void>>>();
  uses->reserve(call.groups.size());
  for (size_t p = 0; p < call.groups.size() && status.ok(); ++p) {
    OperandGroup& group = call.groups[p];
    // A rank out of range must not index the metadata; the transport rejects it.
    group.Select(std::clamp(calling.rank, 0, call.num_ranks - 1));
    for (const RowArray& array : call.is_dispatch() ? group.buffers : group.tokens) {
      PreferHugePages(array.data, array.num_bytes());
    }
    const int64_t id = options.buffer[p];
    if (id == 0) continue;
    status = DispatchBuffers::Get().Acquire(id, exchange.op);
    if (status.ok()) {
      uses->emplace_back(nullptr, [id](void*) { DispatchBuffers::Get().Release(id); });
    }
  }
  if (!status.ok()) {
    uses.reset();
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
                  CompleteWith(std::move(promise), std::move(uses)), num_helpers,
                  [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); });
  return future;
}

}  // namespace

std::vector<Target> DispatchTargets() {
  return {RankTarget<DispatchOptions, Move<Direction::kDispatch>>("jax_cp_dispatch.dispatch"),
          RankTarget<DispatchOptions, Move<Direction::kCombine>>("jax_cp_dispatch.combine")};
}

}  // namespace cpd
