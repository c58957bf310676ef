#pragma once

// Checks gated linear attention and its gradient against the recurrence in
// float64.

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "check.h"
#include "gated_linear_attention/chunks.h"

namespace {

struct RecurrenceProblem {
  static constexpr size_t kHeads = 3;

  RecurrenceProblem(size_t length, size_t keys, size_t values, size_t gates)
      : q(kHeads * length * keys), k(q.size), v(kHeads * length * values),
        f(kHeads * length * gates), state(kHeads * keys * values), d_o(v.size),
        d_last(state.size), o(v.size), last(state.size), d_q(q.size),
        d_k(k.size), d_v(v.size), d_f(f.size), d_state(state.size),
        call{1,
             kHeads,
             length,
             keys,
             values,
             gates,
             {q.data(), 0, length * keys, keys},
             {k.data(), 0, length * keys, keys},
             // heads side by side
             {v.data(), 0, values, kHeads * values},
             {f.data(), 0, length * gates, gates},
             state.data()} {
    std::normal_distribution<float> normal;
    for (auto *buffer : {&q, &k, &v, &state, &d_o, &d_last}) {
      for (size_t i = 0; i < buffer->size; ++i) {
        (*buffer)[i] = normal(random_source);
      }
    }
    for (size_t i = 0; i < f.size; ++i) {
      f[i] = draw(0, 9) ? 1 / (1 + std::exp(-3 * normal(random_source))) : 0;
    }
  }

  void run() {
    run_chunks(call, o.data(), last.data());
    run_chunks_gradient(
        {call,
         {d_o.data(), 0, call.length * call.values, call.values},
         d_last.data(),
         d_q.data(),
         d_k.data(),
         d_v.data(),
         d_f.data(),
         d_state.data()});
  }

  double gate(size_t head, size_t t, size_t key) {
    const size_t at = (head * call.length + t) * call.gates;
    return call.gates ? f[at + (call.gates > 1 ? key : 0)] : 1;
  }

  void compare(size_t head, const std::string &where) {
    const size_t length = call.length, keys = call.keys, values = call.values,
                 size = keys * values;
    std::vector<double> states((length + 1) * size), gradient(size),
        d_gates(length * call.gates);
    std::copy_n(state.data() + head * size, size, states.begin());
    for (size_t t = 0; t < length; ++t) {
      const double *before = states.data() + t * size;
      double *own = states.data() + (t + 1) * size;
      for (size_t value = 0; value < values; ++value) {
        double sum = 0;
        for (size_t key = 0; key < keys; ++key) {
          const size_t at = (head * length + t) * keys + key;
          own[key * values + value] =
              gate(head, t, key) * before[key * values + value] +
              static_cast<double>(k[at]) * v_at(head, t, value);
          sum += q[at] * own[key * values + value];
        }
        close(o[t * kHeads * values + head * values + value], sum,
              where + " result");
      }
    }
    std::copy_n(d_last.data() + head * size, size, gradient.begin());
    for (size_t t = length; t-- > 0;) {
      const double *before = states.data() + t * size, *own = before + size;
      const float *d_row = d_o.data() + (head * length + t) * values;
      std::vector<double> d_value(values);
      for (size_t key = 0; key < keys; ++key) {
        const size_t at = (head * length + t) * keys + key;
        double d_query = 0, d_key = 0, d_gate = 0;
        for (size_t value = 0; value < values; ++value) {
          double &g = gradient[key * values + value];
          d_query += d_row[value] * own[key * values + value];
          g += static_cast<double>(q[at]) * d_row[value];
          d_key += g * v_at(head, t, value);
          d_value[value] += g * k[at];
          d_gate += g * before[key * values + value];
          g *= gate(head, t, key);
        }
        close(d_q[at], d_query, where + " d_q");
        close(d_k[at], d_key, where + " d_k");
        if (call.gates) {
          d_gates[t * call.gates + (call.gates > 1 ? key : 0)] += d_gate;
        }
      }
      for (size_t value = 0; value < values; ++value) {
        close(d_v[(head * length + t) * values + value], d_value[value],
              where + " d_v");
      }
    }
    for (size_t i = 0; i < d_gates.size(); ++i) {
      close(d_f[head * d_gates.size() + i], d_gates[i], where + " d_f");
    }
    for (size_t i = 0; i < size; ++i) {
      close(d_state[head * size + i], gradient[i], where + " d_state");
      close(last[head * size + i], states[length * size + i],
            where + " last state");
    }
  }

  double v_at(size_t head, size_t t, size_t value) {
    return v[t * kHeads * call.values + head * call.values + value];
  }

  static void close(float got, double want, const std::string &where) {
    require(std::abs(got - want) <= 1e-3 * std::max(1.0, std::abs(want)),
            "differs", where);
  }

  Buffer<float> q, k, v, f, state, d_o, d_last, o, last, d_q, d_k, d_v, d_f,
      d_state;
  GatedCall call;
};

std::vector<float> check_gated_linear_attention(const std::string &name) {
  random_source.seed(37);
  for (size_t length : {1, 7, 64, 150}) {
    for (size_t keys : {5, 33}) {
      for (size_t gates : {size_t{0}, size_t{1}, keys}) {
        RecurrenceProblem problem(length, keys, 19, gates);
        problem.run();
        const std::string where =
            name + " recurrence of " + std::to_string(length) + " by " +
            std::to_string(keys) + ", gates " + std::to_string(gates);
        for (size_t head = 0; head < RecurrenceProblem::kHeads; ++head) {
          problem.compare(head, where);
        }
      }
    }
  }
  // instruction sets add products in different orders
  return {};
}

} // namespace
