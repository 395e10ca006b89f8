// Hints to the system about the memory that an exchange is about to write.
#include "dispatch/pages.h"

#include <sys/mman.h>

namespace cpd {

void AdviseHugePages(void* data, int64_t num_bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHugePage = 2 << 20;
  if (num_bytes < static_cast<int64_t>(2 * kHugePage)) return;
  // Only whole pages: what shares the first or the last one belongs to somebody else.
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (address + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (address + static_cast<uintptr_t>(num_bytes)) / kHugePage * kHugePage;
  // A hint: where the system has no such pages the copy is as right, and slower.
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data, (void)num_bytes;
#endif
}

}  // namespace cpd
