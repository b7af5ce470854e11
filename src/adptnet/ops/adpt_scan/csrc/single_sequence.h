// The forward of a single sequence of the basic recurrence. No other row hides the latency of a step, so this loop
// skips every test and copy of the general one, and its weights are packed in the order in which one row reads them.
//
// Letters as in plane.h, sizes and indices as in task.h.

#pragma once

#include "forward.h"

namespace {

INLINE bool is_single_sequence(const Scan& s) {
  const Options& o = s.options;
  return s.sizes.tile == 1 && !is_product(s) && o.rotates && o.source == identity &&
         !(o.directions_in_drive || o.beta_in_drive || o.has_norm || o.has_fixed_dot || o.rotation_aware ||
           o.phased || o.slow_memory || is_factored(s) || s.inputs.bias || s.inputs.lengths);
}

template <bool Pairs> void run_single_sequence(const Task& task, const Weights& weights) {
  const Scan& s = task.s;
  const int64_t m = task.m, pad = task.pad(), panels = 2 * pad / panel_width<T>;
  const Spectrum<T> spectrum = task.spectrum();
  const T beta = s.inputs.beta[task.head], *u = task.drive_row(0, 0);
  T *const x = task.x, *state = task.state_row(0, 0);
  T *const projections = task.projections_at(0), *const all_dots = task.dots_at(0);
  const int64_t saved_rows = s.outputs.projections ? s.sizes.batch : 0;  // from one step to the next
  load_row<T>(task.state_row_before(0, 0), m, x, pad);
  for (int64_t t = 0; t < s.sizes.steps; ++t) {
    if (task.is_reset(0, t)) set_zero(x, pad);
    T *const p = projections + t * saved_rows * 2 * pad, *const dots = all_dots + t * saved_rows * dot_count;
    matvec<T>(x, m, weights.panels, panels, p);
    Group<T, T> group;
    auto at = [&](int) -> RowVectors<T> { return {p, x, nullptr}; };
    compute_directions<T, T, Pairs>(spectrum, at, 1, pad, {dots, false, task.scratch}, group);
    if (group.no_rotation[0])  // Q = I: p and q are multiplied by zero, so any finite vectors do
      update_state<Pairs>(spectrum, m, {task.real, task.real, u, x, state}, {0, 0, 0, 0});
    else
      update_state<Pairs>(
          spectrum, m, {group.p[0], group.q[0], u, x, state},
          scalars_of_projections<T>(group, rotation_scalars<T>(s.options.retraction, group.plane, beta)));
    u += s.sizes.features;
    state += s.sizes.width;
  }
}

}  // namespace
