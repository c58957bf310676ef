#pragma once

// Checks the delta rule and its gradient against the recurrence in float64.

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "check.h"
#include "gated_delta_rule/rule.h"

namespace {

struct DeltaProblem {
  static constexpr size_t kHeads = 3;

  DeltaProblem(size_t length, size_t keys, size_t values, size_t gates,
               bool removes)
      : q(kHeads * length * keys), k(q.size), a(q.size), b(q.size),
        v(kHeads * length * values), f(kHeads * length * gates),
        state(kHeads * keys * values), d_o(v.size), d_last(state.size),
        o(v.size), last(state.size), d_q(q.size), d_k(q.size), d_a(q.size),
        d_b(q.size), d_v(v.size), d_f(f.size), d_state(state.size),
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
             {a.data(), 0, length * keys, keys},
             {f.data(), 0, length * gates, gates},
             {removes ? b.data() : nullptr, 0, length * keys, keys},
             state.data()} {
    std::normal_distribution<float> normal;
    for (auto *buffer : {&q, &v, &state, &d_o, &d_last}) {
      for (size_t i = 0; i < buffer->size; ++i) {
        (*buffer)[i] = normal(random_source);
      }
    }
    // short, so that states stay bounded
    for (auto *buffer : {&k, &a, &b}) {
      for (size_t i = 0; i < buffer->size; ++i) {
        (*buffer)[i] = normal(random_source) / std::sqrt(2.0f * keys);
      }
    }
    for (size_t i = 0; i < f.size; ++i) {
      f[i] = draw(0, 9) ? 1 / (1 + std::exp(-3 * normal(random_source))) : 0;
    }
  }

  void run() {
    run_rule(call, o.data(), last.data());
    run_rule_gradient(
        {call,
         {d_o.data(), 0, call.length * call.values, call.values},
         d_last.data(),
         d_q.data(),
         d_k.data(),
         d_v.data(),
         d_a.data(),
         d_f.data(),
         d_state.data(),
         call.b.data ? d_b.data() : nullptr});
  }

  double gate(size_t head, size_t t, size_t key) {
    const size_t at = (head * call.length + t) * call.gates;
    return f[at + (call.gates > 1 ? key : 0)];
  }

  double v_at(size_t head, size_t t, size_t value) {
    return v[t * kHeads * call.values + head * call.values + value];
  }

  // One column of the state after the other.
  void compare(size_t head, const std::string &where) {
    const size_t length = call.length, keys = call.keys, values = call.values;
    const float *under = call.b.data ? b.data() : k.data();
    std::vector<double> sums_q(length * keys), sums_k(sums_q), sums_a(sums_q),
        sums_b(sums_q), sums_f(length * call.gates);
    for (size_t value = 0; value < values; ++value) {
      std::vector<double> states((length + 1) * keys), taken(length),
          gradient(keys);
      for (size_t key = 0; key < keys; ++key) {
        states[key] = state[(head * keys + key) * values + value];
        gradient[key] = d_last[(head * keys + key) * values + value];
      }
      for (size_t t = 0; t < length; ++t) {
        const size_t row = (head * length + t) * keys;
        const double *before = states.data() + t * keys;
        double sum = 0;
        for (size_t key = 0; key < keys; ++key) {
          taken[t] += a[row + key] * before[key];
        }
        for (size_t key = 0; key < keys; ++key) {
          const double own = gate(head, t, key) * before[key] +
                             k[row + key] * v_at(head, t, value) -
                             under[row + key] * taken[t];
          states[(t + 1) * keys + key] = own;
          sum += q[row + key] * own;
        }
        close(o[t * kHeads * values + head * values + value], sum,
              where + " result");
      }
      for (size_t key = 0; key < keys; ++key) {
        close(last[(head * keys + key) * values + value],
              states[length * keys + key], where + " last state");
      }
      for (size_t t = length; t-- > 0;) {
        const size_t row = (head * length + t) * keys;
        const double d_out = d_o[(head * length + t) * values + value];
        double d_value = 0, d_taken = 0;
        for (size_t key = 0; key < keys; ++key) {
          sums_q[t * keys + key] += d_out * states[(t + 1) * keys + key];
          gradient[key] += d_out * q[row + key];
          d_value += gradient[key] * k[row + key];
          d_taken -= gradient[key] * under[row + key];
          sums_k[t * keys + key] += gradient[key] * v_at(head, t, value);
          sums_b[t * keys + key] -= gradient[key] * taken[t];
        }
        for (size_t key = 0; key < keys; ++key) {
          const double before = states[t * keys + key];
          sums_a[t * keys + key] += d_taken * before;
          sums_f[t * call.gates + (call.gates > 1 ? key : 0)] +=
              gradient[key] * before;
          gradient[key] =
              gate(head, t, key) * gradient[key] + d_taken * a[row + key];
        }
        close(d_v[(head * length + t) * values + value], d_value,
              where + " d_v");
      }
      for (size_t key = 0; key < keys; ++key) {
        close(d_state[(head * keys + key) * values + value], gradient[key],
              where + " d_state");
      }
    }
    for (size_t i = 0; i < sums_q.size(); ++i) {
      const size_t at = head * length * keys + i;
      close(d_q[at], sums_q[i], where + " d_q");
      close(d_k[at], sums_k[i] + (call.b.data ? 0 : sums_b[i]), where + " d_k");
      close(d_a[at], sums_a[i], where + " d_a");
      if (call.b.data) {
        close(d_b[at], sums_b[i], where + " d_b");
      }
    }
    for (size_t i = 0; i < sums_f.size(); ++i) {
      close(d_f[head * sums_f.size() + i], sums_f[i], where + " d_f");
    }
  }

  static void close(float got, double want, const std::string &where) {
    require(std::abs(got - want) <= 1e-3 * std::max(1.0, std::abs(want)),
            "differs", where);
  }

  Buffer<float> q, k, a, b, v, f, state, d_o, d_last, o, last, d_q, d_k, d_a,
      d_b, d_v, d_f, d_state;
  DeltaCall call;
};

std::vector<float> check_gated_delta_rule(const std::string &name) {
  random_source.seed(41);
  for (size_t length : {1, 7, 16, 50}) {
    for (size_t keys : {5, 33}) {
      for (size_t values : {19, 128}) {
        for (size_t gates : {size_t{1}, keys}) {
          for (bool removes : {false, true}) {
            DeltaProblem problem(length, keys, values, gates, removes);
            problem.run();
            const std::string where =
                name + " delta rule of " + std::to_string(length) + " by " +
                std::to_string(keys) + " by " + std::to_string(values) +
                ", gates " + std::to_string(gates) +
                (removes ? ", removal" : "");
            for (size_t head = 0; head < DeltaProblem::kHeads; ++head) {
              problem.compare(head, where);
            }
          }
        }
      }
    }
  }
  // instruction sets add products in different orders
  return {};
}

} // namespace
