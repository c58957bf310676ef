#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "rms_norm_quantize/kernels.h"

namespace {

void check_halves(const std::string& where) {
  Buffer<uint16_t> x(1 << 16);
  for (size_t i = 0; i < x.size; ++i) {
    x[i] = i;
  }
  Buffer<float> codes(x.size), scale(x.size);
  for (FloatType type : {FloatType::float16, FloatType::bfloat16}) {
    RowQuantizer quantizer{{x.data(), type}, nullptr,     1, false, 0, false,
                           codes.data(),     scale.data()};
    table<RmsNormQuantizeKernels>(kernels()).quantize_rows(quantizer, 0, x.size);
    const uint16_t one = type == FloatType::float16 ? 0x3c00 : 0x3f80;
    require(codes[one] == 127 && scale[one] == 127, "1 is read wrongly", where);
    require(codes[one | 0x8000] == -127, "-1 is read wrongly", where);
    require(std::isnan(codes[0x7fff]) && std::isnan(scale[0xffff]), "NaN is lost", where);
    require(codes[0] == 0 && scale[0] == 127 / 1e-5f, "0 is read wrongly", where);
  }
}

// All instruction sets must give the same bits.
std::vector<float> check_codes(size_t rows, size_t dims, const std::string& where) {
  random_source.seed(7);
  Buffer<float> x(rows * dims), codes(rows * dims), scale(rows);
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < x.size; ++i) {
    x[i] = normal(random_source);
  }
  std::vector<float> result;
  for (bool half_away : {true, false}) {
    const RowQuantizer quantizer{floats(x), nullptr,   dims,         half_away,
                                 1e-6f,     half_away, codes.data(), scale.data()};
    table<RmsNormQuantizeKernels>(kernels()).quantize_rows(quantizer, 0, rows);
    for (size_t i = 0; i < codes.size; ++i) {
      require(std::abs(codes[i]) <= 127 && codes[i] == std::floor(codes[i]),
              "a code is no whole number", where);
    }
    result.insert(result.end(), codes.data(), codes.data() + codes.size);
    result.insert(result.end(), scale.data(), scale.data() + scale.size);
    Buffer<float> rounded(rows * dims);
    RowQuantizer rounder = quantizer;
    rounder.codes = rounded.data();
    rounder.scale = nullptr;
    table<RmsNormQuantizeKernels>(kernels()).round_rows(rounder, 0, rows);
    for (size_t i = 0; i < codes.size; ++i) {
      const double want = codes[i] / static_cast<double>(scale[i / dims]);
      require(std::abs(rounded[i] - want) <= 3e-7 * std::abs(want), "a code has another step",
              where);
    }
    result.insert(result.end(), rounded.data(), rounded.data() + rounded.size);
  }
  return result;
}

std::vector<float> check_rms_norm_quantize(const std::string& name) {
  check_halves(name);
  return check_codes(5, 333, name);
}

}  // namespace
