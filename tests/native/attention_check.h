#pragma once

// Checks attention of many tokens against sums in float64.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "attention/attend.h"
#include "attention_gradient_check.h"
#include "check.h"
#include "runtime/thread_pool.h"

namespace {

struct QueriesProblem {
  static constexpr size_t kBatch = 2;
  enum class Mask { none, causal, drawn };

  // Heads lie side by side in the queries, tokens in keys and values, which
  // have room behind them.
  QueriesProblem(size_t heads, size_t groups, size_t length, size_t count, size_t dims,
                 size_t value_dims, Mask mask)
      : queries(kBatch * heads * length * dims),
        keys(kBatch * groups * (count + 1) * dims),
        values(kBatch * groups * (count + 1) * value_dims),
        seen(kBatch * length * count),
        y(kBatch * length * heads * value_dims),
        log_totals(kBatch * heads * length),
        call{kBatch,
             heads,
             groups,
             length,
             count,
             floats(queries),
             length * heads * dims,
             dims,
             heads * dims,
             dims,
             floats(keys),
             groups * (count + 1) * dims,
             (count + 1) * dims,
             floats(values),
             groups * (count + 1) * value_dims,
             (count + 1) * value_dims,
             value_dims,
             mask == Mask::causal,
             mask == Mask::drawn ? seen.data() : nullptr,
             length * count,
             count,
             1,
             y.data(),
             log_totals.data()} {
    std::normal_distribution<float> normal;
    for (auto* buffer : {&queries, &keys, &values}) {
      for (size_t i = 0; i < buffer->size; ++i) {
        (*buffer)[i] = normal(random_source);
      }
    }
    for (size_t i = 0; i < seen.size; ++i) {
      // the last query of the first row sees nothing, and no query a whole run
      const bool is_blind = i / count == length - 1 || (count > 300 && i % count / 128 == 1);
      seen[i] = !is_blind && draw(0, 3) > 0;
    }
  }

  bool sees(size_t batch, size_t token, size_t key) {
    return call.mask ? seen[(batch * call.length + token) * call.count + key]
                     : !call.is_causal || key + call.length <= token + call.count;
  }

  void check_query(size_t batch, size_t head, size_t token, const std::string& where) {
    const size_t dims = call.dims, group = head * call.groups / call.heads;
    const float* query =
        queries.data() + ((batch * call.length + token) * call.heads + head) * dims;
    const size_t first = (batch * call.groups + group) * (call.count + 1);
    std::vector<double> sums(call.value_dims);
    double total = 0;
    for (size_t key = 0; key < call.count; ++key) {
      if (!sees(batch, token, key)) {
        continue;
      }
      double score = 0;
      for (size_t d = 0; d < dims; ++d) {
        score += query[d] * keys[(first + key) * dims + d] / std::sqrt(1.0 * dims);
      }
      total += std::exp(score);
      for (size_t d = 0; d < call.value_dims; ++d) {
        sums[d] += std::exp(score) * values[(first + key) * call.value_dims + d];
      }
    }
    const size_t start = ((batch * call.length + token) * call.heads + head) * call.value_dims;
    for (size_t d = 0; d < call.value_dims; ++d) {
      const double want = sums[d] / total, got = y[start + d];
      require(total > 0 ? std::abs(got - want) <= 2e-5 * (1 + std::abs(want)) : std::isnan(got),
              "attention is wrong", where);
    }
    const double got = log_totals[(batch * call.heads + head) * call.length + token];
    require(total > 0 ? std::abs(got - std::log(total)) <= 2e-5 * (1 + std::abs(got))
                      : !std::isfinite(got),
            "sum of attention is wrong", where);
  }

  Buffer<float> queries, keys, values;
  Buffer<bool> seen;
  Buffer<float> y, log_totals;
  QueriesCall call;
};

std::vector<float> check_attention(const std::string& name) {
  random_source.seed(23);
  using Mask = QueriesProblem::Mask;
  struct Sizes {
    size_t heads, groups, length, count, dims, value_dims;
  };
  for (const Sizes& s :
       {Sizes{1, 1, 1, 1, 8, 8}, Sizes{4, 2, 60, 60, 33, 20}, Sizes{3, 3, 131, 260, 16, 17},
        Sizes{50, 1, 5, 390, 64, 100}, Sizes{6, 2, 140, 9, 40, 64}}) {
    for (Mask mask : {Mask::none, Mask::causal, Mask::drawn}) {
      const std::string where = name + " attention of " + std::to_string(s.length) + " to " +
                                std::to_string(s.count) + ", mask " +
                                std::to_string(static_cast<int>(mask));
      QueriesProblem p(s.heads, s.groups, s.length, s.count, s.dims, s.value_dims, mask);
      attend(p.call);
      for (size_t batch = 0; batch < p.kBatch; ++batch) {
        for (size_t head = 0; head < s.heads; ++head) {
          for (size_t token = 0; token < s.length; token += token % 7 + 1) {
            p.check_query(batch, head, token, where);
          }
          p.check_query(batch, head, s.length - 1, where);
        }
      }
      // one query alone
      Buffer<float> alone(s.heads * s.value_dims), log_totals(s.heads);
      QueriesCall last = p.call;
      last.batch = last.length = 1;
      last.queries.data = p.queries.data() + (s.length - 1) * s.heads * s.dims;
      last.mask = p.call.mask ? p.seen.data() + (s.length - 1) * s.count : nullptr;
      last.y = alone.data();
      last.log_totals = log_totals.data();
      set_threads(1);
      attend(last);
      set_threads(2);
      const float* same = p.y.data() + (s.length - 1) * s.heads * s.value_dims;
      require(std::memcmp(alone.data(), same, alone.size * sizeof(float)) == 0,
              "attention of a query depends on the others", where);
    }
  }
  check_attention_gradient(name);
  // the bits are those of each set alone
  return {};
}

}  // namespace
