#include "gated_linear_attention/gated_linear_attention.h"

#include "gated_linear_attention/chunks.h"
#include "mlx/allocator.h"
#include "runtime/head_arrays.h"

namespace mmfree {

namespace {

GatedCall gated_call(const mx::array& q, const mx::array& k, const mx::array& v,
                     const mx::array& state, const std::optional<mx::array>& f) {
  const auto size = [](const mx::array& x, int axis) { return static_cast<size_t>(x.shape(axis)); };
  return {size(q, 0),         size(q, 1),
          size(q, 2),         size(q, 3),
          size(v, 3),         f ? size(*f, 3) : 0,
          head_array(q),      head_array(k),
          head_array(v),      f ? head_array(*f) : HeadArray{},
          state.data<float>()};
}

}  // namespace

std::pair<mx::array, mx::array> gated_linear_attention(const mx::array& q, const mx::array& k,
                                                       const mx::array& v,
                                                       const std::optional<mx::array>& f,
                                                       const mx::array& state) {
  require(q.ndim() == 4 && v.ndim() == 4 && q.size() > 0 && v.size() > 0,
          "[gated_linear_attention] 'q' and 'v' must have 4 dimensions and not be empty.");
  const int batch = q.shape(0), heads = q.shape(1), length = q.shape(2), keys = q.shape(3);
  require(k.shape() == q.shape() && v.shape(0) == batch && v.shape(1) == heads &&
              v.shape(2) == length && state.shape() == mx::Shape{batch, heads, keys, v.shape(3)},
          "[gated_linear_attention] 'k' must be (B, H, L, K), 'v' (B, H, L, V) and 'state' "
          "(B, H, K, V).");
  require(!f || f->shape() == q.shape() || f->shape() == mx::Shape{batch, heads, length, 1},
          "[gated_linear_attention] 'f' must be (B, H, L, K) or (B, H, L, 1).");
  require(q.dtype() == mx::float32 && k.dtype() == mx::float32 && v.dtype() == mx::float32 &&
              state.dtype() == mx::float32 && (!f || f->dtype() == mx::float32),
          "[gated_linear_attention] all arrays must be float32.");
  const auto outputs = GatedLinearAttention::call({q, k, v, state, f}, {f.has_value()});
  return {outputs[0], outputs[1]};
}

void GatedLinearAttention::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  const auto given = arguments(inputs);
  const auto rows = [this](const mx::array& x) { return with_rows(x, stream()); };
  const auto q = rows(*given[0]), k = rows(*given[1]), v = rows(*given[2]);
  const auto state = contiguous(*given[3], stream());
  const auto f = given[4] ? std::optional(rows(*given[4])) : std::nullopt;
  mx::array& o = outputs[0];
  const int64_t heads = o.shape(1), length = o.shape(2), dims = o.shape(3);
  const bool is_in_order = heads == 1 || length == 1;
  o.set_data(mx::allocator::malloc(o.nbytes()), o.size(),
             {length * heads * dims, dims, heads * dims, 1},
             {true, is_in_order, o.size() == static_cast<size_t>(o.shape(0))});
  outputs[1].set_data(mx::allocator::malloc(outputs[1].nbytes()));
  dispatch([call = gated_call(q, k, v, state, f), o = o.data<float>(),
            last = outputs[1].data<float>()]() { run_chunks(call, o, last); });
}

Arrays GatedLinearAttention::vjp(const Arrays& primals, const Arrays& cotangents,
                                 const std::vector<int>& argnums, const Arrays& outputs) {
  Arguments given = {primals[0],    primals[1],    primals[2],  primals[3],
                     cotangents[0], cotangents[1], std::nullopt};
  if (options_.has_gates) {
    given[6] = primals[4];
  }
  const auto gradients = GatedLinearAttentionGradient::call(std::move(given), options_, stream());
  Arrays wanted;
  for (int argnum : argnums) {
    wanted.push_back(gradients[argnum]);
  }
  return wanted;
}

OutputForms GatedLinearAttention::output_forms(const Arguments& arguments) const {
  return {{arguments[2]->shape(), arguments[3]->shape()}, {mx::float32, mx::float32}};
}

void GatedLinearAttentionGradient::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  const auto given = arguments(inputs);
  const auto rows = [this](const mx::array& x) { return with_rows(x, stream()); };
  const auto q = rows(*given[0]), k = rows(*given[1]), v = rows(*given[2]), d_o = rows(*given[4]);
  const auto state = contiguous(*given[3], stream()), d_last = contiguous(*given[5], stream());
  const auto f = given[6] ? std::optional(rows(*given[6])) : std::nullopt;
  for (auto& output : outputs) {
    output.set_data(mx::allocator::malloc(output.nbytes()));
  }
  const GatedGradientCall call = {gated_call(q, k, v, state, f),
                                  head_array(d_o),
                                  d_last.data<float>(),
                                  outputs[0].data<float>(),
                                  outputs[1].data<float>(),
                                  outputs[2].data<float>(),
                                  f ? outputs[4].data<float>() : nullptr,
                                  outputs[3].data<float>()};
  dispatch([call]() { run_chunks_gradient(call); });
}

OutputForms GatedLinearAttentionGradient::output_forms(const Arguments& arguments) const {
  OutputForms forms;
  for (size_t n : {0, 1, 2, 3, 6}) {
    if (arguments[n]) {
      forms.shapes.push_back(arguments[n]->shape());
      forms.dtypes.push_back(mx::float32);
    }
  }
  return forms;
}

}  // namespace mmfree
