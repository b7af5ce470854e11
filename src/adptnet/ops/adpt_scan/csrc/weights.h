// Products with K and V of one head: packed once per call, dense or by their factors.
//
// Letters as in plane.h; `half` is 0 for K and 1 for V, of the first plane, and so on. Sizes as in task.h.

#pragma once

#include "task.h"

namespace {

// [K; V] of one head, or its transpose; of each plane, `plane_entries` apart.
struct Weights {
  T* panels;
  bool for_matvec;  // packed for `matvec`
  Factors<T> factors;

  static int64_t plane_entries(const Scan& s) {
    const int64_t m = s.sizes.size, depth = s.sizes.depth;
    return 2 * std::max(padded_size<T>(m) * depth, padded_size<T>(depth) * m);  // forward, and transposed
  }

  void allocate(const Scan& s, Arena<T>& memory) {
    if (is_factored(s))
      factors.allocate(factor_shape(s), memory);
    else
      panels = memory.allocate(s.sizes.planes * plane_entries(s));
  }
};

inline void pack_weights(const Scan& s, int64_t head, bool backward, Weights& to) {
  const int64_t m = s.sizes.size;
  auto head_part = [&](const T* input, int64_t each) { return input + head * 2 * each; };
  if (is_factored(s)) {
    const FactorShape shape = factor_shape(s);
    const FactorInputs<T> inputs = {head_part(s.inputs.left, m * shape.rank), head_part(s.inputs.right, m * shape.rank),
                                    head_part(s.inputs.outer, shape.outer * shape.outer),
                                    head_part(s.inputs.inner, shape.inner * shape.inner)};
    backward ? pack_factors_backward<T>(shape, inputs, to.factors) : pack_factors<T>(shape, inputs, to.factors);
  } else {
    for (int64_t plane = 0; plane < s.sizes.planes; ++plane) {
      const T* weight = s.inputs.weight + (head * s.sizes.planes + plane) * 2 * m * s.sizes.depth;
      T* panels = to.panels + plane * Weights::plane_entries(s);
      backward ? pack_backward<T>(weight, m, s.sizes.depth, panels)
               : pack_forward<T>(weight, m, s.sizes.depth, panels, to.for_matvec);
    }
  }
}

// Compute p and q of the first `rows` rows of the source.
INLINE void project(const Task& task, const Weights& by, int64_t rows, T* out, Prefetcher* prefetcher = nullptr) {
  const int64_t depth = task.s.sizes.depth, pad = task.pad(), halves = task.halves();
  const Rows<const T> source = task.source_rows();
  if (is_factored(task.s))
    factored_forward<T>(factor_shape(task.s), by.factors, rows, source, task.factor_scratch, out);
  else if (by.for_matvec)
    for (int64_t plane = 0; plane < task.s.sizes.planes; ++plane)
      matvec<T>(source.data, depth, by.panels + plane * Weights::plane_entries(task.s), 2 * pad / panel_width<T>,
                out + plane * 2 * pad);
  else
    for (int64_t plane = 0; plane < task.s.sizes.planes; ++plane)
      matmul<T, false>(rows, source, {depth, 0, 0},
                       {by.panels + plane * Weights::plane_entries(task.s), 2 * pad / panel_width<T>},
                       {out + plane * 2 * pad, halves * pad}, plane ? nullptr : prefetcher);
  if (!task.s.inputs.bias) return;
  for (int64_t r = 0; r < rows; ++r, out += halves * pad)
    for (int64_t i = 0; i < halves * pad; i += lanes<T>) store<T>(out + i, load<T>(out + i) + load<T>(task.bias + i));
}

// Add K'gp + V'gq, through the source, to task.previous_g, or to the gradient of the whole state; gp and gq of the rows
// of a step are at `gradients`, and the states of the step at `x`.
INLINE void project_backward(const Task& task, const Weights& transposed, const T* gradients, const T* x,
                             Prefetcher* prefetcher) {
  const int64_t m = task.m, pad = task.pad(), out_pad = padded_size<T>(task.s.sizes.depth),
                planes = task.s.sizes.planes;
  const Ranges both = {m, pad - m, m};
  const Rows<const T> g = {gradients, task.gradient_stride()};
  auto add_plane = [&](int64_t plane, T* to, Prefetcher* queue) {
    matmul<T, true>(task.rows, {g.data + plane * 2 * pad, g.stride}, both,
                    {transposed.panels + plane * Weights::plane_entries(task.s), out_pad / panel_width<T>},
                    {to, out_pad}, queue);
  };
  if (task.s.options.source == identity && !is_factored(task.s)) {
    T* const to = task.whole ? task.whole->gradients : task.previous_g;
    for (int64_t plane = 0; plane < planes; ++plane) add_plane(plane, to, plane ? nullptr : prefetcher);
    return;
  }
  if (is_factored(task.s))
    factored_backward<T>(factor_shape(task.s), transposed.factors, task.rows, g, task.factor_scratch, task.scratch);
  else
    matmul<T, false>(task.rows, g, both, {transposed.panels, pad / panel_width<T>}, {task.scratch, pad});
  for (int64_t plane = 1; plane < planes; ++plane) add_plane(plane, task.scratch, nullptr);
  for (int64_t r = 0; r < task.rows; ++r)
    for (int64_t i = 0; i < pad; i += lanes<T>)
      add_vector(task.previous_g + r * pad + i,
                 mask_by_source(task.s.options, load<T>(x + r * task.x_stride() + i),
                                load<T>(task.scratch + r * pad + i)));
}

// Add the gradients of K and V, or of the bias, from gp and gq of the first `rows` rows.
inline void add_weight_gradients(const Task& task, int64_t rows) {
  const int64_t pad = task.pad(), source_pad = padded_size<T>(task.s.sizes.depth);
  for (int64_t half = 0; half < task.halves(); ++half)
    add_outer_products<T>(rows, {task.gradients + half * pad, task.gradient_stride()}, task.m,
                          task.source_rows(), source_pad / panel_width<T>,
                          {task.weight_sums + half * pad * source_pad, source_pad});
}
inline void add_bias_gradients(const Task& task, int64_t rows) {
  double* const totals = task.sums.totals + task.sums.bias * task.pad();
  for (int64_t i = 0; i < task.halves() * task.pad(); i += lanes<T>) {
    Vec<T> sum = {};
    for (int64_t r = 0; r < rows; ++r) sum += load<T>(task.gradients + r * task.gradient_stride() + i);
    for (int64_t l = 0; l < lanes<T>; ++l) totals[i + l] += sum[l];
  }
}

// Entries of the weight gradients that one thread accumulates: (heads, halves, pad, pad of the source).
inline int64_t weight_sum_size(const Scan& s) {
  const int64_t pad = padded_size<T>(s.sizes.size), source_pad = padded_size<T>(s.sizes.depth);
  return has_weights(s) ? s.sizes.heads * half_count(s) * pad * source_pad : 0;
}
// Sum the weight gradients over the threads; zero if `sums` is null, because there is no rotation.
inline void reduce_weight_gradients(const Scan& s, const T* sums) {
  const int64_t m = s.sizes.size, depth = s.sizes.depth, pad = padded_size<T>(m), source_pad = padded_size<T>(depth);
  T* to = s.gradients.weight;
  for (int64_t part = 0; part < half_count(s) * s.sizes.heads; ++part)
    for (int64_t i = 0; i < m; ++i, to += depth) {
      std::memset(to, 0, depth * sizeof(T));
      for (int64_t thread = 0; sums && thread < s.sizes.threads; ++thread)
        add_row<T>(sums + thread * weight_sum_size(s) + (part * pad + i) * source_pad, depth, to);
    }
}

}  // namespace
