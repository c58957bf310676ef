#include "gated_delta_rule/gated_delta_rule.h"

#include "gated_delta_rule/rule.h"
#include "mlx/allocator.h"
#include "runtime/head_arrays.h"

namespace mmfree {

namespace {

DeltaCall delta_call(const Arrays& rows, const mx::array& state,
                     const std::optional<mx::array>& b) {
  const auto size = [](const mx::array& x, int axis) { return static_cast<size_t>(x.shape(axis)); };
  const auto &q = rows[0], &v = rows[2], &f = rows[4];
  return {size(q, 0),         size(q, 1),          size(q, 2),    size(q, 3),
          size(v, 3),         size(f, 3),          head_array(q), head_array(rows[1]),
          head_array(v),      head_array(rows[3]), head_array(f), b ? head_array(*b) : HeadArray{},
          state.data<float>()};
}

Arrays first_five(const Arguments& given, mx::Stream stream) {
  Arrays rows;
  for (size_t n = 0; n < 5; ++n) {
    rows.push_back(with_rows(*given[n], stream));
  }
  return rows;
}

}  // namespace

std::pair<mx::array, mx::array> gated_delta_rule(const mx::array& q, const mx::array& k,
                                                 const mx::array& v, const mx::array& a,
                                                 const mx::array& f, const mx::array& state,
                                                 const std::optional<mx::array>& b) {
  require(q.ndim() == 4 && v.ndim() == 4 && q.size() > 0 && v.size() > 0,
          "[gated_delta_rule] 'q' and 'v' must have 4 dimensions and not be empty.");
  const int batch = q.shape(0), heads = q.shape(1), length = q.shape(2), keys = q.shape(3);
  require(k.shape() == q.shape() && a.shape() == q.shape() && (!b || b->shape() == q.shape()),
          "[gated_delta_rule] 'k', 'a' and 'b' must be (B, H, L, K).");
  require(v.shape(0) == batch && v.shape(1) == heads && v.shape(2) == length &&
              state.shape() == mx::Shape{batch, heads, keys, v.shape(3)},
          "[gated_delta_rule] 'v' must be (B, H, L, V) and 'state' (B, H, K, V).");
  require(f.shape() == q.shape() || f.shape() == mx::Shape{batch, heads, length, 1},
          "[gated_delta_rule] 'f' must be (B, H, L, K) or (B, H, L, 1).");
  for (const auto* x : {&q, &k, &v, &a, &f, &state, b ? &*b : &q}) {
    require(x->dtype() == mx::float32, "[gated_delta_rule] all arrays must be float32.");
  }
  const auto outputs = GatedDeltaRule::call({q, k, v, a, f, state, b}, {b.has_value()});
  return {outputs[0], outputs[1]};
}

void GatedDeltaRule::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  const auto given = arguments(inputs);
  const auto rows = first_five(given, stream());
  const auto state = contiguous(*given[5], stream());
  const auto b = given[6] ? std::optional(with_rows(*given[6], stream())) : std::nullopt;
  mx::array& o = outputs[0];
  const int64_t heads = o.shape(1), length = o.shape(2), dims = o.shape(3);
  const bool is_in_order = heads == 1 || length == 1;
  o.set_data(mx::allocator::malloc(o.nbytes()), o.size(),
             {length * heads * dims, dims, heads * dims, 1},
             {true, is_in_order, o.size() == static_cast<size_t>(o.shape(0))});
  outputs[1].set_data(mx::allocator::malloc(outputs[1].nbytes()));
  dispatch([call = delta_call(rows, state, b), o = o.data<float>(),
            last = outputs[1].data<float>()]() { run_rule(call, o, last); });
}

Arrays GatedDeltaRule::vjp(const Arrays& primals, const Arrays& cotangents,
                           const std::vector<int>& argnums, const Arrays& outputs) {
  Arguments given(primals.begin(), primals.begin() + 6);
  given.push_back(cotangents[0]);
  given.push_back(cotangents[1]);
  given.push_back(options_.has_removal ? std::optional(primals[6]) : std::nullopt);
  const auto gradients = GatedDeltaRuleGradient::call(std::move(given), options_, stream());
  Arrays wanted;
  for (int argnum : argnums) {
    wanted.push_back(gradients[argnum]);
  }
  return wanted;
}

OutputForms GatedDeltaRule::output_forms(const Arguments& arguments) const {
  return {{arguments[2]->shape(), arguments[5]->shape()}, {mx::float32, mx::float32}};
}

void GatedDeltaRuleGradient::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  const auto given = arguments(inputs);
  const auto rows = first_five(given, stream());
  const auto state = contiguous(*given[5], stream()), d_last = contiguous(*given[7], stream());
  const auto d_o = with_rows(*given[6], stream());
  const auto b = given[8] ? std::optional(with_rows(*given[8], stream())) : std::nullopt;
  for (auto& output : outputs) {
    output.set_data(mx::allocator::malloc(output.nbytes()));
  }
  const auto out = [&](size_t n) { return outputs[n].data<float>(); };
  const DeltaGradientCall call = {delta_call(rows, state, b),
                                  head_array(d_o),
                                  d_last.data<float>(),
                                  out(0),
                                  out(1),
                                  out(2),
                                  out(3),
                                  out(4),
                                  out(5),
                                  b ? out(6) : nullptr};
  dispatch([call]() { run_rule_gradient(call); });
}

OutputForms GatedDeltaRuleGradient::output_forms(const Arguments& arguments) const {
  OutputForms forms;
  for (size_t n : {0, 1, 2, 3, 4, 5, 8}) {
    if (arguments[n]) {
      forms.shapes.push_back(arguments[n]->shape());
      forms.dtypes.push_back(mx::float32);
    }
  }
  return forms;
}

}  // namespace mmfree
