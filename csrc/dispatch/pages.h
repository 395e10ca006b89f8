// Hints to the system about the memory that an exchange is about to write.
#pragma once

#include <cstdint>

namespace cpd {

// Asks for huge pages where there are none yet: a new receive buffer is faulted in page by page,
// which with small ones takes longer than the copy. Changes neither contents nor ownership; memory
// that is there already stays as it is, and small ranges are left alone.
void AdviseHugePages(void* data, int64_t num_bytes);

}  // namespace cpd
