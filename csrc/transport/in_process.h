// The transport between the virtual CPU devices of one process.
#pragma once

#include "transport/transport.h"

namespace cpd {

// The in-process transport. Never destroyed: detached threads wait on its condition variables, and
// destroying one of those hangs exit().
Transport& InProcessTransport();

// Called for executions that fail here, except through `Fail`.
using FailureListener =
    std::function<void(int64_t run_id, const Status&, std::chrono::milliseconds deadline)>;
void TellFailuresOfInProcess(FailureListener listener);

}  // namespace cpd
