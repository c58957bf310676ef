#include "attention/attention.h"

#include <utility>

#include "attention/attend.h"
#include "attention/attend_gradient.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "runtime/contiguous.h"
#include "runtime/float_type.h"

namespace mmfree {

namespace {

// Returns the array itself if the rows of each head lie one behind the other, else a copy.
mx::array with_rows(const mx::array& x, bool is_dense, mx::Stream stream) {
  const bool has_rows = x.strides(3) == 1 && (!is_dense || x.strides(2) == x.shape(3));
  return has_rows ? x : contiguous(x, stream);
}

size_t distance(const mx::array& x, int axis) {
  return x.shape(axis) == 1 ? 0 : static_cast<size_t>(x.strides(axis));
}

template <class Call>
void set_mask(const mx::array& mask, Call& call) {
  call.mask = mask.data<bool>();
  call.mask_batch = distance(mask, 0);
  call.mask_token = distance(mask, 2);
  call.mask_key = distance(mask, 3);
}

HeadRows head_rows(const mx::array& x) {
  return {x.data<float>(), distance(x, 0), distance(x, 1), distance(x, 2)};
}

}  // namespace

mx::array attention(const mx::array& queries, const mx::array& keys, const mx::array& values,
                    const std::optional<mx::array>& mask, bool is_causal) {
  require(queries.ndim() == 4 && keys.ndim() == 4 && values.ndim() == 4 && queries.size() > 0 &&
              keys.size() > 0 && values.size() > 0,
          "[attention] 'queries', 'keys' and 'values' must have 4 dimensions and not be empty.");
  require(is_float(queries) && is_float(keys) && is_float(values),
          "[attention] 'queries', 'keys' and 'values' must be floats.");
  const int batch = queries.shape(0), heads = queries.shape(1), length = queries.shape(2);
  const int groups = keys.shape(1), count = keys.shape(2);
  require(keys.shape(0) == batch && values.shape(0) == batch && values.shape(1) == groups &&
              values.shape(2) == count && keys.shape(3) == queries.shape(3) && heads % groups == 0,
          "[attention] 'keys' and 'values' must be (B, G, N, K) and (B, G, N, V).");
  require(!mask || (mask->dtype() == mx::bool_ && !is_causal),
          "[attention] 'mask' must be booleans.");
  Arguments arguments = {queries, keys, values, std::nullopt};
  if (mask) {
    arguments[3] = mx::broadcast_to(*mask, {batch, 1, length, count});
  }
  return Attention::call(std::move(arguments), {is_causal})[0];
}

void Attention::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  mx::array& output = outputs[0];
  outputs[1].set_data(mx::allocator::malloc(outputs[1].nbytes()));
  const auto queries = with_rows(inputs[0], false, stream());
  const auto keys = with_rows(inputs[1], true, stream());
  const auto values = with_rows(inputs[2], true, stream());
  const auto size = [](const mx::array& x, int axis) { return static_cast<size_t>(x.shape(axis)); };
  const auto floats = [](const mx::array& x) {
    return Floats{x.data<void>(), float_type(x.dtype())};
  };
  const int64_t heads = output.shape(1), length = output.shape(2), dims = output.shape(3);
  const bool is_in_order = heads == 1 || length == 1;
  output.set_data(mx::allocator::malloc(output.nbytes()), output.size(),
                  {length * heads * dims, dims, heads * dims, 1},
                  {true, is_in_order, output.size() == size(output, 0)});
  QueriesCall call{size(queries, 0),
                   size(queries, 1),
                   size(keys, 1),
                   size(queries, 2),
                   size(keys, 2),
                   floats(queries),
                   distance(queries, 0),
                   distance(queries, 1),
                   distance(queries, 2),
                   size(queries, 3),
                   floats(keys),
                   distance(keys, 0),
                   distance(keys, 1),
                   floats(values),
                   distance(values, 0),
                   distance(values, 1),
                   size(values, 3),
                   options_.is_causal,
                   nullptr,
                   0,
                   0,
                   0,
                   output.data<void>(),
                   outputs[1].data<float>()};
  if (inputs.size() > 3) {
    set_mask(inputs[3], call);
  }
  dispatch([call]() { attend(call); });
}

Arrays Attention::vjp(const Arrays& primals, const Arrays& cotangents,
                      const std::vector<int>& argnums, const Arrays& outputs) {
  const auto in_float32 = [this](const mx::array& x) {
    return mx::astype(x, mx::float32, stream());
  };
  // the result depends on the other arguments, whose gradients say all
  const auto constant = [&](const mx::array& x) { return mx::stop_gradient(in_float32(x)); };
  Arguments given = {
      in_float32(primals[0]), in_float32(primals[1]), in_float32(primals[2]),   std::nullopt,
      constant(outputs[0]),   constant(outputs[1]),   in_float32(cotangents[0])};
  if (primals.size() > 3) {
    given[3] = primals[3];
  }
  const auto gradients = AttentionGradient::call(std::move(given), options_, stream());
  Arrays wanted;
  for (int argnum : argnums) {
    wanted.push_back(argnum < 3 ? mx::astype(gradients[argnum], primals[argnum].dtype(), stream())
                                : mx::zeros_like(primals[argnum], stream()));
  }
  return wanted;
}

OutputForms Attention::output_forms(const Arguments& arguments) const {
  const auto& queries = arguments[0]->shape();
  auto shape = queries;
  shape.back() = arguments[2]->shape(3);
  return {{shape, {queries[0], queries[1], queries[2]}}, {arguments[0]->dtype(), mx::float32}};
}

void AttentionGradient::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  const auto given = arguments(inputs);
  const auto rows = [this](const mx::array& x) { return with_rows(x, false, stream()); };
  const auto queries = rows(*given[0]), keys = rows(*given[1]), values = rows(*given[2]);
  const auto y = rows(*given[4]), d_y = rows(*given[6]);
  const auto log_totals = contiguous(*given[5], stream());
  for (auto& output : outputs) {
    output.set_data(mx::allocator::malloc(output.nbytes()));
  }
  const auto size = [](const mx::array& x, int axis) { return static_cast<size_t>(x.shape(axis)); };
  AttentionGradientCall call{size(queries, 0),
                             size(queries, 1),
                             size(keys, 1),
                             size(queries, 2),
                             size(keys, 2),
                             size(queries, 3),
                             size(values, 3),
                             head_rows(queries),
                             head_rows(keys),
                             head_rows(values),
                             head_rows(y),
                             head_rows(d_y),
                             log_totals.data<float>(),
                             options_.is_causal,
                             nullptr,
                             0,
                             0,
                             0,
                             nullptr,
                             outputs[0].data<float>(),
                             outputs[1].data<float>(),
                             outputs[2].data<float>()};
  if (given[3]) {
    set_mask(*given[3], call);
  }
  const size_t parts = key_parts(call.batch, call.groups, call.count);
  if (parts > 1) {
    auto shape = outputs[0].shape();
    shape.insert(shape.begin(), static_cast<int>(parts));
    mx::array sums(shape, mx::float32, nullptr, {});
    sums.set_data(mx::allocator::malloc(sums.nbytes()));
    mx::cpu::get_command_encoder(stream()).add_temporary(sums);
    call.parts = sums.data<float>();
  }
  dispatch([call]() { attend_gradient(call); });
}

OutputForms AttentionGradient::output_forms(const Arguments& arguments) const {
  return {{arguments[0]->shape(), arguments[1]->shape(), arguments[2]->shape()},
          {mx::float32, mx::float32, mx::float32}};
}

}  // namespace mmfree
