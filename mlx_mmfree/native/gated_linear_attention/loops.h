#pragma once

#include "attention/loops.h"
#include "gated_linear_attention/kernels.h"

// Products of small matrices in the first- and second-level cache, and products of gates between
// them.

namespace mmfree {

// a *= b
template <class Isa>
inline void scale_row(float* __restrict__ a, const float* __restrict__ b, size_t count) {
  for (size_t n = 0; n < count; ++n) {
    a[n] *= b[n];
  }
}

// c = a * b
template <class Isa>
inline void multiply_rows(const float* a, const float* b, float* __restrict__ c, size_t count) {
  for (size_t n = 0; n < count; ++n) {
    c[n] = a[n] * b[n];
  }
}

// c += a * b
template <class Isa>
inline void add_product(const float* a, const float* b, float* __restrict__ c, size_t count) {
  for (size_t n = 0; n < count; ++n) {
    c[n] += a[n] * b[n];
  }
}

template <class Isa>
inline float dot_rows(const float* a, const float* b, size_t count) {
  float sums[kKeyStep] = {};
  size_t n = 0;
  for (; n + kKeyStep <= count; n += kKeyStep) {
    for (size_t j = 0; j < kKeyStep; ++j) {
      sums[j] += a[n + j] * b[n + j];
    }
  }
  for (; n < count; ++n) {
    sums[n % kKeyStep] += a[n] * b[n];
  }
  for (size_t width = kKeyStep / 2; width > 0; width /= 2) {
    for (size_t j = 0; j < width; ++j) {
      sums[j] += sums[j + width];
    }
  }
  return sums[0];
}

// Writes (rows, columns) as (columns, rows).
template <class Isa>
void transpose_rows(const float* a, size_t a_row, size_t rows, size_t columns, float* b,
                    size_t b_row) {
  for (size_t column = 0; column < columns; ++column) {
    for (size_t row = 0; row < rows; ++row) {
      b[column * b_row + row] = a[row * a_row + column];
    }
  }
}

// One chunk of one head: `n` positions from `first`.
template <class Isa>
class PositionChunk {
 public:
  PositionChunk(const GatedHead& head, const ChunkScratch& scratch, size_t first)
      : h(head),
        s(scratch),
        first_(first),
        n(std::min(kChunkLength, head.length - first)),
        has_key_gates_(head.gates == head.keys) {
  }

  // Reads the rows, and multiplies them with what is before and after them in the chunk.
  void load() {
    for (size_t t = 0; t < n; ++t) {
      pad(h.q.at(first_ + t), s.q + t * s.row, h.keys, 0);
      pad(h.k.at(first_ + t), s.k + t * s.row, h.keys, 0);
    }
    if (has_key_gates_) {
      load_key_gates();
    } else if (h.gates) {
      load_head_gates();
    } else {
      std::copy_n(s.q, n * s.row, s.q_until);
      std::copy_n(s.k, n * s.row, s.k_after);
    }
  }

  // state = gates * state + k^T v
  void move(float* state) {
    for (size_t k = 0; k < h.keys && h.gates; ++k) {
      const float gate = s.until[has_key_gates_ ? (n - 1) * s.row + k : n - 1];
      for (size_t v = 0; v < h.values; ++v) {
        state[k * h.values + v] *= gate;
      }
    }
    multiply_tile<Isa>(
        {s.k_after, 1, s.row, h.v.at(first_), h.v.row, state, h.values, h.keys, n, h.values, true});
  }

  // The weights between positions, zero above the diagonal of each block of rows.
  void weigh() {
    if (has_key_gates_) {
      for (size_t start = 0; start < n; start += kBlockLength) {
        weigh_block(start);
      }
      for (size_t half = kBlockLength; half < n; half *= 2) {
        for (size_t start = 0; start + half < n; start += 2 * half) {
          weigh_halves(start, half);
        }
      }
      return;
    }
    lower_products(s.q, s.row, s.k, s.row, h.keys, s.weights);
    if (h.gates) {
      decay(s.weights, s.weights);
    }
  }

  void read(const float* state, float* o, size_t o_row) {
    multiply_tile<Isa>(
        {s.q_until, s.row, 1, state, h.values, o, o_row, n, h.keys, h.values, false});
    for (size_t t = 0; t < n; t += kBlockLength) {
      const size_t rows = std::min(kBlockLength, n - t);
      multiply_tile<Isa>({s.weights + t * kChunkLength, kChunkLength, 1, h.v.at(first_), h.v.row,
                          o + t * o_row, o_row, rows, t + rows, h.values, true});
    }
  }

 protected:
  static void pad(const float* from, float* to, size_t count, float padding) {
    std::copy_n(from, count, to);
    std::fill(to + count, to + round_up(count, kKeyStep), padding);
  }

  void load_key_gates() {
    std::fill_n(s.one, s.row, 1.0f);
    const float* until = s.one;
    for (size_t t = 0; t < n; ++t) {
      float *f = s.f + t * s.row, *own = s.until + t * s.row;
      pad(h.f.at(first_ + t), f, h.keys, 1);
      multiply_rows<Isa>(until, f, own, s.row);
      multiply_rows<Isa>(own, s.q + t * s.row, s.q_until + t * s.row, s.row);
      until = own;
    }
    for (size_t t = n; t-- > 0;) {
      float* own = s.after + t * s.row;
      if (t + 1 == n) {
        std::fill_n(own, s.row, 1.0f);
      } else {
        multiply_rows<Isa>(own + s.row, s.f + (t + 1) * s.row, own, s.row);
      }
      multiply_rows<Isa>(own, s.k + t * s.row, s.k_after + t * s.row, s.row);
    }
  }

  void load_head_gates() {
    for (size_t t = 0; t < n; ++t) {
      s.f[t] = h.f.at(first_ + t)[0];
      s.until[t] = t ? s.until[t - 1] * s.f[t] : s.f[t];
      for (size_t k = 0; k < s.row; ++k) {
        s.q_until[t * s.row + k] = s.until[t] * s.q[t * s.row + k];
      }
    }
    for (size_t t = n; t-- > 0;) {
      s.after[t] = t + 1 == n ? 1 : s.after[t + 1] * s.f[t + 1];
      for (size_t k = 0; k < s.row; ++k) {
        s.k_after[t * s.row + k] = s.after[t] * s.k[t * s.row + k];
      }
    }
  }

  // Products of each row of `a` with those of `b` up to its own, zero above the diagonal of each
  // block.
  void lower_products(const float* a, size_t a_row, const float* b, size_t b_row, size_t dims,
                      float* result) {
    transpose_rows<Isa>(b, b_row, n, dims, s.columns, kChunkLength);
    for (size_t t = 0; t < n; t += kBlockLength) {
      const size_t rows = std::min(kBlockLength, n - t);
      multiply_tile<Isa>({a + t * a_row, a_row, 1, s.columns, kChunkLength,
                          result + t * kChunkLength, kChunkLength, rows, dims, t + rows, false});
      for (size_t row = 0; row < rows; ++row) {
        float* own = result + (t + row) * kChunkLength + t;
        std::fill(own + row + 1, own + rows, 0.0f);
      }
    }
  }

  // result = products * (the products of the gates between two positions)
  void decay(const float* products, float* result) {
    for (size_t t = 0; t < n; ++t) {
      for (size_t j = 0; j < t; ++j) {
        s.carried[j] *= s.f[t];
      }
      s.carried[t] = 1;
      multiply_rows<Isa>(products + t * kChunkLength, s.carried, result + t * kChunkLength, t + 1);
    }
  }

  void weigh_block(size_t start) {
    const size_t stop = std::min(start + kBlockLength, n);
    for (size_t t = start; t < stop; ++t) {
      float* weights = s.weights + t * kChunkLength;
      std::copy_n(s.q + t * s.row, s.row, s.carried);
      for (size_t j = t + 1; j-- > start;) {
        weights[j] = dot_rows<Isa>(s.carried, s.k + j * s.row, s.row);
        scale_row<Isa>(s.carried, s.f + j * s.row, s.row);
      }
      std::fill(weights + t + 1, weights + stop, 0.0f);
    }
  }

  // Multiplies queries of the second half with the gates since its beginning, and keys of the first
  // half with the gates up to its end. The products of gates alone are kept where there is room.
  void meet(size_t start, size_t half, float* untils, float* afters) {
    const size_t middle = start + half, stop = std::min(middle + half, n);
    std::fill_n(s.carried, s.row, 1.0f);
    for (size_t t = middle; t < stop; ++t) {
      scale_row<Isa>(s.carried, s.f + t * s.row, s.row);
      multiply_rows<Isa>(s.carried, s.q + t * s.row, s.meeting_q + (t - middle) * s.row, s.row);
      if (untils) {
        std::copy_n(s.carried, s.row, untils + (t - middle) * s.row);
      }
    }
    std::fill_n(s.carried, s.row, 1.0f);
    for (size_t j = middle; j-- > start;) {
      multiply_rows<Isa>(s.carried, s.k + j * s.row, s.meeting_k + (j - start) * s.row, s.row);
      if (afters) {
        std::copy_n(s.carried, s.row, afters + (j - start) * s.row);
      }
      scale_row<Isa>(s.carried, s.f + j * s.row, s.row);
    }
  }

  void weigh_halves(size_t start, size_t half) {
    const size_t rows = std::min(half, n - start - half);
    meet(start, half, nullptr, nullptr);
    transpose_rows<Isa>(s.meeting_k, s.row, half, h.keys, s.columns, kChunkLength);
    multiply_tile<Isa>({s.meeting_q, s.row, 1, s.columns, kChunkLength,
                        s.weights + (start + half) * kChunkLength + start, kChunkLength, rows,
                        h.keys, half, false});
  }

  const GatedHead& h;
  const ChunkScratch& s;
  size_t first_, n;
  bool has_key_gates_;
};

template <class Isa>
void run_head(const GatedHead& head, const GatedOutput& output, const ChunkScratch& scratch) {
  std::copy_n(head.state, head.keys * head.values, output.last);
  for (size_t first = 0; first < head.length; first += kChunkLength) {
    PositionChunk<Isa> chunk(head, scratch, first);
    chunk.load();
    chunk.weigh();
    chunk.read(output.last, output.o + first * output.o_row, output.o_row);
    chunk.move(output.last);
  }
}

}  // namespace mmfree

#include "gated_linear_attention/gradient_loops.h"

namespace mmfree {

template <class Isa, class Dense>
constexpr GatedLinearAttentionKernels GatedLinearAttentionKernels::of() {
  return {mmfree::run_head<Dense>, mmfree::run_head_gradient<Dense>};
}

}  // namespace mmfree
