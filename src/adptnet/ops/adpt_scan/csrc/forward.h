// The forward: all steps of a task.
//
// Letters as in plane.h, sizes and indices as in task.h; l is a row of a group, or a lane of a SIMD vector.

#pragma once

#include "product.h"

namespace {

// With at least this many rows per tile the stride defeats the hardware prefetcher, so prefetch in software.
constexpr int64_t min_prefetch_rows = 4;

// The vectors of a row: p and q, the drive, the state, and the row of the caller that the new state is written to. The
// drive and `state` are not padded.
struct ForwardVectors {
  const T *p, *q, *u;
  T *x, *state;
};

// x <- L (x + y1 p + y2 q) + m1 p + m2 q + u, with the scalars of p and q.
template <bool Pairs>
INLINE void update_state(const Spectrum<T> spectrum, int64_t size, const ForwardVectors at, RotationScalars<T> by) {
  const T *p = at.p, *q = at.q, *u = at.u;
  T *x = at.x, *state = at.state;
  auto next = [&](int64_t i, Vec<T> u_i) {
    const Vec<T> p_i = load<T>(p + i), q_i = load<T>(q + i), x_i = load<T>(x + i);
    if constexpr (Pairs) {
      return apply_lambda<T, true>(spectrum, i, x_i + by.y1 * p_i + by.y2 * q_i) + (by.m1 * p_i + by.m2 * q_i) + u_i;
    } else {
      const Vec<T> real = load<T>(spectrum.real + i);
      return (real * x_i + u_i) + (real * by.y1 + by.m1) * p_i + (real * by.y2 + by.m2) * q_i;
    }
  };
  const int64_t whole = size / lanes<T> * lanes<T>;
  int64_t i = 0;
  for (; i < whole; i += lanes<T>) {
    Vec<T> value = next(i, load<T>(u + i));
    store<T>(x + i, value);
    store<T>(state + i, value);
  }
  if (i == size) return;
  Vec<T> u_i = {};
  for (int64_t l = 0; i + l < size; ++l) u_i[l] = u[i + l];
  Vec<T> value = next(i, u_i);
  store<T>(x + i, value);
  for (int64_t l = 0; i + l < size; ++l) state[i + l] = value[l];
}
// Step `count` rows from `first` on. Their scalars are vectorised over the batch: one row (N = T) or one per lane.
template <class N, bool Pairs>
void forward_rows(const Task& task, const T* directions, T* dots, int64_t first, int count, int64_t t) {
  const Scan& s = task.s;
  const Spectrum<T> spectrum = task.spectrum();
  const bool rotates = s.options.rotates, copied = copies_drive(s.options);
  Group<T, N> group;
  RotationScalars<N> by = {};
  if (rotates) {
    const GroupMemory<T> memory = {dots + first * dot_count, false, task.scratch + first * 2 * task.pad()};
    compute_directions<T, N, Pairs>(spectrum, row_vectors(task, directions, task.x, first), count, task.pad(), memory,
                                    group);
    by = scalars_of_projections<N>(
        group, rotation_scalars<N>(s.options.retraction, group.plane, load_betas<N>(task, first, count, t)));
  }
  for (int l = 0; l < count; ++l) {
    const int64_t r = first + l;
    T *x = task.x + r * task.x_stride(), *state = task.state_row(r, t);
    if (task.has_ended(r, t)) {
      std::memset(state, 0, task.m * sizeof(T));
      if (task.slow.is_on) std::memset(state + task.n, 0, task.m * sizeof(T));
      continue;
    }
    const T* u = copied ? task.u + r * task.pad() : task.drive_row(r, t);
    const T* later = task.phase.is_on && !s.options.rotation_aware ? u : nullptr;
    if (later) u = task.phase.none;
    if (rotates && !group.no_rotation[l])
      update_state<Pairs>(spectrum, task.m, {group.p[l], group.q[l], u, x, state},
                          {lane(by.y1, l), lane(by.y2, l), lane(by.m1, l), lane(by.m2, l)});
    else  // Q = I: p and q are multiplied by zero, so any finite vectors do
      update_state<Pairs>(spectrum, task.m, {task.real, task.real, u, x, state}, {0, 0, 0, 0});
    if (task.phase.is_on)
      task.phase.forward(s.inputs.drive + task.row_index(r, t) * s.sizes.features + task.phase_offset(), later, x,
                         state);
    if (task.slow.is_on) task.slow.forward(r, x, state + task.n);
    update_source(task, r);
  }
}

// Several planes: step `count` rows from `first` on.
template <class N, bool Pairs>
void forward_product_rows(const Task& task, const T* directions, int64_t first, int count, int64_t t) {
  const Scan& s = task.s;
  const bool copied = copies_drive(s.options), aware = s.options.rotation_aware;
  rotate_states<N, Pairs>(task, directions, first, count, t);
  for (int64_t r = first; r < first + count; ++r) {
    T *x = task.x + r * task.x_stride(), *state = task.state_row(r, t);
    if (task.has_ended(r, t)) {
      set_zero(x, task.pad());
      std::memset(state, 0, task.m * sizeof(T));
      if (task.slow.is_on) std::memset(state + task.n, 0, task.m * sizeof(T));
      continue;
    }
    const T* u = copied ? task.u + r * task.pad() : task.drive_row(r, t);
    if (task.phase.is_on) {
      task.phase.forward(s.inputs.drive + task.row_index(r, t) * s.sizes.features + task.phase_offset(),
                         aware ? nullptr : u, x, state);
    } else {
      if (!aware) add_row<T>(u, task.m, x);
      store_row<T>(x, task.m, state);
    }
    if (task.slow.is_on) task.slow.forward(r, x, state + task.n);
    update_source(task, r);
  }
}

// Load the initial states.
inline void load_initial(const Task& task) {
  for (int64_t r = 0; r < task.rows; ++r) {
    const T* from = task.state_row_before(r, 0);
    load_row<T>(from, task.m, task.x + r * task.x_stride(), task.pad());
    if (task.slow.is_on) task.slow.set_row(r, from + task.n);
    update_source(task, r);
  }
}

// Set the states to zero where step t has a reset.
inline void reset_states(const Task& task, int64_t t) {
  if (!task.s.inputs.reset) return;
  for (int64_t r = 0; r < task.rows; ++r) {
    if (!task.is_reset(r, t)) continue;
    set_zero(task.x + r * task.x_stride(), task.pad());
    if (task.slow.is_on) task.slow.reset(r);
    update_source(task, r);
  }
}

// Queue the rows that step t + 1 reads and writes.
inline void queue_next_step(const Task& task, int64_t t, Prefetcher& prefetcher) {
  const Sizes& sizes = task.s.sizes;
  prefetcher.clear();
  if (task.rows < min_prefetch_rows || t + 1 >= sizes.steps) return;
  prefetcher.add(task.drive_row(0, t + 1), task.m, task.rows, sizes.steps * sizes.features);
  prefetcher.add(task.state_row(0, t + 1), task.m, task.rows, sizes.steps * sizes.width);
  if (!task.s.outputs.projections) return;
  prefetcher.add(task.projections_at(t + 1), task.rows * task.halves() * task.pad());
  prefetcher.add(task.dots_at(t + 1), task.rows * dot_count);
}

// Step all rows of a tile.
template <bool Pairs> INLINE void forward_step(const Task& task, T* projections, int64_t t) {
  T* const dots = task.dots_at(t);
  const DirectionRows directions(task, projections);
  for (int64_t r = 0; copies_drive(task.s.options) && r < task.rows; ++r) load_drive<Pairs>(task, r, t);
  for (int64_t first = 0; first < task.rows; first += lanes<T>) {
    const int count = std::min<int64_t>(lanes<T>, task.rows - first);
    if (is_product(task.s))
      count == 1 ? forward_product_rows<T, Pairs>(task, directions.final, first, count, t)
                 : forward_product_rows<Vec<T>, Pairs>(task, directions.final, first, count, t);
    else
      count == 1 ? forward_rows<T, Pairs>(task, directions.final, dots, first, count, t)
                 : forward_rows<Vec<T>, Pairs>(task, directions.final, dots, first, count, t);
  }
}

template <bool Pairs> void run_forward(const Task& task, const Weights& weights) {
  const Scan& s = task.s;
  load_initial(task);
  Prefetcher prefetcher;
  for (int64_t t = 0; t < s.sizes.steps; ++t) {
    reset_states(task, t);
    queue_next_step(task, t, prefetcher);
    T* const projections = task.projections_at(t);
    if (has_weights(s))
      project(task, weights, task.rows, projections, &prefetcher);
    else if (s.options.rotates)
      load_given_directions(task, t, projections);
    prefetcher.issue_rest();
    forward_step<Pairs>(task, projections, t);
  }
}

}  // namespace
