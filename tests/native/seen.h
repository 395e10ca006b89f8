// Memory that kernels access: that of the host, or what the test on a GPU passes.
#pragma once

#include <vector>

namespace cpd::kernels {

#ifdef CPD_TEST_ALLOCATOR
template <typename T>
using Seen = std::vector<T, CPD_TEST_ALLOCATOR<T>>;
#else
template <typename T>
using Seen = std::vector<T>;
#endif

}  // namespace cpd::kernels
