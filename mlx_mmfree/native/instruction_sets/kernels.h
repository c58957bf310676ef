#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "dense_matmul/kernels.h"
#include "probe/kernels.h"

namespace mmfree {

// A packed row is read in blocks of 64 bytes, 256 weights; activations are padded to whole blocks.
constexpr size_t kBlockBytes = 64;
constexpr size_t kBlockWeights = 4 * kBlockBytes;

constexpr size_t blocks(size_t dims) {
  return (dims + kBlockWeights - 1) / kBlockWeights;
}

// The packed matrix T, (outputs, row_bytes), lowest bits first, code = trit + 1.
struct PackedMatrix {
  const uint8_t* bytes;
  size_t outputs, row_bytes;
};

// y = x T^T for permuted activation codes: code k + 4 b of a block lies at 64 k + b.
struct CodeProduct {
  const int8_t* codes;  // (rows, blocks * 256)
  const int32_t* sums;  // (rows,) of the codes
  size_t rows, stride;
  PackedMatrix weight;
  float* y;  // (rows, outputs)
};

// y = x T^T for permuted floats: value s + 16 w of a block lies at 16 s + w.
struct FloatProduct {
  const float* x;  // (rows, blocks * 256)
  size_t rows, stride;
  PackedMatrix weight;
  float* y;  // (rows, outputs)
};

// dx = dy T.
struct TransposedProduct {
  const float* dy;  // (rows, outputs)
  size_t rows;
  PackedMatrix weight;
  float* dx;  // (rows, dims)
  size_t dims;
};

enum class FloatType { float32, float16, bfloat16 };

// Floats in memory, or none.
struct Floats {
  const void* data;
  FloatType type;
};

struct RowQuantizer {
  Floats x;             // (rows, dims)
  const float* weight;  // (dims,) or null
  size_t dims;
  bool has_norm;
  float eps;
  bool half_away;
  float* codes;  // (rows, dims)
  float* scale;  // (rows,)
};

enum class Activation { none, silu, relu2, gelu, relu };

// z = RMSNorm(u), of u = x or u = a(x[:dims]) * x[dims:].
struct RowInput {
  Floats x;  // (rows, dims), or (rows, 2 dims) with an activation
  size_t dims;
  Activation gate;
  Floats norm;  // (dims,) or none: no norm
  float norm_eps;
};

// What meets the matrix: RMSNorm(z) of one projection's own, and its codes.
struct RowEncoder {
  size_t dims;
  Floats norm;  // (dims,) or none: no norm
  float eps;
  bool half_away;
};

// y = sums * scale / input scale + residual.
struct Results {
  const float* sums;  // (rows, outputs)
  size_t rows, outputs;
  const float* scale;  // (outputs,) or one
  bool has_scales;
  const float* input_scales;  // (rows,) or null
  Floats residual;            // or none; both start at the first output,
  void* y;                    // of the type, and have rows at a distance of
  FloatType type;
  size_t stride;
};

struct RecurrenceStep {
  Floats gates;        // (rows, 3 dims): input, forget and output gates
  const float* state;  // (dims,)
  Floats weight;       // (dims,), of the norm of the output gate
  Floats lower_bound;  // (dims,) or none
  const bool* valid;   // (rows,) or null
  size_t rows, dims;
  const float* inverse;  // (rows,), of `rms_inverse` of the output gates
  void* y;               // (rows, dims) of the type of the gates
  float* last;           // (dims,)
};

// Heads of one token, normed, rotated and scaled.
struct Heads {
  Floats x;  // (count, dims)
  size_t count, dims;
  Floats norm;  // weight of an RMSNorm of each head, (dims,), or none
  float eps;
  const float* cosines;  // (dims / 2,), then as many sines; null: no rotation
  bool is_interleaved;   // pairs are neighbours, else halves
  float scale;
  void* y;  // heads of the type at a distance of
  FloatType type;
  size_t stride;
};

// Query heads that share a key head, on a run of slots.
struct SlotRun {
  float* scores;  // (heads, slots); the call leaves the weights e^(score - peak), zero if not seen
  size_t heads, slots, dims;
  Floats values;               // (slots, dims)
  float* sums;                 // (heads, stride), of weight times value
  size_t stride;               // dims, rounded up to whole vectors
  float* peaks;                // (heads,), the largest scores
  float* totals;               // (heads,), of the weights
  const bool* seen = nullptr;  // (tokens, slots), by head % tokens; null: every slot is
  size_t tokens = 1;
};

// What one head has of each run, at a distance of `distance` floats.
struct RunResults {
  const float *sums, *peaks, *totals;
  size_t runs, distance, dims;
  void* y;  // (dims,)
  FloatType type;
};

// The loops of one instruction set. Every set gives the same bits, but for those of `dense`.
struct Kernels {
  const char* name;
  bool (*is_supported)();
  // Rows of dx that share one decoding of the weights.
  size_t transposed_rows;
  // x: (dims,). Returns whether all values are whole numbers in [-128, 127].
  bool (*permute_codes)(const float* x, size_t dims, int8_t* codes, int32_t* sum);
  void (*permute_floats)(const float* x, size_t dims, float* permuted);
  // Outputs [first, last) of every row.
  void (*multiply_codes)(const CodeProduct&, size_t first, size_t last);
  void (*multiply_floats)(const FloatProduct&, size_t first, size_t last);
  // Block `block` of dx for the rows [first, first + rows), rows <= transposed_rows.
  void (*multiply_transposed)(const TransposedProduct&, size_t block, size_t first, size_t rows);
  // The rows [first, last).
  void (*quantize_rows)(const RowQuantizer&, size_t first, size_t last);
  // Rows up to which `multiply_codes` reads the weights as one stream.
  size_t stream_rows;
  // z: (blocks * 256,), filled up with zeros; scratch of the same size.
  void (*prepare_row)(const RowInput&, size_t row, float* z, float* scratch);
  // Permuted codes of z, their sum and their scale, NaN where there are no codes.
  void (*encode_row)(const RowEncoder&, const float* z, float* scratch, int8_t* codes, int32_t* sum,
                     float* scale);
  // Permuted RMSNorm(z).
  void (*normalize_row)(const RowEncoder&, const float* z, float* scratch, float* permuted);
  void (*finish)(const Results&);
  // 1 / sqrt(mean(x^2) + eps) of the `dims` values from `start`; scratch: (dims,).
  float (*rms_inverse)(const Floats& x, size_t start, size_t dims, float eps, float* scratch);
  // The channels [first, last) of all rows of one sequence.
  void (*recur)(const RecurrenceStep&, size_t first, size_t last);
  // scratch: (2 * dims,).
  void (*prepare_heads)(const Heads&, float* scratch);
  void (*weigh)(const SlotRun&);
  // The mean of the values, each with its weight of all runs; scratch: (dims,).
  void (*merge)(const RunResults&, float* scratch);
  DenseKernels dense;
  ProbeKernels probe;
};

// The fastest set that this processor has, unless `use_kernels` chose another.
const Kernels& kernels();

// Throws std::invalid_argument, listing the names, where this processor lacks it.
void use_kernels(const std::string& name);

// Names of the sets that this processor has, fastest first.
std::vector<std::string> kernel_names();

}  // namespace mmfree
