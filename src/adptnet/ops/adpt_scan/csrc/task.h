// A task: one head of a tile of sequences. It runs all steps of these sequences on one thread, so there are no
// barriers.
//
// In the memory of a task, state vectors are padded with zeros to `pad` entries, a whole number of panels. Tensors of
// the caller are not padded, except the saved projections, which only this kernel reads.
//
// Letters as in plane.h. Sizes and indices:
//   m, n, pad   the state dimension of a head, that of all heads, and m padded to whole cache lines
//   r, t        row of the tile and step; begin + r is the index in the batch, `offset` the first entry of the head
//   s           the arguments of the call, `struct Scan`

#pragma once

#include "factored.h"
#include "variants.h"

namespace {

INLINE FactorShape factor_shape(const Scan& s) { return {s.sizes.size, s.sizes.rank, s.sizes.outer, s.sizes.inner}; }

// The backward runs in blocks of steps. The weight gradients are accumulated once per block of this many rows: long
// enough for an efficient product, short enough to stay in cache.
constexpr int64_t block_rows = 64;
INLINE int64_t steps_per_block(const Scan& s, int64_t rows) {
  return has_weights(s) && rows < block_rows ? block_rows / rows : 1;
}

// With planes of the whole state: memory that the heads of a tile share, see whole_state.h.
struct WholeState {
  T* x;          // states of all heads, rows `stride` apart; in the backward those of a block of steps
  int64_t stride;
  T* gradients;  // (tile, pad of all heads): K'gp + V'gq of all heads
  T *length, *length_gradient;  // (tile): |x|, and the gradient with respect to its logarithm
  T* scratch;                   // (pad of all heads)

  void allocate(const Scan& s, bool backward, Arena<T>& memory) {
    const int64_t tile = s.sizes.tile, kept = backward && tile < block_rows ? block_rows : tile;
    const int64_t pad = padded_size<T>(s.sizes.depth);
    stride = row_stride<T>(pad);
    x = memory.allocate(kept * stride);
    for (T** scalars : {&length, &length_gradient}) *scalars = memory.allocate(tile);
    scratch = memory.allocate(pad);
    if (backward) gradients = memory.allocate(tile * pad);
  }
};

constexpr int64_t plane_rows_bytes = 1280;  // at least the size of `PlaneRows`

struct Task {
  const Scan& s;
  const int64_t head, begin, rows;  // rows: sequences of the tile
  const int64_t m, n, offset;

  T *real, *imag, *bias;  // bias: (halves, pad)
  T *x, *source;          // rows x_stride apart; in the backward those of a block of steps. source: what K and V see
  T* u;                   // (tile, pad), the drive where it has to be copied; in the backward also its gradient
  T *projections, *dots;  // of a step (in the backward, of a block), if they are not saved
  T* scratch;             // (tile, halves, pad)
  LayerNorm norm;
  FixedDot fixed_dot;
  SlowMemory slow;
  Phase phase;
  FactorScratch<T> factor_scratch;
  const WholeState* whole = nullptr;
  T* plane_rows;  // a step of product.h: the `PlaneRows` of each plane
  T* rotated;     // and, backward only: y_j, z_j, h_j and e_j of a group of rows, see product.h

  // Backward only.
  T *g, *previous_g;  // (tile, pad): gradients with respect to the states after and before the step
  T* gradients;       // gp and gq of the rows of a block, gradient_stride apart
  T* weight_sums;     // (halves, pad, pad), shared by the tasks of a thread
  Sums sums;

  Task(const Scan& s, int64_t head, int64_t begin, bool backward, Arena<T>& memory)
      : s(s),
        head(head),
        begin(begin),
        rows(std::min(s.sizes.tile, s.sizes.batch - begin)),
        m(s.sizes.size),
        n(s.sizes.heads * m),
        offset(head * m) {
    const int64_t tile = s.sizes.tile, pad = this->pad(), kept = backward && tile < block_rows ? block_rows : tile;
    for (T** vector : {&real, &imag}) *vector = memory.allocate(pad);
    bias = memory.allocate(halves() * pad);
    x = memory.allocate(kept * x_stride());
    source = s.options.source == identity ? x : memory.allocate(kept * x_stride());
    u = memory.allocate(tile * pad);
    projections = memory.allocate(kept * halves() * pad);
    dots = memory.allocate(tile * dot_count);
    scratch = memory.allocate(tile * halves() * pad);
    norm.allocate(s, memory);
    fixed_dot.allocate(s, memory);
    slow.allocate(s, backward, memory);
    phase.allocate(s, backward, memory);
    if (is_product(s)) {
      plane_rows = memory.allocate(s.sizes.planes * plane_rows_bytes / sizeof(T));
      if (backward) rotated = memory.allocate(4 * s.sizes.planes * lanes<T> * pad);
    }
    if (is_factored(s)) factor_scratch.allocate(factor_shape(s), kept, memory);
    if (!backward) return;
    for (T** vectors : {&g, &previous_g}) *vectors = memory.allocate(tile * pad);
    gradients = memory.allocate(kept * gradient_stride());
    sums.allocate(s, memory);
  }

  // Computed, not stored: the compiler then knows that `pad` is a whole number of vectors.
  int64_t pad() const { return padded_size<T>(m); }
  int64_t x_stride() const { return row_stride<T>(pad()); }
  int64_t gradient_stride() const { return row_stride<T>(halves() * pad()); }
  int64_t halves() const { return half_count(s); }
  // What K and V are applied to.
  Rows<const T> source_rows() const {
    return whole ? Rows<const T>{whole->x, whole->stride} : Rows<const T>{source, x_stride()};
  }

  void load_constants() {
    const int64_t pad = this->pad();
    copy_padded(s.inputs.real + offset, m, pad, real);
    copy_padded(s.inputs.imag ? s.inputs.imag + offset : nullptr, m, pad, imag);
    for (int64_t half = 0; half < halves(); ++half)
      copy_padded(s.inputs.bias ? s.inputs.bias + halves() * offset + half * m : nullptr, m, pad, bias + half * pad);
    if (norm.is_on) norm.load_constants(s);
    if (slow.is_on) slow.load_constants(s, head);
    if (phase.is_on) phase.load_constants();
  }

  Spectrum<T> spectrum() const { return {real, imag}; }

  // Rows of the caller's tensors at step t.
  int64_t row_index(int64_t r, int64_t t) const { return (begin + r) * s.sizes.steps + t; }
  const T* drive_row(int64_t r, int64_t t) const {
    return s.inputs.drive + row_index(r, t) * s.sizes.features + offset;
  }
  // The phase of the head in a row of the drive, or of its gradient.
  int64_t phase_offset() const { return n * (s.options.directions_in_drive ? 1 + halves() : 1) + offset; }
  T* state_row(int64_t r, int64_t t) const { return s.outputs.states + row_index(r, t) * s.sizes.width + offset; }
  // The state before step t, if there is no reset.
  const T* state_row_before(int64_t r, int64_t t) const {
    return t ? state_row(r, t - 1) : s.inputs.state + (begin + r) * s.sizes.width + offset;
  }
  bool is_reset(int64_t r, int64_t t) const { return s.inputs.reset && s.inputs.reset[row_index(r, t)]; }
  bool has_ended(int64_t r, int64_t t) const { return s.inputs.lengths && t >= s.inputs.lengths[begin + r]; }

  // The projections of the rows at step t, and their dot products: saved for the backward, or in the task's memory.
  T* projections_at(int64_t t) const {
    return s.outputs.projections ? s.outputs.projections + saved_row(t) * halves() * pad() : projections;
  }
  T* dots_at(int64_t t) const {
    const int64_t all_rows = s.sizes.heads * s.sizes.steps * s.sizes.batch;
    return s.outputs.projections ? s.outputs.projections + all_rows * halves() * pad() + saved_row(t) * dot_count
                                 : dots;
  }

 private:
  int64_t saved_row(int64_t t) const { return (head * s.sizes.steps + t) * s.sizes.batch + begin; }
};

// Rows of p and q at one step: the projections, after the LayerNorm, and those from which the directions are computed.
struct DirectionRows {
  const T *projections, *normalized, *final;

  DirectionRows(const Task& task, const T* from) : projections(from), normalized(from), final(from) {
    if (task.norm.is_on) {
      task.norm.forward(from, task.rows);
      normalized = final = task.norm.rows;
    }
    if (task.fixed_dot.is_on) {
      task.fixed_dot.forward(normalized, task.rows * task.s.sizes.planes);
      final = task.fixed_dot.rows;
    }
  }
};

// Return a function from l to the addresses of the vectors of row first + l, whose states are `x_stride` apart.
INLINE auto row_vectors(const Task& task, const T* directions, const T* x, int64_t first) {
  return [=, &task](int64_t l) -> RowVectors<T> {
    return {directions + (first + l) * 2 * task.pad(), x + (first + l) * task.x_stride(),
            task.s.options.rotation_aware ? task.u + (first + l) * task.pad() : nullptr};
  };
}

// Compute the source of row i of task.x.
INLINE void update_source(const Task& task, int64_t i) {
  if (task.source == task.x) return;
  for (int64_t at = i * task.x_stride(), end = at + task.pad(); at < end; at += lanes<T>)
    store<T>(task.source + at, apply_source(task.s.options, load<T>(task.x + at)));
}

// Whether the drive is not only added to the state.
INLINE bool copies_drive(const Options& options) {
  return options.slow_memory || options.rotation_aware || options.phased;
}
// Variant: such a drive. Copy it to task.u, with the feed of the slow memory.
template <bool Pairs> INLINE void load_drive(const Task& task, int64_t r, int64_t t) {
  T* u = task.u + r * task.pad();
  load_row<T>(task.drive_row(r, t), task.m, u, task.pad());
  if (task.slow.is_on) task.slow.add_feed<Pairs>(r, u);
}

// Variant: directions that come with the drive. A row of it is (drive, key, value), with a key and a value per plane.
inline void load_given_directions(const Task& task, int64_t t, T* out) {
  for (int64_t r = 0; r < task.rows; ++r)
    for (int64_t half = 0; half < task.halves(); ++half, out += task.pad())
      load_row<T>(task.drive_row(r, t) + (1 + half) * task.n, task.m, out, task.pad());
}

// The beta of `count` rows from `first` on at step t: one of the head, or variant: the last feature of the drive. Lanes
// without a row repeat the first.
template <class N> INLINE N load_betas(const Task& task, int64_t first, int count, int64_t t) {
  const Scan& s = task.s;
  if (!s.options.beta_in_drive) return N{} + (s.inputs.beta ? s.inputs.beta[task.head] : T(0));
  T each[rows_per<N>];
  for (int l = 0; l < rows_per<N>; ++l)
    each[l] = s.inputs.drive[(task.row_index(first + (l < count ? l : 0), t) + 1) * s.sizes.features - 1];
  N out;
  std::memcpy(&out, each, sizeof out);
  return out;
}

}  // namespace
