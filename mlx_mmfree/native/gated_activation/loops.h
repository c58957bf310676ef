#pragma once

#include "gated_activation/kernels.h"
#include "runtime/exponential.h"
#include "runtime/floats.h"
#include "runtime/normal_distribution.h"

namespace mmfree {

// 1 / sqrt(2 pi), the largest density of the normal distribution
constexpr float kDensity = 0.39894228f;

// gate = a(gate)
template <class Isa>
void activate(Activation activation, float* gate, size_t dims) {
  switch (activation) {
    case Activation::silu:
      for (size_t j = 0; j < dims; ++j) {
        gate[j] = gate[j] * sigmoid<Isa>(gate[j]);
      }
      return;
    case Activation::relu2:
      for (size_t j = 0; j < dims; ++j) {
        const float positive = gate[j] < 0.0f ? 0.0f : gate[j];
        gate[j] = positive * positive;
      }
      return;
    case Activation::gelu:
      for (size_t j = 0; j < dims; ++j) {
        gate[j] = gate[j] * normal_share<Isa>(gate[j]);
      }
      return;
    case Activation::relu:
      for (size_t j = 0; j < dims; ++j) {
        gate[j] = gate[j] < 0.0f ? 0.0f : gate[j];
      }
      return;
    case Activation::none:
      return;
  }
}

// gate = a(gate), slope = a'(gate)
template <class Isa>
void activate_with_slope(Activation activation, float* gate, float* slope, size_t dims) {
  switch (activation) {
    case Activation::silu:
      for (size_t j = 0; j < dims; ++j) {
        const float share = sigmoid<Isa>(gate[j]), value = gate[j] * share;
        slope[j] = share + value * (1.0f - share);
        gate[j] = value;
      }
      return;
    case Activation::relu2:
      for (size_t j = 0; j < dims; ++j) {
        const float positive = gate[j] < 0.0f ? 0.0f : gate[j];
        slope[j] = 2.0f * positive;
        gate[j] = positive * positive;
      }
      return;
    case Activation::gelu:
      for (size_t j = 0; j < dims; ++j) {
        const float x = gate[j], below = normal_share<Isa>(x);
        slope[j] = below + x * kDensity * exponential<Isa>(-0.5f * x * x);
        gate[j] = x * below;
      }
      return;
    case Activation::relu:
      for (size_t j = 0; j < dims; ++j) {
        slope[j] = gate[j] > 0.0f ? 1.0f : 0.0f;
        gate[j] = gate[j] < 0.0f ? 0.0f : gate[j];
      }
      return;
    case Activation::none:
      return;
  }
}

template <class Isa>
void compute_gated(const GatedRows& g, size_t first, size_t last, float* scratch) {
  float *gate = scratch, *up = scratch + g.dims;
  for (size_t row = first; row < last; ++row) {
    widen<Isa>(g.gate.floats, row * g.gate.stride, g.dims, gate);
    widen<Isa>(g.up.floats, row * g.up.stride, g.dims, up);
    activate<Isa>(g.activation, gate, g.dims);
    for (size_t j = 0; j < g.dims; ++j) {
      gate[j] *= up[j];
    }
    narrow<Isa>(gate, g.dims, g.type, static_cast<char*>(g.y) + row * g.dims * size_of(g.type));
  }
}

template <class Isa>
void differentiate_gated(const GatedGradientRows& g, size_t first, size_t last, float* scratch) {
  float *gate = scratch, *up = gate + g.dims, *slope = up + g.dims, *d_y = slope + g.dims;
  for (size_t row = first; row < last; ++row) {
    widen<Isa>(g.gate.floats, row * g.gate.stride, g.dims, gate);
    widen<Isa>(g.up.floats, row * g.up.stride, g.dims, up);
    widen<Isa>(g.d_y.floats, row * g.d_y.stride, g.dims, d_y);
    activate_with_slope<Isa>(g.activation, gate, slope, g.dims);
    for (size_t j = 0; j < g.dims; ++j) {
      slope[j] *= up[j] * d_y[j];
      gate[j] *= d_y[j];
    }
    const FloatType types[] = {g.gate.floats.type, g.up.floats.type};
    narrow<Isa>(slope, g.dims, types[0],
                static_cast<char*>(g.d_gate) + row * g.d_stride * size_of(types[0]));
    narrow<Isa>(gate, g.dims, types[1],
                static_cast<char*>(g.d_up) + row * g.d_stride * size_of(types[1]));
  }
}

template <class Isa, class Dense>
constexpr GatedActivationKernels GatedActivationKernels::of() {
  return {mmfree::compute_gated<Isa>, mmfree::differentiate_gated<Isa>};
}

}  // namespace mmfree
