#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include "blas/shared_gemm.h"

namespace mmfree {

namespace nb = nanobind;
using namespace nb::literals;

void bind_blas(nb::module_& m) {
  m.def(
      "share_products",
      [](uintptr_t sgemm, uintptr_t dgemm) {
        set_gemm(reinterpret_cast<Gemm<float>>(sgemm));
        set_gemm(reinterpret_cast<Gemm<double>>(dgemm));
        return std::pair(reinterpret_cast<uintptr_t>(&shared_gemm<float>),
                         reinterpret_cast<uintptr_t>(&shared_gemm<double>));
      },
      "sgemm"_a, "dgemm"_a,
      R"(Takes the addresses of cblas_sgemm and cblas_dgemm of a BLAS library that computes with one
        thread. Returns those of functions that share its products out over the threads.)");
}

}  // namespace mmfree
