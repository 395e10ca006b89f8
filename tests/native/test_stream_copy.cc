// `StreamCopy` writes exactly the bytes it names, from and to every alignment.
#include <algorithm>
#include <random>
#include <vector>

#include "check.h"
#include "native_test.h"
#include "numerics/rows.h"

namespace cpd::test_stream_copy {

const Register kTests("test_stream_copy", [](const Numbers&) {
  constexpr int64_t kRoom = 512;
  constexpr char kPoison = 0x7f;
  std::mt19937 random(0);
  std::vector<char> from(kRoom), to(kRoom), want(kRoom);
  for (char& byte : from) byte = static_cast<char>(random());
  for (int64_t begin = 0; begin < 70; ++begin) {
    for (int64_t num_bytes = 0; num_bytes < 300; ++num_bytes) {
      const int64_t source = random() % 70;
      std::fill(to.begin(), to.end(), kPoison);
      std::fill(want.begin(), want.end(), kPoison);
      std::copy_n(from.begin() + source, num_bytes, want.begin() + begin);
      StreamCopy(to.data() + begin, from.data() + source, num_bytes, nullptr);
      CHECK(to == want);
    }
  }
});

}  // namespace cpd::test_stream_copy
