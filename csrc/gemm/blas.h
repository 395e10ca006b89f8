// The BLAS that comes with SciPy, and so with JAX: matrix products on the calling thread alone.
#pragma once

#include <cstdint>
#include <string>

namespace cpd {

// C [m, n] = A [m, k] B [k, n] + beta C, row-major; `lda` and so on are elements from row to row.
// A transposed operand lies in memory as [k, m] or [n, k]. Dimensions fit 31 bits.
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

// Needs LoadBlas before.
void Multiply(const Product<float>& product);
void Multiply(const Product<double>& product);

// Tells where the routines come from; may be called again. `sgemm` and `dgemm` are Fortran's, of
// the library that SciPy has loaded. If that is OpenBLAS, a copy of it is loaded beside it that
// runs each product on the thread that calls it: ranks compute on threads of their own, and one
// that hands out its work waits for cores that the others need. The first library and its thread
// count stay as they are. Returns the file of the library, or "" where the given routines are used.
std::string LoadBlas(void* sgemm, void* dgemm);

bool BlasIsLoaded();

}  // namespace cpd
