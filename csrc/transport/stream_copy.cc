// By non-temporal stores of x86; elsewhere by memcpy.
#include "transport/stream_copy.h"

#include <algorithm>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace cpd {
void StreamCopy(char* to, const char* from, int64_t num_bytes, const char* next) {
#ifdef __SSE2__
  constexpr int64_t kLine = 64;  // stored as a whole: half a line costs as much
  const int64_t to_line = -reinterpret_cast<intptr_t>(to) & (kLine - 1);
  int64_t at = std::min(to_line, num_bytes);
  std::memcpy(to, from, at);
  for (; at + kLine <= num_bytes; at += kLine) {
    _mm_prefetch(next + at, _MM_HINT_T0);
    __m128i line[kLine / sizeof(__m128i)];
    std::memcpy(line, from + at, kLine);
    auto* out = reinterpret_cast<__m128i*>(to + at);
    for (const __m128i& lanes : line) _mm_stream_si128(out++, lanes);
  }
  std::memcpy(to + at, from + at, num_bytes - at);
  _mm_sfence();
#else
  (void)next;
  std::memcpy(to, from, num_bytes);
#endif
}

}  // namespace cpd
