#include <nanobind/nanobind.h>

// The build writes this file, which lists the folders with bindings.cpp.
#include "bindings_list.h"

namespace mmfree {

#define MMFREE_DECLARE(folder) void bind_##folder(nanobind::module_&);
MMFREE_BINDINGS(MMFREE_DECLARE)
#undef MMFREE_DECLARE

}  // namespace mmfree

NB_MODULE(_ext, m) {
  m.doc() = "CPU kernels of mlx_mmfree.";
#define MMFREE_BIND(folder) mmfree::bind_##folder(m);
  MMFREE_BINDINGS(MMFREE_BIND)
#undef MMFREE_BIND
}
