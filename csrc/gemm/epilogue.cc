// Epilogues, applied to the sums of a product before they are stored: bias, GELU, its derivative.
#include "gemm/epilogue.h"

#include <cmath>
#include <initializer_list>
#include <type_traits>

namespace cpd {
namespace {

// Minimax quotient of polynomials on the range where tanh is not yet 1 in float32. Unlike
// std::tanh, a loop over it is vectorized.
inline float Tanh(float x) {
  constexpr float kIsOne = 7.90531110763549805f;
  const float z = x * x;
  float above = -2.76076847742355e-16f;
  for (const float a : {2.00018790482477e-13f, -8.60467152213735e-11f, 5.12229709037114e-08f,
                        1.48572235717979e-05f, 6.37261928875436e-04f, 4.89352455891786e-03f}) {
    above = above * z + a;
  }
  float below = 1.19825839466702e-06f;
  for (const float b : {1.18534705686654e-04f, 2.26843463243900e-03f, 4.89352518554385e-03f}) {
    below = below * z + b;
  }
  return std::abs(x) < kIsOne ? x * above / below : std::copysign(1.0f, x);
}

inline double Tanh(double x) { return std::tanh(x); }

constexpr double kSqrtTwoOverPi = 0.79788456080286535588, kCubic = 0.044715;

template <typename T>
T Gelu(T x) {
  const T u = T(kSqrtTwoOverPi) * (x + T(kCubic) * x * x * x);
  return T(0.5) * x * (1 + Tanh(u));
}

template <typename T>
T GeluDerivative(T x) {
  const T u = T(kSqrtTwoOverPi) * (x + T(kCubic) * x * x * x);
  const T slope = T(kSqrtTwoOverPi) * (1 + T(3 * kCubic) * x * x);
  const T tanh = Tanh(u);
  // For large arguments the second term is 0 times infinity.
  const T bend = (1 - tanh * tanh) * slope;
  return T(0.5) * (1 + tanh) + T(0.5) * x * (tanh * tanh < 1 ? bend : 0);
}

template <typename Out, typename Wide>
Out As(Wide value) {
  if constexpr (std::is_arithmetic_v<Out>) {
    return static_cast<Out>(value);
  } else {
    return Out::Round(static_cast<float>(value));
  }
}

template <typename Out, typename Wide>
void Store(const Wide* sums, const Epilogue& epilogue, int64_t n, Out* to) {
  const auto* bias = reinterpret_cast<const Out*>(epilogue.bias);
  const auto* gelu_input = reinterpret_cast<const Out*>(epilogue.gelu_input);
  auto* pre_gelu = reinterpret_cast<Out*>(epilogue.pre_gelu);
  const auto z = [=](int64_t j) { return bias ? sums[j] + static_cast<Wide>(bias[j]) : sums[j]; };
  if (!epilogue.gelu) {
    for (int64_t j = 0; j < n; ++j) to[j] = As<Out>(z(j));
  } else if (gelu_input) {
    for (int64_t j = 0; j < n; ++j) {
      to[j] = As<Out>(z(j) * GeluDerivative(static_cast<Wide>(gelu_input[j])));
    }
  } else {
    for (int64_t j = 0; j < n; ++j) {
      const Wide value = z(j);
      if (pre_gelu) pre_gelu[j] = As<Out>(value);
      to[j] = As<Out>(Gelu(value));
    }
  }
}

template <typename Wide>
void StoreAs(DataType type, const Wide* sums, const Epilogue& epilogue, int64_t n, char* to) {
  switch (type) {
    case DataType::kBF16:
      return Store(sums, epilogue, n, reinterpret_cast<BF16*>(to));
    case DataType::kF16:
      return Store(sums, epilogue, n, reinterpret_cast<F16*>(to));
    case DataType::kF32:
      return Store(sums, epilogue, n, reinterpret_cast<float*>(to));
    default:
      return Store(sums, epilogue, n, reinterpret_cast<double*>(to));
  }
}

}  // namespace

Epilogue Epilogue::From(int64_t element, int64_t column, DataType type) const {
  const int64_t bytes = ElementBytes(type);
  Epilogue rest = *this;
  if (bias) rest.bias += column * bytes;
  if (pre_gelu) rest.pre_gelu += element * bytes;
  if (gelu_input) rest.gelu_input += element * bytes;
  return rest;
}

void StoreRow(DataType type, const float* sums, const Epilogue& epilogue, int64_t n, char* to) {
  StoreAs(type, sums, epilogue, n, to);
}

void StoreRow(DataType type, const double* sums, const Epilogue& epilogue, int64_t n, char* to) {
  StoreAs(type, sums, epilogue, n, to);
}

}  // namespace cpd
