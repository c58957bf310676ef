#pragma once

#include "depthwise_convolution/kernels.h"

namespace mmfree {

// Computes the target of a call, whose weight (channels, side * side) and bias (channels,), or
// none, are still in their own order.
void convolve(DepthwiseCall call, const Floats& weight, const Floats& bias);

// Computes the gradients of the weight (channels, side * side) and the bias (channels,). The call
// says nothing of parts. They do not depend on the number of threads.
void sum_weight_gradients(DepthwiseWeightCall call, float* d_weight, float* d_bias);

}  // namespace mmfree
