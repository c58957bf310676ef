#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include "mlx/compile.h"
#include "runtime/operation_times.h"
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

  m.def(
      "operation_times",
      [](bool is_on) {
        std::map<std::string, std::tuple<size_t, double, double>> found;
        for (const auto& [name, time] : operation_times(is_on)) {
          found.emplace(name, std::tuple(time.runs, time.seconds, time.waited));
        }
        return found;
      },
      "on"_a,
      R"(Returns how long the operations of this library took since the last call.

        Args:
            on: Whether times are measured from now on.

        Returns:
            For each operation its runs, their seconds, and the seconds that its threads waited for
            each other, all of them together.)");
}

}  // namespace mmfree
