// The kernels of a call in the order of csrc/cuda/call_kernels.h, for what stands for a GPU.
#pragma once

#include "kernels/exchange.h"
#include "kernels/plan.h"
#include "kernels/push.h"
#include "kernels/push_take.h"
#include "kernels/small.h"
#include "kernels/sum.h"
#include "kernels/unpack.h"

namespace cpd::kernels {

struct MoveScratch : PushTakeScratch {
  bool is_last;
};

// Launches the kernels of a call that is not small: `launch` runs one of them in one block of each
// rank, or in `many`, with scratch memory of the type to which it gets a null pointer. Calls `meet`
// after this device has signalled and before it waits.
template <typename Fabric, typename Launch, typename Meet>
void LaunchInOrder(const Call& call, int many, const Launch& launch, const Meet& meet) {
  constexpr bool kSignalsLast = !Fabric::kHasNetwork;
  int* none = nullptr;
  launch(1, static_cast<PlanScratch*>(nullptr), [](const Block& b, const Rank& rank, auto* s) {
    Prepare<Fabric>(b, rank, s);
    if (!kSignalsLast || rank.call.is_dispatch || !HoldsAllRanks(rank.call)) return;
    b.Sync();
    Signal(b, rank);
  });
  if (call.is_dispatch) {
    if constexpr (Fabric::kHasNetwork) {
      launch(many, none, [](const Block& b, const Rank& rank, int*) { StageToPut(b, rank); });
      launch(many, none, [](const Block& b, const Rank& rank, int*) { Put<Fabric>(b, rank); });
    }
    launch(many, static_cast<MoveScratch*>(nullptr), [](const Block& b, const Rank& rank, auto* s) {
      if (kSignalsLast && !HoldsAllRanks(rank.call)) return RunPushTake(b, rank, s);
      Push<Fabric>(b, rank, &s->push);
      if (kSignalsLast) SignalLast(b, rank, &s->is_last);
    });
  } else if (!HoldsAllRanks(call)) {
    launch(many, static_cast<bool*>(nullptr), [](const Block& b, const Rank& rank, bool* is_last) {
      Stage(b, rank);
      if (kSignalsLast) SignalLast(b, rank, is_last);
    });
  }
  if constexpr (Fabric::kHasNetwork) {
    launch(1, none, [](const Block& b, const Rank& rank, int*) {
      Fabric::Enter(rank.rank());
      Signal<Fabric>(b, rank);
    });
  }
  meet();
  launch(1, static_cast<MeetScratch*>(nullptr),
         [](const Block& b, const Rank& rank, auto* s) { Wait<Fabric>(b, rank, s); });
  if (call.is_dispatch) {
    return launch(many, static_cast<UnpackScratch*>(nullptr),
                  [](const Block& b, const Rank& rank, auto* s) { Unpack(b, rank, s); });
  }
  if constexpr (Fabric::kHasNetwork) {
    launch(many, none, [](const Block& b, const Rank& rank, int*) { Fetch<Fabric>(b, rank); });
    launch(1, none, [](const Block& b, const Rank& rank, int*) {
      if (b.thread != 0) return;
      Fabric::Enter(rank.rank());
      Fabric::Quiet();
    });
  }
  launch(many, static_cast<SumScratch*>(nullptr),
         [](const Block& b, const Rank& rank, auto* s) { Pull<Fabric>(b, rank, s); });
}

}  // namespace cpd::kernels
