#pragma once

#include "gated_linear_attention/loops.h"

// The gradient: each product of a chunk backwards, and each product of gates.

namespace mmfree {

template <class Isa>
class PositionChunkGradient : public PositionChunk<Isa> {
 public:
  using Base = PositionChunk<Isa>;
  using Base::Base, Base::h, Base::s, Base::first_, Base::n, Base::has_key_gates_;

  // Computes the gradients of the rows, given those of the results and, in `d_state`, that of the
  // state after the chunk. Leaves there the gradient of the state before.
  void run(const GatedGradients& g, const float* state, float* d_state) {
    Base::load();
    Base::weigh();
    const PositionRows d_o = {g.d_o.at(first_), g.d_o.row}, v = {h.v.at(first_), h.v.row};
    Base::lower_products(d_o.data, d_o.row, v.data, v.row, h.values, s.d_weights);
    add_to_values(d_o, d_state, g.d_v + first_ * h.values);
    transpose_rows<Isa>(state, h.values, h.keys, h.values, s.columns, s.row);
    multiply_tile<Isa>(
        {d_o.data, d_o.row, 1, s.columns, s.row, s.d_q, s.row, n, h.values, h.keys, false});
    transpose_rows<Isa>(d_state, h.values, h.keys, h.values, s.columns, s.row);
    multiply_tile<Isa>(
        {v.data, v.row, 1, s.columns, s.row, s.d_k, s.row, n, h.values, h.keys, false});
    if (has_key_gates_) {
      unfold_key_gates(state, d_state);
    } else {
      if (h.gates) {
        unfold_head_gates(state, d_state);
      }
      unfold_products();
    }
    multiply_tile<Isa>(
        {s.q_until, 1, s.row, d_o.data, d_o.row, d_state, h.values, h.keys, n, h.values, true});
    for (size_t t = 0; t < n; ++t) {
      std::copy_n(s.d_q + t * s.row, h.keys, g.d_q + (first_ + t) * h.keys);
      std::copy_n(s.d_k + t * s.row, h.keys, g.d_k + (first_ + t) * h.keys);
      if (h.gates) {
        std::copy_n(s.d_f + t * (has_key_gates_ ? s.row : 1), h.gates,
                    g.d_f + (first_ + t) * h.gates);
      }
    }
  }

 private:
  void add_to_values(const PositionRows& d_o, const float* d_state, float* d_v) {
    multiply_tile<Isa>(
        {s.k_after, s.row, 1, d_state, h.values, d_v, h.values, n, h.keys, h.values, false});
    for (size_t j = 0; j < n; j += kBlockLength) {
      multiply_tile<Isa>({s.weights + j * (kChunkLength + 1), 1, kChunkLength, d_o.at(j), d_o.row,
                          d_v + j * h.values, h.values, std::min(kBlockLength, n - j), n - j,
                          h.values, true});
    }
  }

  // Gradients of queries and keys that were multiplied with gates become their own and those of the
  // products. The gradient of the state passes the chunk.
  void unfold_key_gates(const float* state, float* d_state) {
    for (size_t t = 0; t < n; ++t) {
      const size_t at = t * s.row;
      multiply_rows<Isa>(s.d_q + at, s.q + at, s.d_until + at, s.row);
      scale_row<Isa>(s.d_q + at, s.until + at, s.row);
      multiply_rows<Isa>(s.d_k + at, s.k + at, s.d_after + at, s.row);
      scale_row<Isa>(s.d_k + at, s.after + at, s.row);
    }
    const float* whole = s.until + (n - 1) * s.row;
    for (size_t k = 0; k < h.keys; ++k) {
      float* row = d_state + k * h.values;
      s.d_until[(n - 1) * s.row + k] += dot_rows<Isa>(row, state + k * h.values, h.values);
      for (size_t v = 0; v < h.values; ++v) {
        row[v] *= whole[k];
      }
    }
    std::fill_n(s.d_f, n * s.row, 0.0f);
    unfold_until(0, n, s.d_until, s.until);
    unfold_after(0, n, s.d_after, s.after);
    for (size_t start = 0; start < n; start += kBlockLength) {
      unfold_block(start);
    }
    for (size_t half = kBlockLength; half < n; half *= 2) {
      for (size_t start = 0; start + half < n; start += 2 * half) {
        unfold_halves(start, half);
      }
    }
  }

  // Adds to the gradients of the gates what those of their products up to each position give.
  void unfold_until(size_t start, size_t stop, const float* d_until, const float* until) {
    std::fill_n(s.carried, s.row, 0.0f);
    for (size_t t = stop; t-- > start;) {
      for (size_t k = 0; k < s.row; ++k) {
        s.carried[k] += d_until[(t - start) * s.row + k];
      }
      const float* before = t > start ? until + (t - start - 1) * s.row : s.one;
      add_product<Isa>(s.carried, before, s.d_f + t * s.row, s.row);
      scale_row<Isa>(s.carried, s.f + t * s.row, s.row);
    }
  }

  void unfold_after(size_t start, size_t stop, const float* d_after, const float* after) {
    std::fill_n(s.carried, s.row, 0.0f);
    for (size_t t = start; t + 1 < stop; ++t) {
      for (size_t k = 0; k < s.row; ++k) {
        s.carried[k] += d_after[(t - start) * s.row + k];
      }
      const float* next = s.f + (t + 1) * s.row;
      add_product<Isa>(s.carried, after + (t - start + 1) * s.row, s.d_f + (t + 1) * s.row, s.row);
      scale_row<Isa>(s.carried, next, s.row);
    }
  }

  void unfold_block(size_t start) {
    const size_t stop = std::min(start + kBlockLength, n);
    for (size_t t = start; t < stop; ++t) {
      const float* d_weights = s.d_weights + t * kChunkLength;
      // the query times the gates between, for each key
      float* met = s.part_q;
      std::copy_n(s.q + t * s.row, s.row, met + (t - start) * s.row);
      for (size_t j = t; j > start; --j) {
        multiply_rows<Isa>(met + (j - start) * s.row, s.f + j * s.row,
                           met + (j - start - 1) * s.row, s.row);
      }
      std::fill_n(s.carried, s.row, 0.0f);
      for (size_t j = start; j <= t; ++j) {
        const float *key = s.k + j * s.row, *own = met + (j - start) * s.row;
        if (j > start) {
          add_product<Isa>(s.carried, own, s.d_f + j * s.row, s.row);
          scale_row<Isa>(s.carried, s.f + j * s.row, s.row);
        }
        float* d_key = s.d_k + j * s.row;
        for (size_t k = 0; k < s.row; ++k) {
          s.carried[k] += d_weights[j] * key[k];
          d_key[k] += d_weights[j] * own[k];
        }
      }
      float* d_query = s.d_q + t * s.row;
      for (size_t k = 0; k < s.row; ++k) {
        d_query[k] += s.carried[k];
      }
    }
  }

  void unfold_halves(size_t start, size_t half) {
    const size_t middle = start + half, rows = std::min(half, n - middle);
    Base::meet(start, half, s.meeting_until, s.meeting_after);
    const float* d_weights = s.d_weights + middle * kChunkLength + start;
    multiply_tile<Isa>({d_weights, kChunkLength, 1, s.meeting_k, s.row, s.part_q, s.row, rows, half,
                        s.row, false});
    multiply_tile<Isa>({d_weights, 1, kChunkLength, s.meeting_q, s.row, s.part_k, s.row, half, rows,
                        s.row, false});
    for (size_t t = 0; t < rows; ++t) {
      const size_t at = t * s.row, place = (middle + t) * s.row;
      add_product<Isa>(s.part_q + at, s.meeting_until + at, s.d_q + place, s.row);
      scale_row<Isa>(s.part_q + at, s.q + place, s.row);
    }
    for (size_t j = 0; j < half; ++j) {
      const size_t at = j * s.row, place = (start + j) * s.row;
      add_product<Isa>(s.part_k + at, s.meeting_after + at, s.d_k + place, s.row);
      scale_row<Isa>(s.part_k + at, s.k + place, s.row);
    }
    unfold_until(middle, middle + rows, s.part_q, s.meeting_until);
    unfold_after(start, middle, s.part_k, s.meeting_after);
  }

  void unfold_head_gates(const float* state, float* d_state) {
    float total = 0;
    for (size_t k = 0; k < h.keys; ++k) {
      total += dot_rows<Isa>(d_state + k * h.values, state + k * h.values, h.values);
    }
    for (size_t k = 0; k < h.keys * h.values; ++k) {
      d_state[k] *= s.until[n - 1];
    }
    for (size_t t = 0; t < n; ++t) {
      float *d_q = s.d_q + t * s.row, *d_k = s.d_k + t * s.row;
      // what lies behind the keys of a row of gradients was never written
      s.d_until[t] = dot_rows<Isa>(d_q, s.q + t * s.row, h.keys);
      s.d_after[t] = dot_rows<Isa>(d_k, s.k + t * s.row, h.keys);
      for (size_t k = 0; k < s.row; ++k) {
        d_q[k] *= s.until[t];
        d_k[k] *= s.after[t];
      }
    }
    s.d_until[n - 1] += total;
    std::fill_n(s.d_f, n, 0.0f);
    float carried = 0;
    for (size_t t = n; t-- > 0;) {
      carried += s.d_until[t];
      s.d_f[t] += carried * (t ? s.until[t - 1] : 1);
      carried *= s.f[t];
    }
    carried = 0;
    for (size_t t = 0; t + 1 < n; ++t) {
      carried += s.d_after[t];
      s.d_f[t + 1] += carried * s.after[t + 1];
      carried *= s.f[t + 1];
    }
    unfold_decay();
  }

  // The gradients of the weights become those of the products of queries and keys.
  void unfold_decay() {
    std::fill_n(s.products, n * kChunkLength, 1.0f);
    Base::decay(s.products, s.products);
    Base::lower_products(s.q, s.row, s.k, s.row, h.keys, s.weights);
    std::fill_n(s.carried, n, 0.0f);
    for (size_t t = n; t-- > 0;) {
      float* d_weights = s.d_weights + t * kChunkLength;
      add_product<Isa>(d_weights, s.weights + t * kChunkLength, s.carried, t);
      if (t > 0) {
        s.d_f[t] += dot_rows<Isa>(s.carried, s.products + (t - 1) * kChunkLength, t);
      }
      for (size_t j = 0; j < t; ++j) {
        s.carried[j] *= s.f[t];
      }
      scale_row<Isa>(d_weights, s.products + t * kChunkLength, t + 1);
    }
  }

  void unfold_products() {
    for (size_t t = 0; t < n; t += kBlockLength) {
      const size_t rows = std::min(kBlockLength, n - t);
      multiply_tile<Isa>({s.d_weights + t * kChunkLength, kChunkLength, 1, s.k, s.row,
                          s.d_q + t * s.row, s.row, rows, t + rows, s.row, true});
      multiply_tile<Isa>({s.d_weights + t * (kChunkLength + 1), 1, kChunkLength, s.q + t * s.row,
                          s.row, s.d_k + t * s.row, s.row, rows, n - t, s.row, true});
    }
  }
};

template <class Isa>
void run_head_gradient(const GatedHead& head, const GatedGradients& gradients,
                       const ChunkScratch& scratch) {
  const size_t size = head.keys * head.values, chunks = chunks_of(head.length);
  std::copy_n(head.state, size, scratch.states);
  for (size_t chunk = 0; chunk + 1 < chunks; ++chunk) {
    float* next = scratch.states + (chunk + 1) * size;
    std::copy_n(next - size, size, next);
    PositionChunk<Isa> part(head, scratch, chunk * kChunkLength);
    part.load();
    part.move(next);
  }
  std::copy_n(gradients.d_last, size, gradients.d_state);
  for (size_t chunk = chunks; chunk-- > 0;) {
    PositionChunkGradient<Isa>(head, scratch, chunk * kChunkLength)
        .run(gradients, scratch.states + chunk * size, gradients.d_state);
  }
}

}  // namespace mmfree
