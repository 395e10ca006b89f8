// The transport between the virtual CPU devices of one process.
#pragma once

#include "transport/transport.h"

namespace cpd {

// The one transport of this process. Never destroyed: detached threads wait on its condition
// variables, and destroying one of those hangs exit().
Transport& InProcessTransport();

// Who is told of executions that failed here, other than through `Fail`.
using FailureListener =
    std::function<void(int64_t run_id, const Status&, std::chrono::milliseconds deadline)>;
void TellFailuresOfInProcess(FailureListener listener);

}  // namespace cpd
