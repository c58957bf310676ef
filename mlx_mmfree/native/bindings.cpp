#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "attention/attention.h"
#include "attention_step/attention_step.h"
#include "bit_linear/bit_linear.h"
#include "blas/shared_gemm.h"
#include "dense_matmul/dense_matmul.h"
#include "instruction_sets/kernels.h"
#include "linear_scan/linear_scan.h"
#include "mlgru_step/mlgru_step.h"
#include "mlx/compile.h"
#include "probe/probe.h"
#include "rms_norm_quantize/rms_norm_quantize.h"
#include "runtime/thread_pool.h"
#include "ternary_matmul/ternary_matmul.h"

namespace nb = nanobind;
using namespace nb::literals;

NB_MODULE(_ext, m) {
  m.doc() = "CPU kernels of mlx_mmfree.";

  m.def("linear_scan", &mmfree::linear_scan, "f"_a, "i"_a, "s0"_a,
        R"(s_t = f_t * s_{t-1} + i_t along the length, elementwise, in float32.

        Args:
            f: Forget factors, (B, L, D).
            i: Inputs, (B, L, D).
            s0: State before the first position, (B, D).

        Returns:
            All states (B, L, D) and the last one (B, D).)");

  m.def("ternary_matmul", &mmfree::ternary_matmul, "x"_a, "weight"_a, "codes"_a,
        R"(Product with packed trits, x T^T.

        Args:
            x: Activations, float32 (..., D).
            weight: Packed trits, uint32 (N, padded D / 16).
            codes: Whether x holds whole numbers in [-128, 127] only. A row that does not gives NaN.

        Returns:
            Sums, float32 (..., N).)");

  m.def("dense_matmul", &mmfree::dense_matmul, "x"_a, "weight"_a,
        R"(Product with a matrix of floats, x W^T.

        Args:
            x: Activations, float32 (..., D).
            weight: float32, float16 or bfloat16 (N, D).

        Returns:
            float32 (..., N).)");

  m.def("quantized_matmul", &mmfree::quantized_matmul, "x"_a, "weight"_a, "scales"_a, "biases"_a,
        "bits"_a,
        R"(Product with a matrix in MLX's affine form, x W^T. Activations are rounded to 16 bits.

        Args:
            x: Activations, float32 (..., D).
            weight: Codes of 2, 4, 6 or 8 bits, uint32 (N, D * bits / 32).
            scales: float32, float16 or bfloat16 (N, D / 32), (N, D / 64) or (N, D / 128).
            biases: As the scales.
            bits: Of each code.

        Returns:
            float32 (..., N).)");

  m.def("rms_norm_quantize", &mmfree::rms_norm_quantize, "x"_a, "weight"_a.none(), "eps"_a.none(),
        "half_away"_a,
        R"(8-bit codes of each row, after an RMSNorm if eps is given.

        Args:
            x: Activations, (..., D) of float32, float16 or bfloat16.
            weight: Scale of the norm, float32 (D,), or None.
            eps: Epsilon of the norm, or None for no norm.
            half_away: Whether ties go away from zero, else to even.

        Returns:
            Codes, float32 (..., D), and their scale, float32 (..., 1).)");

  m.def("bit_linear", &mmfree::bit_linear, "x"_a, "projections"_a, "eps"_a.none(), "half_away"_a,
        "codes"_a, "gate"_a, "norm"_a.none(), "norm_eps"_a.none(), "residual"_a.none(),
        R"(Ternary projections of one input, with gating, norms, quantisation, scales and residual.

        Args:
            x: Activations (..., D), or gate and up halves (..., 2D) with a gate; float32, float16 or
                bfloat16, as all floats here.
            projections: Packed trits uint32 (N, padded D / 16), scale float32 (1,) or (N,) and, with
                eps, the weight of a norm (D,), of each matrix.
            eps: Epsilon of the projections' norms, or None for no norms.
            half_away: Whether ties of codes go away from zero, else to even.
            codes: Whether the activations are quantised to 8 bits.
            gate: "silu", "relu2", "gelu" or "relu"; empty for none.
            norm: Weight of the norm before all projections, (D,), or None.
            norm_eps: Its epsilon, or None.
            residual: Added to the result, of its shape, or None.

        Returns:
            The results side by side, in the dtype of x.)");

  m.def("attention", &mmfree::attention, "queries"_a, "keys"_a, "values"_a, "mask"_a.none(),
        "is_causal"_a,
        R"(Softmax attention; H / G query heads share a key head.

        Args:
            queries: (B, H, L, K), any of the float types.
            keys: (B, G, N, K), any of the float types.
            values: (B, G, N, V), any of the float types.
            mask: What each query sees, booleans that broadcast to (B, 1, L, N), or None.
            is_causal: Whether query t sees the keys up to t + N - L; without a mask.

        Returns:
            (B, H, L, V) in the dtype of the queries.)");

  m.def("attention_step", &mmfree::attention_step, "projected"_a, "keys"_a, "values"_a,
        "positions"_a, "num_heads"_a, "wavelengths"_a.none(), "is_interleaved"_a,
        "query_norm"_a.none(), "key_norm"_a.none(), "norm_eps"_a, "window"_a, "sinks"_a,
        R"(One token's attention to the slots of a state, which takes its key and value.

        Args:
            projected: Query, key and value heads side by side, (B, 1, (H + 2G) K), any of the float
                types.
            keys: (B, G, C, K), any of the float types, with room for the token.
            values: As the keys.
            positions: Those of the slots in use, int32 (B, N); -1 where there is no token.
            num_heads: H.
            wavelengths: Positions per radian of each pair, float32 (K / 2,), or None.
            is_interleaved: Whether pairs are neighbours, else halves.
            query_norm: Weight of an RMSNorm of each query head, (K,), or None.
            key_norm: Of each key head, (K,), or None.
            norm_eps: Epsilon of both.
            window: Slots behind the sinks, or 0 for as many as there are tokens.
            sinks: Slots of the first tokens, which stay.

        Returns:
            The output (B, 1, H K) in the dtype of the projected heads, and the new keys, values and
            positions.)");

  m.def("mlgru_step", &mmfree::mlgru_step, "gates"_a, "state"_a, "weight"_a, "eps"_a,
        "lower_bound"_a.none(), "valid"_a.none(),
        R"(Gates, recurrence and gated output of MLGRU.

        Args:
            gates: Input, forget and output gates side by side, (B, L, 3E), any of the float types.
            state: (B, E) float32.
            weight: Scale of the norm of the output gate, (E,).
            eps: Epsilon of that norm.
            lower_bound: Of the forget gate, (E,), or None.
            valid: Booleans (B, L), or None.

        Returns:
            The output (B, L, E) in the dtype of the gates and the last state (B, E).)");

  m.def(
      "set_fusion",
      [](bool is_on) {
        mlx::core::set_compile_mode(is_on ? mlx::core::CompileMode::enabled
                                          : mlx::core::CompileMode::no_fuse);
      },
      "on"_a, "Whether mx.compile, which must be enabled, fuses operations.");

  m.def(
      "share_products",
      [](uintptr_t sgemm, uintptr_t dgemm) {
        mmfree::set_gemm(reinterpret_cast<mmfree::Gemm<float>>(sgemm));
        mmfree::set_gemm(reinterpret_cast<mmfree::Gemm<double>>(dgemm));
        return std::pair(reinterpret_cast<uintptr_t>(&mmfree::shared_gemm<float>),
                         reinterpret_cast<uintptr_t>(&mmfree::shared_gemm<double>));
      },
      "sgemm"_a, "dgemm"_a,
      R"(Takes the addresses of cblas_sgemm and cblas_dgemm of a BLAS library that computes with one
        thread. Returns those of functions that share its products out over the threads.)");

  m.def("read_seconds", &mmfree::read_seconds, "arrays"_a,
        "The time to read all of the arrays once and do hardly anything else with them.");
  m.def("multiply_rate", &mmfree::multiply_rate, "seconds"_a,
        "Multiply-accumulates of 8-bit numbers a second at most, measured for about that long; 0 "
        "where the instruction set has none.");
  m.def("set_threads", &mmfree::set_threads, "count"_a,
        "Sets the number of threads that compute, the calling one included.");
  m.def("threads", &mmfree::threads, "The number of threads that compute.");
  m.def("use_kernels", &mmfree::use_kernels, "name"_a,
        "Computes with the named instruction set, one of kernel_names().");
  m.def("kernel_names", &mmfree::kernel_names,
        "The instruction sets that this processor has kernels for, fastest first.");
  m.def(
      "kernel_name", [] { return std::string(mmfree::kernels().name); },
      "The instruction set in use.");
}
