// XLA FFI handlers of dispatch and combine on the CPU transports.
#include "dispatch/dispatch.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/common.h"
#include "ffi/targets.h"
#include "transport/buffers.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace cpd {
namespace {

// `limit` of the rows exist for the plan: an array without rows comes padded by one.
RowArray ToRows(const ffi::AnyBuffer& buffer, int64_t limit) {
  const auto dims = buffer.dimensions();
  int64_t row_bytes = static_cast<int64_t>(ffi::ByteWidth(buffer.element_type()));
  for (size_t i = 1; i < dims.size(); ++i) row_bytes *= dims[i];
  return {static_cast<char*>(buffer.untyped_data()), std::min(dims[0], limit), row_bytes};
}

using Counts = ffi::Span<const int64_t>;

// Attributes that are known when the program is made; those with an entry per part are spans.
struct Options {
  std::string_view axis;  // for messages
  int64_t num_ranks;
  int64_t deadline_ms;
  Counts has_src_offset;  // per part: whether the metadata ends with src_offset
  Counts num_arrays;      // per part: arrays that move
  Counts num_tokens;      // per part: rows in the owner's layout
  Counts capacity;        // per part: rows of the receive buffer
  Counts buffer;          // per part: id of the registered buffer whose limits hold, or 0
};

// Reads the operands one after another: the metadata of all parts, then the arrays of all parts.
class Reader {
 public:
  Reader(ffi::RemainingArgs args, ffi::RemainingRets results, int64_t rank, int64_t num_ranks)
      : args_(args), results_(results), rank_(rank), num_ranks_(num_ranks) {}

  // This rank's view of a field with `per_rank` elements a rank (-1: tells how many there are).
  // Fields come as one view, or as the views of all ranks.
  IntArray Field(int64_t* per_rank) {
    const auto buffer = args_.get<ffi::AnyBuffer>(next_arg_++);
    const auto type = buffer.has_value() ? ToIntType(buffer->element_type()) : std::nullopt;
    if (!type) {
      ok_ = false;
      return {};
    }
    const auto count = static_cast<int64_t>(buffer->element_count());
    if (*per_rank < 0) *per_rank = count / num_views_;
    ok_ = ok_ && count == *per_rank * num_views_;
    const IntArray all{buffer->untyped_data(), *type};
    return num_views_ == 1 ? all : all.From(rank_ * *per_rank);
  }

  void Metadata(bool has_src_offset, DispatchPart* part) {
    // num_recv comes first: W + 1 counts a view tell how many views there are.
    const auto counts = args_.get<ffi::AnyBuffer>(next_arg_);
    num_views_ =
        counts.has_value() && static_cast<int64_t>(counts->element_count()) > num_ranks_ + 1
            ? num_ranks_
            : 1;
    int64_t num_counts = num_ranks_ + 1;
    part->num_recv = Field(&num_counts);
    part->num_slots = -1;
    part->seq_len = Field(&part->num_slots);
    int64_t num_targets = -1;
    part->dst_rank = Field(&num_targets);
    part->dst_offset = Field(&num_targets);
    if (has_src_offset) part->src_offset = Field(&part->num_slots);
    part->num_replicas = part->num_slots > 0 ? num_targets / part->num_slots : 1;
    ok_ = ok_ && part->num_slots * part->num_replicas == num_targets;
  }

  void Arrays(Direction direction, int64_t num_arrays, int64_t num_tokens, int64_t capacity,
              DispatchPart* part) {
    const bool is_dispatch = direction == Direction::kDispatch;
    for (int64_t i = 0; i < num_arrays; ++i) {
      const auto arg = args_.get<ffi::AnyBuffer>(next_arg_++);
      auto result = results_.get<ffi::AnyBuffer>(next_result_++);
      if (!arg.has_value() || !result.has_value()) {
        ok_ = false;
        return;
      }
      const ffi::AnyBuffer out = **result;
      PreferHugePages(out);
      part->tokens.push_back(ToRows(is_dispatch ? *arg : out, num_tokens));
      part->buffers.push_back(ToRows(is_dispatch ? out : *arg, capacity));
      part->types.push_back({ToDataType(arg->element_type()), ToDataType(out.element_type())});
    }
  }

  bool ok() const { return ok_; }

 private:
  ffi::RemainingArgs args_;
  ffi::RemainingRets results_;
  int64_t rank_;
  int64_t num_ranks_;
  int64_t num_views_ = 1;
  size_t next_arg_ = 0;
  size_t next_result_ = 0;
  bool ok_ = true;
};

// The registered buffers that one rank uses in one exchange; released when the last copy is gone.
class BufferUse {
 public:
  BufferUse() = default;
  BufferUse(const BufferUse&) = delete;
  BufferUse& operator=(const BufferUse&) = delete;
  ~BufferUse() {
    for (const int64_t id : ids_) BufferRegistry::Get().Release(id);
  }

  Status Acquire(int64_t id, const Exchange& exchange, const DispatchPart& part) {
    int64_t row_bytes = 0, num_rows = 0;
    for (const RowArray& array : part.buffers) {
      row_bytes += array.row_bytes;
      num_rows = array.num_rows;
    }
    ids_.reserve(ids_.size() + 1);
    Status status =
        BufferRegistry::Get().Acquire(id, exchange.op, exchange.key.group, num_rows, row_bytes);
    if (status.ok()) ids_.push_back(id);
    return status;
  }

 private:
  std::vector<int64_t> ids_;
};

ffi::Future Move(Direction direction, ffi::ThreadPool pool, CallSite* site, ffi::RunId run_id,
                 int rank, int64_t group, ffi::RemainingArgs args, ffi::RemainingRets results,
                 const Options& options) {
  const bool is_dispatch = direction == Direction::kDispatch;
  Exchange exchange;
  exchange.op = std::string(is_dispatch ? "dispatch" : "combine") + " over axis '" +
                std::string(options.axis) + "'";
  exchange.num_ranks = static_cast<int>(options.num_ranks);
  exchange.deadline = std::chrono::milliseconds(options.deadline_ms);
  exchange.planner = [is_dispatch, op = exchange.op](const auto& ranks, WorkList* work) {
    return is_dispatch ? PlanDispatch(op, ranks, work) : PlanCombine(op, ranks, work);
  };

  exchange.reader = [direction, num_ranks = exchange.num_ranks](std::string_view bytes) {
    return ReadDispatchContribution(direction, num_ranks, bytes);
  };
  if (const Status status = site->Describe(run_id.run_id, group, &exchange); !status.ok()) {
    return Failed(status);
  }
  Transport& transport = TransportFor(exchange);

  auto mine = std::make_unique<DispatchContribution>();
  mine->direction = direction;
  mine->num_ranks = exchange.num_ranks;
  mine->parts.resize(options.num_arrays.size());
  // A rank out of range must not index the metadata; the transport refuses it.
  Reader reader(args, results, std::clamp<int64_t>(rank, 0, options.num_ranks - 1),
                options.num_ranks);
  for (size_t p = 0; p < mine->parts.size(); ++p) {
    reader.Metadata(options.has_src_offset[p] != 0, &mine->parts[p]);
  }
  for (size_t p = 0; p < mine->parts.size(); ++p) {
    reader.Arrays(direction, options.num_arrays[p], options.num_tokens[p], options.capacity[p],
                  &mine->parts[p]);
  }
  if (!reader.ok()) {  // the same on every rank: shapes are part of the program
    return Failed(Status::Invalid(exchange.op +
                                  ": the operands are not those of this version's primitives. Call "
                                  "it through jax_cp_dispatch."));
  }

  auto promise = std::make_shared<ffi::Promise>();
  ffi::Future future(*promise);
  auto use = std::make_unique<BufferUse>();
  Status usable;
  for (size_t p = 0; p < mine->parts.size() && usable.ok(); ++p) {
    if (options.buffer[p] != 0) {
      usable = use->Acquire(options.buffer[p], exchange, mine->parts[p]);
    }
  }
  if (!usable.ok()) {
    use.reset();
    transport.Refuse(exchange, usable, CompleteWith(std::move(promise), nullptr));
    return future;
  }
  // Asked once: the answer is read from a file each time.
  static const int num_helpers =
      std::max(1, static_cast<int>(std::thread::hardware_concurrency()) - 1);
  transport.Join(exchange, rank, std::move(mine), CompleteWith(std::move(promise), std::move(use)),
                 num_helpers,
                 [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); });
  return future;
}

template <Direction kDirection>
ffi::Future MoveIn(ffi::ThreadPool pool, CallSite* site, ffi::RunId run_id,
                   ffi::BufferR0<ffi::S32> rank, ffi::BufferR0<ffi::S32> group,
                   ffi::RemainingArgs args, ffi::RemainingRets results, std::string_view axis,
                   std::string_view, Counts, int64_t num_ranks, int64_t deadline_ms,
                   Counts has_src_offset, Counts num_arrays, Counts num_tokens, Counts capacity,
                   Counts buffer) {
  try {
    const Options options{axis,       num_ranks,  deadline_ms, has_src_offset,
                          num_arrays, num_tokens, capacity,    buffer};
    return Move(kDirection, pool, site, run_id, *rank.typed_data(), *group.typed_data(), args,
                results, options);
  } catch (const std::exception& error) {  // no memory or no thread: this rank did not arrive
    return Failed({StatusCode::kInternal, std::string("jax_cp_dispatch: ") + error.what()});
  }
}

auto Binding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Ctx<ffi::State<CallSite>>()
      .Ctx<ffi::RunId>()               // the same on all ranks of one execution
      .Arg<ffi::BufferR0<ffi::S32>>()  // rank: place on the axis
      .Arg<ffi::BufferR0<ffi::S32>>()  // group: place on the other axes of the mesh
      .RemainingArgs()                 // per part, each as one view [...] or all [W, ...]:
                                       //   num_recv [W + 1], seq_len [S], dst_rank [S(, C)],
                                       //   dst_offset [S(, C)], src_offset [S] if there is one
                                       // then per part its arrays:
                                       //   dispatch: x... [T, feature...]
                                       //   combine:  y... [capacity, feature...]
                                       // then for dispatch, maybe, storage to reuse
      .RemainingRets()                 // dispatch: [capacity, feature...], combine: [T, feature...]
      .Attr<std::string_view>("axis")
      .Attr<std::string_view>("signature")  // this one and the next are the call site's
      .Attr<Counts>("processes")
      .Attr<int64_t>("num_ranks")
      .Attr<int64_t>("deadline_ms")
      .Attr<Counts>("has_src_offset")
      .Attr<Counts>("num_arrays")
      .Attr<Counts>("num_tokens")
      .Attr<Counts>("capacity")
      .Attr<Counts>("buffer");
}

XLA_FFI_DEFINE_HANDLER(DispatchHandler, MoveIn<Direction::kDispatch>, Binding());
XLA_FFI_DEFINE_HANDLER(CombineHandler, MoveIn<Direction::kCombine>, Binding());

}  // namespace

std::vector<Target> DispatchTargets() {
  return {{"jax_cp_dispatch.dispatch", DispatchHandler},
          {"jax_cp_dispatch.combine", CombineHandler}};
}

}  // namespace cpd
