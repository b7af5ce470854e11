// The backward: all steps of a task, from the last to the first.
//
// Steps are processed in blocks (`steps_per_block`): the states of a block are loaded at once, its projections are one
// product if they were not saved, and so is its contribution to the gradients of K and V.
//
// Letters as in plane.h, in particular
//   g, previous_g   the gradients with respect to the states after and before the step
//   gp, gq          those with respect to the projections, in `gradients`
// Sizes and indices as in task.h; l is a row of a group, or a lane of a SIMD vector.

#pragma once

#include "forward.h"

namespace {

// ---- One row --------------------------------------------------------------------------------------------------------

// The vectors of a row. p and q are null without a rotation; u is null unless the drive is rotated with the state, and
// is replaced by the gradient of the drive.
struct BackwardVectors {
  const T *p, *q, *x, *g;
  T *u, *previous_g, *gradients;
};

// A row without a rotation (Q = I).
template <bool Pairs> void backward_identity(const Task& task, const BackwardVectors& at) {
  const Spectrum<T> spectrum = task.spectrum();
  const int64_t pad = task.pad();
  for (int64_t i = 0; i < pad; i += lanes<T>) {
    Vec<T> g_i = load<T>(at.g + i);
    store<T>(at.previous_g + i, apply_lambda_transposed<T, Pairs>(spectrum, i, g_i));
    add_spectrum_gradient<Pairs>(task.sums.vector(real_sum), pad, i, g_i, load<T>(at.x + i));
    if (at.u) store<T>(at.u + i, g_i);
  }
  set_zero(at.gradients, task.halves() * pad);
}

// A row with a rotation: compute gp, gq and previous_g, without K'gp + V'gq. The scales are 1/|p| and 1/|q|.
template <bool Pairs>
INLINE void backward_rotation(const Task& task, const BackwardVectors at, const GradientScalars<T>& by, T key_scale,
                              T value_scale) {
  const Spectrum<T> spectrum = task.spectrum();
  T* const spectrum_sums = task.sums.vector(real_sum);
  const int64_t pad = task.pad();
  for (int64_t i = 0; i < pad; i += lanes<T>) {
    const Vec<T> g_i = load<T>(at.g + i), x_i = load<T>(at.x + i), p_i = load<T>(at.p + i), q_i = load<T>(at.q + i);
    const Vec<T> Qx = x_i + by.x_on_p * p_i + by.x_on_q * q_i, Qg = g_i + by.g_on_p * p_i + by.g_on_q * q_i;
    const Vec<T> LtQg = apply_lambda_transposed<T, Pairs>(spectrum, i, Qg);
    Vec<T> LQx = apply_lambda<T, Pairs>(spectrum, i, Qx);
    if (at.u) {
      LQx += load<T>(at.u + i);
      store<T>(at.u + i, Qg);
    }
    store<T>(at.previous_g + i, LtQg + by.state_on_p * p_i + by.state_on_q * q_i);
    // Multiply by 1/|p| and 1/|q| last: terms multiplied by both could overflow or underflow.
    store<T>(at.gradients + i, key_scale * (by.key_LtQg * LtQg + by.key_LQx * LQx + by.key_g * g_i + by.key_x * x_i +
                                            by.key_p * p_i + by.key_q * q_i));
    store<T>(at.gradients + pad + i, value_scale * (by.value_LtQg * LtQg + by.value_LQx * LQx + by.value_g * g_i +
                                                    by.value_x * x_i + by.value_p * p_i + by.value_q * q_i));
    add_spectrum_gradient<Pairs>(spectrum_sums, pad, i, Qg, Qx);
  }
}

// Variant: add the remainder of a Taylor polynomial, which is not a rotation.
template <bool Pairs>
void backward_taylor_remainder(const Task& task, const BackwardVectors& at, const GradientScalars<T>& by,
                               const Row<T>& row) {
  const Spectrum<T> spectrum = task.spectrum();
  const int64_t pad = task.pad();
  const T c = row.cosine, x_on_k = by.rest_x_on_k, x_on_w = by.rest_x_on_w, g_on_k = by.rest_g_on_k,
          g_on_w = by.rest_g_on_w;
  for (int64_t i = 0; i < pad; i += lanes<T>) {
    const Vec<T> g_i = load<T>(at.g + i), x_i = load<T>(at.x + i), k = row.on_p * load<T>(row.p + i);
    const Vec<T> w = row.on_q * load<T>(row.q + i) + row.on_k * k;
    const Vec<T> Ltg = apply_lambda_transposed<T, Pairs>(spectrum, i, g_i),
                 Lx = apply_lambda<T, Pairs>(spectrum, i, x_i);
    const Vec<T> rest_g = g_on_k * k + g_on_w * w;
    add_vector(at.previous_g + i, apply_lambda_transposed<T, Pairs>(spectrum, i, rest_g));
    add_vector(at.gradients + i, row.key_scale * ((x_on_k - c * x_on_w) * Ltg + (g_on_k - c * g_on_w) * Lx));
    add_vector(at.gradients + pad + i, row.value_scale * (x_on_w * Ltg + g_on_w * Lx));
    add_spectrum_gradient<Pairs>(task.sums.vector(real_sum), pad, i, g_i, x_on_k * k + x_on_w * w);
    add_spectrum_gradient<Pairs>(task.sums.vector(real_sum), pad, i, rest_g, x_i);
  }
}

// ---- One step -------------------------------------------------------------------------------------------------------

// The rows of a tile at step t, in a block of steps.
struct BackwardStep {
  int64_t t;
  const T* x;        // states before the step, x_stride apart
  T* gradients;      // gp and gq, gradient_stride apart
  DirectionRows rows;
  GroupMemory<T> memory;
};

// Backward of the variants of row r, after that of its rotation: from the gradients of the directions to gp and gq, and
// from that of the drive, `u_gradient`, to the caller's tensors and the slow memory.
template <bool Pairs>
INLINE void backward_variants(const Task& task, const BackwardStep& step, int64_t r, T* gradients, const T* u_gradient,
                              T beta_gradient) {
  const Scan& s = task.s;
  T* to_drive = s.gradients.drive + task.row_index(r, step.t) * s.sizes.features;
  for (int64_t plane = 0; task.fixed_dot.is_on && plane < s.sizes.planes; ++plane)
    task.fixed_dot.backward(step.rows.normalized, r * s.sizes.planes + plane, gradients + plane * 2 * task.pad());
  if (task.norm.is_on) task.norm.backward(step.rows.projections, r, gradients, task.sums);
  if (s.options.beta_in_drive)
    to_drive[s.sizes.features - 1] = beta_gradient;
  else
    task.sums.totals[beta_sum] += beta_gradient;
  store_row<T>(u_gradient, task.m, to_drive + task.offset);
  for (int64_t half = 0; s.options.directions_in_drive && half < task.halves(); ++half)
    store_row<T>(gradients + half * task.pad(), task.m, to_drive + (1 + half) * task.n + task.offset);
  if (task.slow.is_on) task.slow.backward_feed<Pairs>(r, u_gradient, task.sums);
}

// The backward of `count` rows from `first` on; the counterpart of `forward_rows`.
template <class N, bool Pairs>
void backward_rows(const Task& task, const BackwardStep& step, int64_t first, int count) {
  const Options& options = task.s.options;
  const int64_t pad = task.pad();
  const T* const g = task.phase.is_on ? task.phase.gradients : task.g;  // with respect to the result of M
  Group<T, N> group;
  GradientScalars<T> by[rows_per<N>];
  if (options.rotates) {
    const GroupMemory<T> memory = {step.memory.dots + first * dot_count, step.memory.dots_known,
                                   step.memory.scratch + first * 2 * pad};
    compute_directions<T, N, Pairs>(task.spectrum(), row_vectors(task, step.rows.final, step.x, first), count, pad,
                                    memory, group);
    T each[rows_per<N>][dot_with_g_count];
    for (int l = 0; l < count; ++l)
      compute_dots_with_g<T, Pairs>(task.spectrum(), group.p[l], group.q[l], g + (first + l) * pad, pad, each[l]);
    N with_g[dot_with_g_count];
    transpose_rows<T, dot_with_g_count>(each[0], count, with_g);
    const N betas = load_betas<N>(task, first, count, step.t);
    split_lanes<T>(gradient_scalars<N>(options.retraction, group, betas, with_g), by);
  }
  for (int l = 0; l < count; ++l) {
    const int64_t r = first + l;
    BackwardVectors at = {nullptr,
                          nullptr,
                          step.x + r * task.x_stride(),
                          g + r * pad,
                          options.rotation_aware ? task.u + r * pad : nullptr,
                          task.previous_g + r * pad,
                          step.gradients + r * task.gradient_stride()};
    const bool rotated = options.rotates && !group.no_rotation[l] && !task.has_ended(r, step.t);
    if (rotated) {
      at.p = group.p[l];
      at.q = group.q[l];
      backward_rotation<Pairs>(task, at, by[l], lane(group.key_scale, l), lane(group.value_scale, l));
      if (options.retraction >= taylor_one) backward_taylor_remainder<Pairs>(task, at, by[l], get_row(group, l));
    } else {
      backward_identity<Pairs>(task, at);
    }
    backward_variants<Pairs>(task, step, r, at.gradients, at.u ? at.u : task.g + r * pad, rotated ? by[l].beta : T(0));
  }
}

// Several planes: the counterpart of `forward_product_rows`.
template <class N, bool Pairs>
void backward_product_rows(const Task& task, const BackwardStep& step, int64_t first, int count) {
  const T* const g = task.phase.is_on ? task.phase.gradients : task.g;  // with respect to the result of M
  const T* const u_gradient = task.s.options.rotation_aware ? task.u : task.g;
  T beta_gradients[rows_per<N>];
  rotate_states_backward<N, Pairs>(task, step.rows.final, step.x, g, step.gradients, first, count, step.t,
                                   beta_gradients);
  for (int64_t r = first; r < first + count; ++r)
    backward_variants<Pairs>(task, step, r, step.gradients + r * task.gradient_stride(), u_gradient + r * task.pad(),
                             beta_gradients[r - first]);
}

// Variant: the backward of the phase of row r, from the complete gradient of the state after step t.
inline void backward_phase(const Task& task, int64_t r, int64_t t) {
  const Scan& s = task.s;
  const int64_t at = task.row_index(r, t) * s.sizes.features + task.phase_offset();
  if (task.has_ended(r, t))
    task.phase.backward_ended(r, s.gradients.drive + at);
  else
    task.phase.backward(r, s.inputs.drive + at, s.options.rotation_aware ? nullptr : task.u + r * task.pad(),
                        task.state_row(r, t), task.g + r * task.pad(), s.gradients.drive + at);
}

// Add the gradients of the states at step t to task.g, which is zero after the end of a sequence; and load the drive
// where it is needed.
template <bool Pairs> void add_state_gradients(const Task& task, int64_t t) {
  const Scan& s = task.s;
  for (int64_t r = 0; r < task.rows; ++r) {
    T* g = task.g + r * task.pad();
    const T* incoming = s.state_gradients + task.row_index(r, t) * s.sizes.width + task.offset;
    if (task.has_ended(r, t))
      set_zero(g, task.pad());
    else
      add_row<T>(incoming, task.m, g);
    if (task.slow.is_on) {
      T* slow_g = task.slow.gradients + r * task.pad();
      if (task.has_ended(r, t))
        set_zero(slow_g, task.pad());
      else
        add_row<T>(incoming + task.n, task.m, slow_g);
      if (task.is_reset(r, t))
        task.slow.reset(r);
      else
        task.slow.set_row(r, task.state_row_before(r, t) + task.n);
      task.slow.backward(r, task.state_row(r, t), g, task.sums);
    }
    if (s.options.rotation_aware || task.phase.is_on) load_drive<Pairs>(task, r, t);
    if (task.phase.is_on) backward_phase(task, r, t);
  }
}

// Queue the rows of earlier steps: time runs backwards, which defeats the hardware prefetcher.
inline void queue_earlier_steps(const Task& task, const BackwardStep& step, int64_t block_steps,
                                Prefetcher& prefetcher) {
  const Scan& s = task.s;
  const int64_t t = step.t, distance = task.rows < 8 ? 16 / task.rows : 1;  // in steps
  const int64_t state_stride = s.sizes.steps * s.sizes.width, drive_stride = s.sizes.steps * s.sizes.features;
  prefetcher.clear();
  if (t > block_steps) prefetcher.add(task.state_row(0, t - block_steps - 1), task.m, task.rows, state_stride);
  if (t <= distance) return;
  const int64_t earlier = task.row_index(0, t - distance);
  prefetcher.add(s.state_gradients + earlier * s.sizes.width + task.offset, task.m, task.rows, state_stride);
  prefetcher.add(s.gradients.drive + earlier * s.sizes.features + task.offset, task.m, task.rows, drive_stride);
  if (!step.memory.dots_known) return;  // not saved
  prefetcher.add(task.projections_at(t - distance), task.rows * task.halves() * task.pad());
  if (task.rows >= min_prefetch_rows) prefetcher.add(task.dots_at(t - distance), task.rows * dot_count);
}

template <bool Pairs> INLINE void backward_rows_of_step(const Task& task, const BackwardStep& step) {
  for (int64_t first = 0; first < task.rows; first += lanes<T>) {
    const int count = std::min<int64_t>(lanes<T>, task.rows - first);
    if (is_product(task.s))
      count == 1 ? backward_product_rows<T, Pairs>(task, step, first, count)
                 : backward_product_rows<Vec<T>, Pairs>(task, step, first, count);
    else
      count == 1 ? backward_rows<T, Pairs>(task, step, first, count)
                 : backward_rows<Vec<T>, Pairs>(task, step, first, count);
  }
}
// Make the gradient with respect to the state before step t that of the state after step t - 1.
INLINE void finish_step(Task& task, int64_t t) {
  std::swap(task.g, task.previous_g);
  for (int64_t r = 0; task.s.inputs.reset && r < task.rows; ++r) {
    if (!task.is_reset(r, t)) continue;
    set_zero(task.g + r * task.pad(), task.pad());
    if (task.slow.is_on) set_zero(task.slow.gradients + r * task.pad(), task.pad());
  }
}

// The backward of every row of a step. On return task.g is the gradient with respect to the state before it.
template <bool Pairs>
void step_backward(Task& task, const Weights& transposed, const BackwardStep& step, Prefetcher& prefetcher) {
  add_state_gradients<Pairs>(task, step.t);
  backward_rows_of_step<Pairs>(task, step);
  if (has_weights(task.s)) project_backward(task, transposed, step.gradients, step.x, &prefetcher);
  prefetcher.issue_rest();
  finish_step(task, step.t);
}

// ---- All steps ------------------------------------------------------------------------------------------------------

// Load the states before `count` steps, from step `last` backwards, and their sources.
inline void load_states(const Task& task, int64_t last, int64_t count) {
  for (int64_t i = 0; i < count * task.rows; ++i) {
    const int64_t t = last - i / task.rows, r = i % task.rows;
    T* x = task.x + i * task.x_stride();
    if (task.is_reset(r, t))
      set_zero(x, task.pad());
    else
      load_row<T>(task.state_row_before(r, t), task.m, x, task.pad());
    update_source(task, i);
  }
}

// Clear the gradients that are accumulated over time.
inline void clear_gradients(Task& task) {
  task.sums.clear_partial();
  set_zero(task.g, task.rows * task.pad());
  if (task.slow.is_on) set_zero(task.slow.gradients, task.rows * task.pad());
}
// Add the contribution of a block of steps to the gradients of K and V.
inline void add_block_gradients(const Task& task, int64_t rows) {
  if (has_weights(task.s) && task.s.gradients.weight) add_weight_gradients(task, rows);
  if (has_weights(task.s) && task.s.gradients.bias) add_bias_gradients(task, rows);
}
inline void store_initial_gradients(const Task& task) {
  for (int64_t r = 0; r < task.rows; ++r) {
    T* to = task.s.gradients.state + (task.begin + r) * task.s.sizes.width + task.offset;
    std::memcpy(to, task.g + r * task.pad(), task.m * sizeof(T));
    if (task.slow.is_on) std::memcpy(to + task.n, task.slow.gradients + r * task.pad(), task.m * sizeof(T));
  }
}

template <bool Pairs> void run_backward(Task& task, const Weights& weights, const Weights& transposed) {
  const Scan& s = task.s;
  const int64_t pad = task.pad(), block_steps = steps_per_block(s, task.rows),
                partial_sum_steps = std::max<int64_t>(1, partial_sum_rows / task.rows);
  const bool weighted = has_weights(s), saved = weighted && s.outputs.projections;
  clear_gradients(task);
  Prefetcher prefetcher;
  for (int64_t last = s.sizes.steps - 1; last >= 0; last -= block_steps) {
    const int64_t count = std::min(block_steps, last + 1);
    load_states(task, last, count);
    if (weighted && !saved) project(task, weights, count * task.rows, task.projections);
    if (s.options.directions_in_drive) load_given_directions(task, last, task.projections);  // blocks of one step
    for (int64_t t = last, row = 0; t > last - count; --t, row += task.rows) {
      const T* projections = saved ? task.projections_at(t) : task.projections + row * task.halves() * pad;
      const BackwardStep step = {t, task.x + row * task.x_stride(), task.gradients + row * task.gradient_stride(),
                                 DirectionRows(task, projections), {task.dots_at(t), saved, task.scratch}};
      queue_earlier_steps(task, step, block_steps, prefetcher);
      step_backward<Pairs>(task, transposed, step, prefetcher);
      if (t % partial_sum_steps == 0) task.sums.add_partial_to_totals();
    }
    add_block_gradients(task, count * task.rows);
  }
  if (s.gradients.state) store_initial_gradients(task);
}

}  // namespace
