// What a CPU handler has of its program: the place where its ranks meet, and its attributes.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ffi/common.h"
#include "transport/transport.h"
#include "xla/ffi/api/ffi.h"

namespace cpd {

// ---- Where a custom call is in its program: there its ranks meet.

// The rank that runs a call.
struct CallingRank {
  int64_t run_id;  // the same on all ranks of one execution
  int rank;        // its place on the axis
  int64_t group;   // its place on the other axes of the mesh
};

// Part of the state that XLA keeps per custom call of a program. An id chosen at lowering would not
// be unique: lowerings are cached, so two calls can share one.
class CallSite {
 public:
  // Reads its attributes. Each call of this is a new site.
  void Read(AttributeReader* attributes, int64_t num_ranks);

  // Sets the key and the processes of the ranks in `exchange`, whose `num_ranks` is known, and the
  // transport that the program names.
  Status Describe(const CallingRank& calling, Exchange* exchange, Transport** transport) const;

 private:
  // Unique in this process. For a program that spans processes: unique in the program and equal in
  // all processes, from the signature and the number among equal signatures.
  int64_t uid_ = 0;
  std::string transport_;                    // name of an implementation: Python has chosen it
  std::string signature_;                    // operation, shapes and attributes
  std::vector<std::vector<int>> processes_;  // by group, then rank; empty: all ranks are here
};

// No program is being compiled any more: later call sites belong to another program.
void EndPrograms();

// ---- The state of a custom call: its attributes, read once per program.

// A state also has Read(AttributeReader*). It owns what it reads: XLA's attributes may not outlive
// the instantiate stage.
template <typename State>
xla::ffi::ErrorOr<std::unique_ptr<State>> MakeState(xla::ffi::Dictionary attributes) {
  try {
    AttributeReader reader(attributes);
    auto state = std::make_unique<State>();
    state->Read(&reader);
    if (const Status status = reader.Finish(); !status.ok()) {
      return xla::ffi::Unexpected(ToError(status));
    }
    return {std::move(state)};
  } catch (const std::exception& error) {
    return xla::ffi::Unexpected(ToError(Status::Internal("jax_cp_dispatch: ", error.what())));
  }
}

// ---- Calls between ranks: their handlers have the same operands.

// The state of a call between ranks: `Options` are its attributes, with a kTypeName.
template <typename Options>
struct RankCallState : CallState<RankCallState<Options>> {
  static constexpr const char* kTypeName = Options::kTypeName;
  Options options;
  CallSite site;

  void Read(AttributeReader* attributes) {
    ReadOptions(attributes, &options);
    site.Read(attributes, options.num_ranks);
  }
};

// The execute stage: kRun(state, calling rank, thread pool, arguments, results).
template <typename Options, auto kRun>
xla::ffi::Future RunOnRank(xla::ffi::ThreadPool pool, const RankCallState<Options>* state,
                           xla::ffi::RunId run_id, xla::ffi::BufferR0<xla::ffi::S32> rank,
                           xla::ffi::BufferR0<xla::ffi::S32> group, xla::ffi::RemainingArgs args,
                           xla::ffi::RemainingRets results) {
  try {
    const CallingRank calling{run_id.run_id, *rank.typed_data(), *group.typed_data()};
    return kRun(*state, calling, pool, args, results);
  } catch (const std::exception& error) {  // no memory or no thread: this rank never arrives
    return Failed(Status::Internal("jax_cp_dispatch: ", error.what()));
  }
}

template <typename Options>
auto BindRank() {
  using xla::ffi::BufferR0, xla::ffi::S32;
  return xla::ffi::Ffi::Bind()
      .Ctx<xla::ffi::ThreadPool>()
      .Ctx<xla::ffi::State<RankCallState<Options>>>()
      .template Ctx<xla::ffi::RunId>()  // the same on all ranks of one execution
      .template Arg<BufferR0<S32>>()    // rank: place on the axis
      .template Arg<BufferR0<S32>>()    // group: place on the other axes of the mesh
      .RemainingArgs()
      .RemainingRets();
}

template <typename Options, auto kRun>
Target RankTarget(const char* name) {
  using State = RankCallState<Options>;
  return {name, Handle<RunOnRank<Options, kRun>, BindRank<Options>>, nullptr,
          Instantiate<State, MakeState<State>>};
}

// ---- The handlers of the CPU module. The first stage makes the state; see CallState.

std::vector<Target> DispatchTargets();
std::vector<Target> GemmTargets();
std::vector<Target> GroupedGemmTargets();

}  // namespace cpd
