#pragma once

#include <string.h>

#include "dense_matmul/float_tile.h"
#include "gated_delta_rule/kernels.h"

// The recurrence one position after the other. The columns of a state do not depend on each other,
// so that a few of them stay in the first-level cache for all positions.

namespace mmfree {

// Moves V vectors of columns through the positions. `from` and `to` are (K, columns) with rows
// `from_row` and `to_row` apart. The values and outputs of at most V vectors are `count` floats.
// Every sum over keys is two chains, one of the even and one of the odd keys.
template <class Isa, size_t V>
void move_columns(const DeltaHead& h, const DeltaOutput& output, size_t first, size_t count,
                  const float* from, size_t from_row, float* to, size_t to_row) {
  using Vector = typename Isa::Floats;
  constexpr size_t kLanes = Isa::kLanes;
  const auto load = [](const float* x)
                        MMFREE_INLINE { return Isa::template load<FloatType::float32>(x); };
  const size_t gate_step = h.gates == 1 ? 0 : 1;
  alignas(64) float values[V * kLanes] = {}, removed[V * kLanes] = {}, result[V * kLanes];
  for (size_t t = 0; t < h.length; ++t) {
    const float *q = h.q.at(t), *k = h.k.at(t), *a = h.a.at(t), *f = h.f.at(t);
    const float* b = h.b.data ? h.b.at(t) : nullptr;
    Vector sums[2][V];
    unroll<2 * V>([&](auto i) MMFREE_INLINE { sums[i / V][i % V] = Isa::zero(); });
    const auto read = [&](size_t key, auto chain) MMFREE_INLINE {
      const Vector factor = Isa::fill(a[key]);
      unroll<V>([&](auto v) MMFREE_INLINE {
        sums[chain][v] =
            Isa::multiply_add(load(from + key * from_row + v * kLanes), factor, sums[chain][v]);
      });
    };
    const std::integral_constant<size_t, 0> even;
    const std::integral_constant<size_t, 1> odd;
    size_t key = 0;
    for (; key + 2 <= h.keys; key += 2) {
      read(key, even);
      read(key + 1, odd);
    }
    if (key < h.keys) {
      read(key, even);
    }
    memcpy(values, h.v.at(t) + first, count * sizeof(float));
    Vector written[V];
    unroll<V>([&](auto v) MMFREE_INLINE {
      const Vector taken = sums[0][v] + sums[1][v];
      written[v] = load(values + v * kLanes);
      if (b) {
        const Vector negative = Isa::zero() - taken;
        memcpy(removed + v * kLanes, &negative, sizeof(negative));
      } else {
        written[v] = written[v] - taken;
      }
    });
    unroll<2 * V>([&](auto i) MMFREE_INLINE { sums[i / V][i % V] = Isa::zero(); });
    const auto write = [&](size_t key, auto chain) MMFREE_INLINE {
      const Vector gate = Isa::fill(f[key * gate_step]), own = Isa::fill(k[key]),
                   query = Isa::fill(q[key]);
      unroll<V>([&](auto v) MMFREE_INLINE {
        Vector state = Isa::multiply(gate, load(from + key * from_row + v * kLanes));
        state = Isa::multiply_add(own, written[v], state);
        if (b) {
          state = Isa::multiply_add(Isa::fill(b[key]), load(removed + v * kLanes), state);
        }
        sums[chain][v] = Isa::multiply_add(query, state, sums[chain][v]);
        memcpy(to + key * to_row + v * kLanes, &state, sizeof(state));
      });
    };
    key = 0;
    for (; key + 2 <= h.keys; key += 2) {
      write(key, even);
      write(key + 1, odd);
    }
    if (key < h.keys) {
      write(key, even);
    }
    unroll<V>([&](auto v) MMFREE_INLINE {
      const Vector sum = sums[0][v] + sums[1][v];
      memcpy(result + v * kLanes, &sum, sizeof(sum));
    });
    memcpy(output.o + t * output.o_row + first, result, count * sizeof(float));
    from = to;
    from_row = to_row;
  }
}

// Columns of one position lie in memory as they are, those of many in scratch, without gaps.
template <class Isa, size_t V>
void run_columns(const DeltaHead& h, const DeltaOutput& output, size_t first, size_t count,
                 float* scratch) {
  constexpr size_t kColumns = V * Isa::kLanes;
  if (h.length == 1 && count == kColumns) {
    return move_columns<Isa, V>(h, output, first, count, h.state + first, h.values,
                                output.last + first, h.values);
  }
  for (size_t key = 0; key < h.keys; ++key) {
    float* row = scratch + key * kColumns;
    memcpy(row, h.state + key * h.values + first, count * sizeof(float));
    std::fill(row + count, row + kColumns, 0.0f);
  }
  move_columns<Isa, V>(h, output, first, count, scratch, kColumns, scratch, kColumns);
  for (size_t key = 0; key < h.keys; ++key) {
    memcpy(output.last + key * h.values + first, scratch + key * kColumns, count * sizeof(float));
  }
}

template <class Isa>
constexpr size_t kWideVectors = Isa::kLanes == 16 ? 8 : 4;

template <class Isa>
void run_delta(const DeltaHead& h, const DeltaOutput& output, size_t first, size_t count,
               float* scratch) {
  if (count > 2 * Isa::kLanes) {
    run_columns<Isa, kWideVectors<Isa>>(h, output, first, count, scratch);
  } else {
    run_columns<Isa, 2>(h, output, first, count, scratch);
  }
}

// a += factor * b
template <class Isa>
inline void add_scaled(float factor, const float* b, float* __restrict__ a, size_t count) {
  for (size_t n = 0; n < count; ++n) {
    a[n] += factor * b[n];
  }
}

template <class Isa>
inline float dot_padded(const float* a, const float* b, size_t count) {
  float sums[kDeltaStep] = {};
  for (size_t n = 0; n < count; n += kDeltaStep) {
    for (size_t j = 0; j < kDeltaStep; ++j) {
      sums[j] += a[n + j] * b[n + j];
    }
  }
  for (size_t width = kDeltaStep / 2; width > 0; width /= 2) {
    for (size_t j = 0; j < width; ++j) {
      sums[j] += sums[j + width];
    }
  }
  return sums[0];
}

// The gradient for some columns of one head, whose states lie as columns.
template <class Isa>
class DeltaColumns {
 public:
  DeltaColumns(const DeltaHead& head, const DeltaGradients& gradients, const DeltaScratch& scratch,
               size_t first)
      : h(head),
        g(gradients),
        s(scratch),
        first_(first),
        columns_(std::min(kDeltaColumns, head.values - first)),
        size_(kDeltaColumns * s.row) {
  }

  void run() {
    turn(h.state, s.states);
    for (size_t t = 0; t < h.length; ++t) {
      if (t % kDeltaSegment == 0) {
        std::copy_n(s.states, size_, s.begins + t / kDeltaSegment * size_);
      }
      load(t);
      for (size_t c = 0; c < columns_; ++c) {
        s.taken[t * kDeltaColumns + c] = dot_padded<Isa>(s.a, s.states + c * s.row, s.row);
      }
      move(t, s.states, s.states);
    }
    turn(g.d_last, s.gradient);
    for (size_t segment = segments_of(h.length); segment-- > 0;) {
      const size_t begin = segment * kDeltaSegment, end = std::min(begin + kDeltaSegment, h.length);
      std::copy_n(s.begins + segment * size_, size_, s.states);
      for (size_t t = begin; t < end; ++t) {
        load(t);
        move(t, s.states + (t - begin) * size_, s.states + (t - begin + 1) * size_);
      }
      for (size_t t = end; t-- > begin;) {
        load(t);
        unfold(t, s.states + (t - begin) * size_, s.states + (t - begin + 1) * size_);
      }
    }
    for (size_t c = 0; c < columns_; ++c) {
      for (size_t key = 0; key < h.keys; ++key) {
        g.d_state[key * h.values + first_ + c] = s.gradient[c * s.row + key];
      }
    }
  }

 private:
  void turn(const float* rows, float* columns) {
    for (size_t c = 0; c < columns_; ++c) {
      for (size_t key = 0; key < h.keys; ++key) {
        columns[c * s.row + key] = rows[key * h.values + first_ + c];
      }
      std::fill(columns + c * s.row + h.keys, columns + (c + 1) * s.row, 0.0f);
    }
  }

  void load(size_t t) {
    const auto pad = [&](const PositionRows& rows, float* to) {
      std::copy_n(rows.at(t), h.keys, to);
      std::fill(to + h.keys, to + s.row, 0.0f);
    };
    pad(h.q, s.q);
    pad(h.k, s.k);
    pad(h.a, s.a);
    if (h.b.data) {
      pad(h.b, s.b);
    }
    if (h.gates == h.keys) {
      pad(h.f, s.f);
    } else {
      std::fill_n(s.f, s.row, h.f.at(t)[0]);
    }
  }

  float written(size_t t, size_t c) const {
    const float value = h.v.at(t)[first_ + c];
    return h.b.data ? value : value - s.taken[t * kDeltaColumns + c];
  }

  void move(size_t t, const float* before, float* after) {
    for (size_t c = 0; c < columns_; ++c) {
      const float value = written(t, c), taken = s.taken[t * kDeltaColumns + c];
      const float *from = before + c * s.row, *f = s.f, *k = s.k, *b = s.b;
      float* to = after + c * s.row;
      if (h.b.data) {
        for (size_t n = 0; n < s.row; ++n) {
          to[n] = f[n] * from[n] + k[n] * value - b[n] * taken;
        }
      } else {
        for (size_t n = 0; n < s.row; ++n) {
          to[n] = f[n] * from[n] + k[n] * value;
        }
      }
    }
  }

  // Adds the gradients of one position. That of the state passes it.
  void unfold(size_t t, const float* before, const float* after) {
    for (float* sums : {s.d_q, s.d_k, s.d_a, s.d_f, s.d_b}) {
      std::fill_n(sums, s.row, 0.0f);
    }
    for (size_t c = 0; c < columns_; ++c) {
      float* gradient = s.gradient + c * s.row;
      const float d_o = g.d_o.at(t)[first_ + c], taken = s.taken[t * kDeltaColumns + c];
      add_scaled<Isa>(d_o, s.q, gradient, s.row);
      add_scaled<Isa>(d_o, after + c * s.row, s.d_q, s.row);
      add_scaled<Isa>(written(t, c), gradient, s.d_k, s.row);
      const float d_written = dot_padded<Isa>(gradient, s.k, s.row);
      float d_taken = -d_written;
      if (h.b.data) {
        add_scaled<Isa>(-taken, gradient, s.d_b, s.row);
        d_taken = -dot_padded<Isa>(gradient, s.b, s.row);
      }
      g.d_v[t * h.values + first_ + c] = d_written;
      pass(before + c * s.row, d_taken, gradient);
    }
    add(s.d_q, g.d_q, t);
    add(s.d_k, g.d_k, t);
    add(s.d_a, g.d_a, t);
    if (h.b.data) {
      add(s.d_b, g.d_b, t);
    }
    if (h.gates == h.keys) {
      add(s.d_f, g.d_f, t);
    } else {
      float total = 0;
      for (size_t n = 0; n < h.keys; ++n) {
        total += s.d_f[n];
      }
      g.d_f[t] += total;
    }
  }

  void pass(const float* before, float d_taken, float* __restrict__ gradient) {
    const float *a = s.a, *f = s.f;
    float* __restrict__ d_a = s.d_a, * __restrict__ d_f = s.d_f;
    for (size_t n = 0; n < s.row; ++n) {
      d_a[n] += d_taken * before[n];
      d_f[n] += gradient[n] * before[n];
      gradient[n] = f[n] * gradient[n] + d_taken * a[n];
    }
  }

  void add(const float* sums, float* gradients, size_t t) {
    for (size_t n = 0; n < h.keys; ++n) {
      gradients[t * h.keys + n] += sums[n];
    }
  }

  const DeltaHead& h;
  const DeltaGradients& g;
  const DeltaScratch& s;
  size_t first_, columns_, size_;
};

template <class Isa>
void run_delta_gradient(const DeltaHead& head, const DeltaGradients& g, const DeltaScratch& s) {
  for (float* sums : {g.d_q, g.d_k, g.d_a, g.d_b}) {
    if (sums) {
      std::fill_n(sums, head.length * head.keys, 0.0f);
    }
  }
  std::fill_n(g.d_f, head.length * head.gates, 0.0f);
  for (size_t first = 0; first < head.values; first += kDeltaColumns) {
    DeltaColumns<Isa>(head, g, s, first).run();
  }
}

template <class Isa, class Dense>
constexpr GatedDeltaRuleKernels GatedDeltaRuleKernels::of() {
  return {mmfree::run_delta<Dense>, mmfree::run_delta_gradient<Dense>,
          kWideVectors<Dense> * Dense::kLanes, 2 * Dense::kLanes};
}

}  // namespace mmfree
