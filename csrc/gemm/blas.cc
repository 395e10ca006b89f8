// Matrix products by the BLAS of SciPy (a dependency of JAX), on the calling thread alone.
#include "gemm/blas.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <vector>

namespace cpd {
namespace {

template <typename T>
using Gemm = void (*)(const char* transa, const char* transb, const int* m, const int* n,
                      const int* k, const T* alpha, const T* a, const int* lda, const T* b,
                      const int* ldb, const T* beta, T* c, const int* ldc);

std::atomic<Gemm<float>> sgemm_routine{nullptr};
std::atomic<Gemm<double>> dgemm_routine{nullptr};

// OpenBLAS has working memory for about a hundred concurrent calls; more abort the process.
class Turn {
 public:
  Turn() {
    std::unique_lock<std::mutex> lock(mutex());
    changed().wait(lock, [] { return num_running() < kMost; });
    ++num_running();
  }
  ~Turn() {
    {
      std::lock_guard<std::mutex> lock(mutex());
      --num_running();
    }
    changed().notify_one();
  }

 private:
  static constexpr int kMost = 48;
  static int& num_running() {
    static int count = 0;
    return count;
  }
  // Never destroyed: schedules may end during exit().
  static std::mutex& mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }
  static std::condition_variable& changed() {
    static auto* changed = new std::condition_variable;
    return *changed;
  }
};

// Fortran's column-major product of the transposes: C' = B' A'.
template <typename T>
void Call(Gemm<T> gemm, const Product<T>& p) {
  const char transa = p.b_transposed ? 'T' : 'N', transb = p.a_transposed ? 'T' : 'N';
  const int m = static_cast<int>(p.n), n = static_cast<int>(p.m), k = static_cast<int>(p.k);
  const int lda = static_cast<int>(p.ldb), ldb = static_cast<int>(p.lda);
  const int ldc = static_cast<int>(p.ldc);
  const T one = 1;
  const Turn turn;
  gemm(&transa, &transb, &m, &n, &k, &one, p.b, &lda, p.a, &ldb, &p.beta, p.c, &ldc);
}

std::vector<std::string> LoadedLibraries() {
  std::vector<std::string> paths;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* paths) {
        static_cast<std::vector<std::string>*>(paths)->push_back(info->dlpi_name);
        return 0;
      },
      &paths);
  return paths;
}

struct Names {  // in an OpenBLAS with 32-bit integers
  const char *sgemm, *dgemm, *get_num_threads, *set_num_threads;
};
constexpr Names kScipy{"scipy_sgemm_", "scipy_dgemm_", "scipy_openblas_get_num_threads",
                       "scipy_openblas_set_num_threads"};
constexpr Names kPlain{"sgemm_", "dgemm_", "openblas_get_num_threads", "openblas_set_num_threads"};

struct Library {
  std::string path;
  Names names;
};

std::optional<Library> FindOpenBlas() {
  for (const std::string& path : LoadedLibraries()) {
    if (path.substr(path.rfind('/') + 1).find("openblas") == std::string::npos) continue;
    void* handle = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    if (handle == nullptr) continue;
    for (const Names& names : {kScipy, kPlain}) {
      if (dlsym(handle, names.sgemm) && dlsym(handle, names.get_num_threads)) {
        dlclose(handle);
        return Library{path, names};
      }
    }
    dlclose(handle);
  }
  return std::nullopt;
}

// A new file: the loader does not load a second library with the same inode.
int CopyToMemory(const std::string& path) {
  const int from = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (from < 0) return -1;
  struct stat info{};
  int to = -1;
  if (fstat(from, &info) == 0) to = memfd_create("blas", MFD_CLOEXEC);
  for (off_t left = info.st_size; to >= 0 && left > 0;) {
    const ssize_t copied = sendfile(to, from, nullptr, left);
    if (copied <= 0) {
      close(to);
      to = -1;
    } else {
      left -= copied;
    }
  }
  close(from);
  return to;
}

bool UseCopyOf(const Library& library) {
  const int file = CopyToMemory(library.path);
  if (file < 0) return false;
  void* handle = dlopen(("/proc/self/fd/" + std::to_string(file)).c_str(), RTLD_NOW | RTLD_LOCAL);
  close(file);
  if (handle == nullptr) return false;
  const auto set_num_threads =
      reinterpret_cast<void (*)(int)>(dlsym(handle, library.names.set_num_threads));
  const auto num_threads =
      reinterpret_cast<int (*)()>(dlsym(handle, library.names.get_num_threads));
  if (set_num_threads != nullptr) set_num_threads(1);  // its own threads are idle from now on
  const auto sgemm = reinterpret_cast<Gemm<float>>(dlsym(handle, library.names.sgemm));
  const auto dgemm = reinterpret_cast<Gemm<double>>(dlsym(handle, library.names.dgemm));
  if (num_threads == nullptr || num_threads() != 1 || sgemm == nullptr || dgemm == nullptr) {
    dlclose(handle);
    return false;
  }
  sgemm_routine = sgemm;
  dgemm_routine = dgemm;
  return true;
}

}  // namespace

void Multiply(const Product<float>& product) { Call<float>(sgemm_routine, product); }
void Multiply(const Product<double>& product) { Call<double>(dgemm_routine, product); }

std::string LoadBlas(void* sgemm, void* dgemm) {
  static std::mutex mutex;
  static std::string path;
  std::lock_guard<std::mutex> lock(mutex);
  if (BlasIsLoaded()) return path;
  if (const auto library = FindOpenBlas(); library && UseCopyOf(*library)) {
    path = library->path;
  } else {
    dgemm_routine = reinterpret_cast<Gemm<double>>(dgemm);
    sgemm_routine = reinterpret_cast<Gemm<float>>(sgemm);
  }
  return path;
}

bool BlasIsLoaded() { return sgemm_routine != nullptr && dgemm_routine != nullptr; }

}  // namespace cpd
