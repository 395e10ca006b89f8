// Copies of an exchange that moves more bytes than caches hold.
#pragma once

#include <cstdint>

namespace cpd {

// More bytes in one exchange than the caches of most processors hold.
constexpr int64_t kManyBytes = 32 << 20;

// As memcpy, with stores that do not first read into the cache what they overwrite; memcpy avoids
// that only in a single large copy. Complete, for other threads too, on return. Fetches as many
// bytes from `next`, the source of the following copy, into the cache; they need not exist.
void StreamCopy(char* to, const char* from, int64_t num_bytes, const char* next);

}  // namespace cpd
