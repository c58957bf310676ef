#include <nanobind/nanobind.h>

#include "mlx/compile.h"
#include "runtime/thread_pool.h"

namespace mmfree {

namespace nb = nanobind;
using namespace nb::literals;

void bind_runtime(nb::module_& m) {
  m.def(
      "set_fusion",
      [](bool is_on) {
        mlx::core::set_compile_mode(is_on ? mlx::core::CompileMode::enabled
                                          : mlx::core::CompileMode::no_fuse);
      },
      "on"_a, "Sets whether mx.compile fuses operations. It must be enabled.");

  m.def("set_threads", &set_threads, "count"_a,
        "Sets the number of threads that compute, the calling one included.");

  m.def("threads", &threads, "Returns the number of threads that compute.");
}

}  // namespace mmfree
