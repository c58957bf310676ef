#pragma once

// Checks the gradient of attention against sums in float64.

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "attention/attend_gradient.h"
#include "check.h"
#include "runtime/thread_pool.h"

namespace {

struct GradientProblem {
  static constexpr size_t kBatch = 2;

  // Tokens lie side by side in the queries and heads in the gradient of the
  // result.
  GradientProblem(size_t heads, size_t groups, size_t length, size_t count, size_t dims,
                  size_t value_dims, bool is_causal, bool has_mask)
      : queries(kBatch * heads * length * dims),
        keys(kBatch * groups * count * dims),
        values(kBatch * groups * count * value_dims),
        y(kBatch * heads * length * value_dims),
        d_y(kBatch * heads * length * value_dims),
        log_totals(kBatch * heads * length),
        parts(key_parts(kBatch, groups, count) * queries.size),
        d_queries(queries.size),
        d_keys(keys.size),
        d_values(values.size),
        seen(kBatch * length * count),
        want_queries(queries.size),
        want_keys(keys.size),
        want_values(values.size),
        call{kBatch,
             heads,
             groups,
             length,
             count,
             dims,
             value_dims,
             {queries.data(), heads * length * dims, length * dims, dims},
             {keys.data(), groups * count * dims, count * dims, dims},
             {values.data(), groups * count * value_dims, count * value_dims, value_dims},
             {y.data(), heads * length * value_dims, length * value_dims, value_dims},
             {d_y.data(), heads * length * value_dims, value_dims, heads * value_dims},
             log_totals.data(),
             is_causal,
             has_mask ? seen.data() : nullptr,
             length * count,
             count,
             1,
             parts.data(),
             d_queries.data(),
             d_keys.data(),
             d_values.data()} {
    std::normal_distribution<float> normal;
    for (auto* buffer : {&queries, &keys, &values, &d_y}) {
      for (size_t i = 0; i < buffer->size; ++i) {
        (*buffer)[i] = normal(random_source);
      }
    }
    for (size_t i = 0; i < seen.size; ++i) {
      // the last query of each row sees nothing
      seen[i] = i / count % length != length - 1 && draw(0, 3) > 0;
    }
    for (size_t row = 0; row < kBatch * heads * length; ++row) {
      add_query(row / length / heads, row / length % heads, row % length);
    }
  }

  bool sees(size_t batch, size_t token, size_t key) {
    return call.mask ? seen[(batch * call.length + token) * call.count + key]
                     : !call.is_causal || key + call.length <= token + call.count;
  }

  // Sets the result of one query, and adds what it gives to the gradients.
  void add_query(size_t batch, size_t head, size_t token) {
    const size_t dims = call.dims, value_dims = call.value_dims;
    const size_t row = (batch * call.heads + head) * call.length + token;
    const size_t first = (batch * call.groups + head * call.groups / call.heads) * call.count;
    const float* query = queries.data() + row * dims;
    const float* own = call.d_y.at(batch, head, token);
    std::vector<double> weights(call.count), products(call.count);
    double total = 0, delta = 0;
    const double scale = 1 / std::sqrt(1.0 * dims);
    for (size_t key = 0; key < call.count; ++key) {
      double score = 0;
      for (size_t d = 0; d < dims; ++d) {
        score += query[d] * keys[(first + key) * dims + d] * scale;
      }
      for (size_t d = 0; d < value_dims; ++d) {
        products[key] += own[d] * values[(first + key) * value_dims + d];
      }
      weights[key] = sees(batch, token, key) ? std::exp(score) : 0;
      total += weights[key];
    }
    log_totals[row] = std::log(total);
    for (size_t key = 0; key < call.count; ++key) {
      weights[key] = total > 0 ? weights[key] / total : 0;
      delta += weights[key] * products[key];
    }
    for (size_t key = 0; key < call.count; ++key) {
      for (size_t d = 0; d < value_dims; ++d) {
        y[row * value_dims + d] += weights[key] * values[(first + key) * value_dims + d];
        want_values[(first + key) * value_dims + d] += weights[key] * own[d];
      }
      const double gradient = weights[key] * (products[key] - delta) * scale;
      for (size_t d = 0; d < dims; ++d) {
        want_queries[row * dims + d] += gradient * keys[(first + key) * dims + d];
        want_keys[(first + key) * dims + d] += gradient * query[d];
      }
    }
    if (total == 0) {
      y[row * value_dims] = NAN;
    }
  }

  static void check(Buffer<float>& got, const std::vector<double>& want, const std::string& where) {
    for (size_t i = 0; i < got.size; ++i) {
      require(std::abs(got[i] - want[i]) <= 3e-5 * (1 + std::abs(want[i])),
              "gradient of attention is wrong", where);
    }
  }

  Buffer<float> queries, keys, values, y, d_y, log_totals, parts, d_queries, d_keys, d_values;
  Buffer<bool> seen;
  std::vector<double> want_queries, want_keys, want_values;
  AttentionGradientCall call;
};

void check_attention_gradient(const std::string& name) {
  struct Sizes {
    size_t heads, groups, length, count, dims, value_dims;
  };
  for (const Sizes& s : {Sizes{1, 1, 1, 1, 8, 8}, Sizes{4, 2, 70, 70, 33, 20},
                         Sizes{3, 3, 131, 200, 16, 17}, Sizes{4, 1, 68, 9, 40, 64}}) {
    for (int mask : {0, 1, 2}) {
      const std::string where = name + " gradient of attention of " + std::to_string(s.length) +
                                " to " + std::to_string(s.count) + ", mask " + std::to_string(mask);
      GradientProblem p(s.heads, s.groups, s.length, s.count, s.dims, s.value_dims, mask == 1,
                        mask == 2);
      attend_gradient(p.call);
      GradientProblem::check(p.d_queries, p.want_queries, where + ", queries");
      GradientProblem::check(p.d_keys, p.want_keys, where + ", keys");
      GradientProblem::check(p.d_values, p.want_values, where + ", values");
      const std::vector<float> two(p.d_queries.data(), p.d_queries.data() + p.d_queries.size);
      set_threads(1);
      attend_gradient(p.call);
      set_threads(2);
      require(std::memcmp(two.data(), p.d_queries.data(), two.size() * sizeof(float)) == 0,
              "gradient of attention depends on the threads", where);
    }
  }
}

}  // namespace
