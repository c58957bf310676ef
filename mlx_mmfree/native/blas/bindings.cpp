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
      R"(Shares the products of a BLAS library out over the threads of this extension.

        Args:
            sgemm: Address of a cblas_sgemm that computes with one thread.
            dgemm: Address of its cblas_dgemm.

        Returns:
            The addresses of two functions with these signatures that share their work out.)");
}

}  // namespace mmfree
