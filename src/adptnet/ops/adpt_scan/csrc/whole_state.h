// Planes of the whole state: K and V of a head act on the states of all heads. So the heads of a tile take each step
// together, on one thread, and the source of the products is a copy of their states in one row.
//
// Letters as in plane.h, sizes and indices as in task.h.

#pragma once

#include "backward.h"

namespace {

using Heads = std::vector<Task>;  // the tasks of all heads of a tile

// Copy the states of all heads, rows first to first + count of each task, to the source.
inline void gather_states(const Heads& heads, int64_t count) {
  const WholeState& whole = *heads[0].whole;
  for (int64_t i = 0; i < count; ++i) {
    T* to = whole.x + i * whole.stride;
    for (const Task& task : heads) std::memcpy(to + task.offset, task.x + i * task.x_stride(), task.m * sizeof(T));
    for (int64_t at = heads[0].n; at < padded_size<T>(heads[0].n); ++at) to[at] = 0;
  }
}

// Compute |x| of the rows of a step, whose states are at `x`. A vector that counts as zero has length zero.
inline void compute_lengths(const Heads& heads, const T* x) {
  const Task& task = heads[0];
  const WholeState& whole = *task.whole;
  const int64_t pad = padded_size<T>(task.n);
  for (int64_t r = 0; r < task.rows; ++r, x += whole.stride) {
    const T squared = dot(x, x, pad);
    T inverse = 0;
    whole.length[r] = std::sqrt(squared);
    if (!is_in_range(squared)) whole.length[r] = normalize<T>(x, whole.scratch, pad, inverse) ? 1 / inverse : inverse;
  }
}

template <bool Pairs> void run_forward_together(const Heads& heads, const std::vector<Weights>& weights) {
  const Task& first_head = heads[0];
  const Scan& s = first_head.s;
  for (const Task& task : heads) load_initial(task);
  for (int64_t t = 0; t < s.sizes.steps; ++t) {
    for (const Task& task : heads) reset_states(task, t);
    gather_states(heads, first_head.rows);
    compute_lengths(heads, first_head.whole->x);
    for (const Task& task : heads) {
      T* const projections = task.projections_at(t);
      project(task, weights[task.head], task.rows, projections);
      forward_step<Pairs>(task, projections, t);
    }
  }
}

// Add the gradient with respect to the whole state, through K and V and through |x|, to that of each head.
inline void add_whole_gradients(const Heads& heads, const T* x) {
  const WholeState& whole = *heads[0].whole;
  const int64_t pad = padded_size<T>(heads[0].n);
  for (int64_t r = 0; r < heads[0].rows; ++r) {
    const T length = whole.length[r], along = length > 0 ? whole.length_gradient[r] / length : T(0),
            inverse = length > 0 ? 1 / length : T(0);
    for (const Task& task : heads) {
      T* g = task.previous_g + r * task.pad();
      const T *from = whole.gradients + r * pad + task.offset, *x_r = x + r * whole.stride + task.offset;
      for (int64_t i = 0; i < task.m; ++i) g[i] += from[i] + along * (inverse * x_r[i]);
    }
  }
}

template <bool Pairs>
void run_backward_together(Heads& heads, const std::vector<Weights>& weights, const std::vector<Weights>& transposed) {
  const Task& first_head = heads[0];
  const Scan& s = first_head.s;
  const WholeState& whole = *first_head.whole;
  const int64_t rows = first_head.rows, block_steps = steps_per_block(s, rows),
                partial_sum_steps = std::max<int64_t>(1, partial_sum_rows / rows);
  for (Task& task : heads) clear_gradients(task);
  for (int64_t last = s.sizes.steps - 1; last >= 0; last -= block_steps) {
    const int64_t count = std::min(block_steps, last + 1);
    for (const Task& task : heads) load_states(task, last, count);
    gather_states(heads, count * rows);
    for (const Task& task : heads)
      if (!s.outputs.projections) project(task, weights[task.head], count * rows, task.projections);
    for (int64_t t = last, row = 0; t > last - count; --t, row += rows) {
      const T* const x = whole.x + row * whole.stride;
      compute_lengths(heads, x);
      set_zero(whole.gradients, rows * padded_size<T>(first_head.n));
      for (int64_t r = 0; r < rows; ++r) whole.length_gradient[r] = 0;
      for (Task& task : heads) {
        const T* projections = s.outputs.projections ? task.projections_at(t)
                                                     : task.projections + row * task.halves() * task.pad();
        const BackwardStep step = {t, task.x + row * task.x_stride(), task.gradients + row * task.gradient_stride(),
                                   DirectionRows(task, projections), {task.dots_at(t), false, task.scratch}};
        add_state_gradients<Pairs>(task, t);
        backward_rows_of_step<Pairs>(task, step);
        project_backward(task, transposed[task.head], step.gradients, step.x, nullptr);
      }
      add_whole_gradients(heads, x);
      for (Task& task : heads) {
        finish_step(task, t);
        if (t % partial_sum_steps == 0) task.sums.add_partial_to_totals();
      }
    }
    for (const Task& task : heads) add_block_gradients(task, count * rows);
  }
  for (const Task& task : heads)
    if (s.gradients.state) store_initial_gradients(task);
}

}  // namespace
