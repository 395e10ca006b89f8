// The transport between the virtual CPU devices of one process.
#pragma once

#include "transport/transport.h"

namespace cpd {

// The one transport of this process. Never destroyed: detached threads wait on its condition
// variables, and destroying one of those hangs exit().
Transport& InProcessTransport();

}  // namespace cpd
