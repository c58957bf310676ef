#pragma once

// Checks attention of one token against sums in float64.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "attention_step/attend.h"
#include "check.h"
#include "runtime/thread_pool.h"

namespace {

struct HeadSizes {
  size_t heads, groups, dims;
};

// One token of rows that have read different numbers of tokens.
struct AttentionProblem {
  static constexpr size_t kLengths[] = {140, 0, 2};
  static constexpr size_t kRows = 3;

  AttentionProblem(const HeadSizes& size, size_t window, size_t sinks)
      : size(size),
        window(window),
        sinks(sinks),
        used(window ? std::min(kLengths[0], window + sinks) : kLengths[0]),
        slots(window ? std::min(used + 1, window + sinks) : used + 1),
        room(slots + 2),
        projected(kRows * (size.heads + 2 * size.groups) * size.dims),
        keys(kRows * size.groups * room * size.dims),
        values(keys.size),
        wavelengths(size.dims / 2),
        norm(size.dims),
        positions(kRows * used),
        new_positions(kRows * slots) {
    std::normal_distribution<float> normal;
    for (auto* buffer : {&projected, &keys, &values, &norm}) {
      for (size_t i = 0; i < buffer->size; ++i) {
        (*buffer)[i] = normal(random_source);
      }
    }
    for (size_t i = 0; i < wavelengths.size; ++i) {
      wavelengths[i] = std::pow(100.0f, 2.0f * i / size.dims);
    }
    for (size_t row = 0; row < kRows; ++row) {
      for (size_t slot = 0; slot < used; ++slot) {
        positions[row * used + slot] = held(slot, kLengths[row]);
      }
    }
  }

  // The last of the first `length` positions that falls on the slot.
  int held(size_t slot, size_t length) const {
    for (size_t position = length; position-- > 0;) {
      if (slot_of(position) == slot) {
        return position;
      }
    }
    return -1;
  }

  size_t slot_of(size_t position) const {
    return window == 0 || position < sinks ? position : sinks + (position - sinks) % window;
  }

  // One row alone, or all.
  std::vector<float> attend_to(size_t row, size_t count, Buffer<float>& keys,
                               Buffer<float>& values) {
    const size_t buffers = row * size.groups * room * size.dims;
    std::vector<float> y(count * size.heads * size.dims);
    attend({offset(row * (size.heads + 2 * size.groups) * size.dims),
            count,
            size.heads,
            size.groups,
            size.dims,
            floats(norm),
            floats(norm),
            1e-5f,
            size.dims % 2 ? nullptr : wavelengths.data(),
            size.dims % 2 ? 0 : size.dims,
            size.dims % 4 == 0,
            {static_cast<int64_t>(window), static_cast<int64_t>(sinks)},
            positions.data() + row * used,
            used,
            keys.data() + buffers,
            values.data() + buffers,
            FloatType::float32,
            FloatType::float32,
            room,
            new_positions.data() + row * slots,
            slots,
            y.data()});
    return y;
  }

  Floats offset(size_t start) {
    return {projected.data() + start, FloatType::float32};
  }

  // A head, normed and rotated.
  std::vector<double> head(size_t row, size_t index, bool is_value) const {
    const float* x =
        projected.memory.get() + (row * (size.heads + 2 * size.groups) + index) * size.dims;
    std::vector<double> result(x, x + size.dims);
    if (is_value) {
      return result;
    }
    double square = 0;
    for (double value : result) {
      square += value * value / size.dims;
    }
    for (size_t d = 0; d < size.dims; ++d) {
      result[d] *= norm.memory[d] / std::sqrt(square + 1e-5);
    }
    for (size_t i = 0; size.dims % 2 == 0 && i < size.dims / 2; ++i) {
      const size_t a = size.dims % 4 == 0 ? 2 * i : i;
      const size_t b = size.dims % 4 == 0 ? 2 * i + 1 : i + size.dims / 2;
      const double angle = kLengths[row] / static_cast<double>(wavelengths.memory[i]);
      const double first = result[a], second = result[b];
      result[a] = first * std::cos(angle) - second * std::sin(angle);
      result[b] = first * std::sin(angle) + second * std::cos(angle);
    }
    return result;
  }

  HeadSizes size;
  size_t window, sinks, used, slots, room;
  Buffer<float> projected, keys, values, wavelengths, norm;
  Buffer<int32_t> positions, new_positions;
};

void check_attention_of(const HeadSizes& size, size_t window, size_t sinks,
                        const std::string& where) {
  AttentionProblem p(size, window, sinks);
  const auto copy = [](const Buffer<float>& buffer) {
    Buffer<float> result(buffer.size);
    std::copy_n(buffer.memory.get(), buffer.size, result.data());
    return result;
  };
  auto keys = copy(p.keys), values = copy(p.values);
  const auto y = p.attend_to(0, p.kRows, keys, values);
  set_threads(1);
  for (size_t row = 0; row < p.kRows; ++row) {
    auto own_keys = copy(p.keys), own_values = copy(p.values);
    const auto own = p.attend_to(row, 1, own_keys, own_values);
    require(std::memcmp(own.data(), y.data() + row * own.size(), 4 * own.size()) == 0,
            "attention of a row depends on the others", where);
  }
  set_threads(2);
  const auto close = [](double got, double want) {
    return std::abs(got - want) <= 2e-5 * (1 + std::abs(want));
  };
  for (size_t row = 0; row < p.kRows; ++row) {
    const size_t last = p.kLengths[row], place = p.slot_of(last),
                 count = std::min(last + 1, p.slots);
    for (size_t slot = 0; slot < p.slots; ++slot) {
      require(p.new_positions[row * p.slots + slot] == p.held(slot, last + 1),
              "a position is wrong", where);
    }
    for (size_t group = 0; group < size.groups; ++group) {
      const size_t start = (row * size.groups + group) * p.room * size.dims;
      const auto key = p.head(row, size.heads + group, false);
      const auto value = p.head(row, size.heads + size.groups + group, true);
      for (size_t i = 0; i < p.room * size.dims; ++i) {
        const bool is_new = i / size.dims == place;
        require(close(keys[start + i], is_new ? key[i % size.dims] : p.keys[start + i]) &&
                    close(values[start + i], is_new ? value[i % size.dims] : p.values[start + i]),
                "a buffer is wrong", where);
      }
      for (size_t h = group * size.heads / size.groups; h < (group + 1) * size.heads / size.groups;
           ++h) {
        const auto query = p.head(row, h, false);
        std::vector<double> sums(size.dims);
        double total = 0;
        for (size_t slot = 0; slot < count; ++slot) {
          double score = 0;
          for (size_t d = 0; d < size.dims; ++d) {
            score += query[d] * keys[start + slot * size.dims + d] / std::sqrt(1.0 * size.dims);
          }
          total += std::exp(score);
          for (size_t d = 0; d < size.dims; ++d) {
            sums[d] += std::exp(score) * values[start + slot * size.dims + d];
          }
        }
        for (size_t d = 0; d < size.dims; ++d) {
          require(close(y[(row * size.heads + h) * size.dims + d], sums[d] / total),
                  "attention is wrong", where);
        }
      }
    }
  }
}

// Values of one slot in two halves of a type, whose weights are all the same.
void check_attention_halves(FloatType type, const std::string& where) {
  constexpr size_t kDims = 41;
  const uint16_t one = type == FloatType::float16 ? 0x3c00 : 0x3f80;
  const uint16_t two = 0x4000;
  Buffer<uint16_t> projected(3 * kDims), keys(2 * kDims), values(2 * kDims), y(kDims);
  Buffer<int32_t> positions(1), new_positions(2);
  for (size_t d = 0; d < kDims; ++d) {
    values[d] = d % 2 ? one : two;
    projected[2 * kDims + d] = values[d];
  }
  attend({{projected.data(), type},
          1,
          1,
          1,
          kDims,
          kNone,
          kNone,
          0,
          nullptr,
          0,
          false,
          {0, 0},
          positions.data(),
          1,
          keys.data(),
          values.data(),
          type,
          type,
          2,
          new_positions.data(),
          2,
          y.data()});
  for (size_t d = 0; d < kDims; ++d) {
    require(y[d] == (d % 2 ? one : two) && values[kDims + d] == y[d], "a half is wrong", where);
  }
}

std::vector<float> check_attention_step(const std::string& name) {
  random_source.seed(17);
  for (const auto& [window, sinks] : {std::pair{0, 0}, {9, 0}, {5, 3}, {200, 0}}) {
    for (const HeadSizes& size :
         {HeadSizes{1, 1, 8}, {6, 2, 33}, {5, 1, 100}, {4, 4, 64}, {8, 2, 130}}) {
      check_attention_of(size, window, sinks,
                         name + " attention " + std::to_string(size.heads) + " x " +
                             std::to_string(size.dims) + " window " + std::to_string(window));
    }
  }
  check_attention_halves(FloatType::float16, name + " attention of float16");
  check_attention_halves(FloatType::bfloat16, name + " attention of bfloat16");
  // the bits are those of each set alone
  return {};
}

}  // namespace
