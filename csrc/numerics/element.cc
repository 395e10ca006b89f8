// Sizes of element types.
#include "numerics/element.h"

namespace cpd {

int64_t ElementBytes(DataType type) {
  switch (type) {
    case DataType::kE4M3:
    case DataType::kE5M2:
    case DataType::kI8:
    case DataType::kU8:
      return 1;
    case DataType::kBF16:
    case DataType::kF16:
    case DataType::kI16:
    case DataType::kU16:
      return 2;
    case DataType::kF32:
    case DataType::kI32:
    case DataType::kU32:
      return 4;
    case DataType::kF64:
    case DataType::kI64:
    case DataType::kU64:
      return 8;
    case DataType::kOther:
      return 0;
  }
  return 0;
}

}  // namespace cpd
