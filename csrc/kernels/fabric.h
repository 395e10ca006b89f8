// How the ranks of a call reach each other: a parameter of its kernels.
//
// A network has, besides `kHasNetwork`, for memory at this rank's own addresses and rank `pe`:
//   Put(block, to, from, bytes, pe)   a block copies to the peer; done when it is quiet
//   Get(block, to, from, bytes, pe)   the same from the peer
//   Quiet()                           waits until all puts and gets of this process are done
//   PutSignal(to, from, bytes, signal, value, pe)   a put, and a signal that is not seen before it
//   SetSignal(signal, value, pe)
//   Observe(signal, value)            a signal has been seen here: makes visible what came before
// The last four are called by one thread. `from` of a put and `to` of a get are in the channel too.
#pragma once

#include "kernels/block.h"
#include "kernels/call.h"

namespace cpd::kernels {

// All ranks map each other's memory.
struct Mapped {
  static constexpr bool kHasNetwork = false;
};

// Whether a rank is reached over the network.
template <typename Fabric>
CPD_DEVICE bool IsRemote(const Call& call, int64_t rank) {
  if constexpr (Fabric::kHasNetwork) {
    return call.pe[rank] >= 0;
  } else {
    return false;
  }
}

}  // namespace cpd::kernels
