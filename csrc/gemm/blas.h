// Matrix products by the BLAS of SciPy (a dependency of JAX), on the calling thread alone.
#pragma once

#include <cstdint>
#include <string>

namespace cpd {

// C [m, n] = A [m, k] B [k, n] + beta C, row-major; leading dimensions count elements. A transposed
// operand is stored as [k, m] or [n, k]. Dimensions fit 31 bits.
template <typename T>
struct Product {
  bool a_transposed;
  bool b_transposed;
  int64_t m, n, k;
  const T* a;
  int64_t lda;
  const T* b;
  int64_t ldb;
  T beta;
  T* c;
  int64_t ldc;
};

// Call LoadBlas first.
void Multiply(const Product<float>& product);
void Multiply(const Product<double>& product);

// Sets the routines; may be called again. `sgemm` and `dgemm` are the Fortran routines of the
// library that SciPy has loaded. If that is OpenBLAS, a second copy is loaded that runs each
// product on its calling thread: ranks compute on their own threads, and a product spread over more
// threads would wait for cores that other ranks need. The first library and its thread count do not
// change. Returns the file of the copy, or "" if the given routines are used.
std::string LoadBlas(void* sgemm, void* dgemm);

bool BlasIsLoaded();

}  // namespace cpd
