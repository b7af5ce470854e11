// The ADPT recurrence, forward and backward, for float and double. The derivation is in ../README.md.
//
// A task is one head of a tile of sequences. It runs all steps of these sequences on one thread, so there are no
// barriers. In the memory of a task, state vectors are padded with zeros to `pad` entries, a whole number of panels.
// Tensors of the caller are not padded, except the saved projections, which only this kernel reads. SIMD uses GCC and
// Clang vector extensions only.
//
// Letters of one row (one sequence at one step), as in the README; see also the legend of plane.h:
//   x, u, L       the state before the step, the drive, the eigenvalues Λ
//   p, q          the projections K x and V x; after a LayerNorm or a fixed dot product, what replaces them
//   k, v, c, w    unit key and value, c = k.v, w = v - c k
//   y1 y2 m1 m2   x' = L (x + y1 k + y2 w) + m1 k + m2 w + u
//   g             the gradient with respect to the state after the step; gp, gq: those with respect to p and q
//   Qx, Qg        Q'x and Q'g; LQx = L Q'x and LtQg = L'Q'g
// Sizes and indices:
//   m, n, pad     the state dimension of a head, that of all heads, and m padded to whole cache lines
//   r, t          row of the tile and step; `sequence` is the index in the batch, `offset` the first entry of the head
//   l             lane of a SIMD vector, or row of a group
//   s             the arguments of the call, `struct Scan`

#include <algorithm>

#include "factored.h"
#include "../../csrc/panels.h"
#include "plane.h"

// Arguments of a call, mirrored field by field in cpu.py. A `void*` points to SCALAR, which is float or double.
struct Scan {
  int64_t batch, steps, heads, size;                    // size: state dimension of one head
  int64_t features, width;                              // entries of a row of the drive, of a row of the state
  int64_t tile, threads;                                // tile: sequences per task
  int64_t complex_pairs, directions_in_drive, rotates;  // booleans; see `Form` in form.py
  int64_t source, retraction;                           // the enums of form.py
  int64_t rotation_aware, slow_memory, beta_in_drive, has_fixed_dot, has_norm;  // booleans
  int64_t factored, rank, outer_size, inner_size;  // whether K and V are applied by their factors; sizes of these
  double spike_threshold, dot, norm_epsilon;       // dot: of key and value, if `has_fixed_dot`
  // Inputs. The factors `left` to `inner` are stored head by head, that of K before that of V.
  const void *drive, *initial, *real, *imag, *weight, *bias, *beta;
  const void *feed_real, *feed_imag, *decay, *charge, *norm_weight, *norm_bias;
  const uint8_t* reset;
  const int64_t* lengths;
  const void *left, *right, *outer, *inner;
  void *states, *projections;  // projections: (heads, steps, batch, 2 pad), followed by their dot products; may be null
  const void* state_gradients;
  // Gradients of the first thirteen inputs. Those not required are null; that of the drive is always computed.
  void *drive_gradients, *initial_gradients;
  void *real_gradients, *imag_gradients, *weight_gradients, *bias_gradients, *beta_gradients;
  void *feed_real_gradients, *feed_imag_gradients, *decay_gradients, *charge_gradients;
  void *norm_weight_gradients, *norm_bias_gradients;
  void* workspace;
};

namespace {

enum Source { identity, relu, spikes };

// Gradients accumulated over batch and time. One vector of `pad` entries each; for beta only element 0 is used. Those
// of the LayerNorm and of the bias have two vectors, for key and value.
enum Sum {
  beta_sum,
  real_sum,
  imag_sum,
  feed_real_sum,
  feed_imag_sum,
  decay_sum,
  charge_sum,
  norm_weight_sum,
  norm_bias_sum = norm_weight_sum + 2,
  bias_sum = norm_bias_sum + 2,
  sum_count = bias_sum + 2
};

// With at least this many rows per tile the stride defeats the hardware prefetcher, so prefetch in software.
constexpr int64_t min_prefetch_rows = 4;

// ---- Variant: a fixed dot product of key and value ------------------------------------------------------------------

template <class T> INLINE T dot(const T* a, const T* b, int64_t pad) {
  Vec<T> sum[8] = {};
  for (int64_t i = 0; i < pad; i += lanes<T>) sum[0] += load<T>(a + i) * load<T>(b + i);
  T total[8];
  horizontal_sums<T, 8>(sum, total);
  return total[0];
}
template <class T> INLINE void add_scaled(T scale, const T* from, T* to, int64_t pad) {
  for (int64_t i = 0; i < pad; i += lanes<T>) store<T>(to + i, load<T>(to + i) + scale * load<T>(from + i));
}
template <class T> INLINE void set_scaled(T scale, const T* from, T* to, int64_t pad) {
  for (int64_t i = 0; i < pad; i += lanes<T>) store<T>(to + i, scale * load<T>(from + i));
}

// k = unit(p), v = unit(q), e = unit(k - c v) with c = k.v, and one over the length of each; 0 for a vector that counts
// as zero.
template <class T> struct FixedDot {
  T *k, *v, *e;
  T key_scale, value_scale, orthogonal_scale, c;
};

template <class T> void normalize_or_zero(const T* from, T* to, int64_t pad, T& scale) {
  if (normalize<T>(from, to, pad, scale)) return;
  std::memset(to, 0, pad * sizeof(T));
  scale = 0;
}

template <class T> FixedDot<T> fix_dot(const T* p, const T* q, int64_t pad, T* scratch) {
  FixedDot<T> out = {scratch, scratch + pad, scratch + 2 * pad, 0, 0, 0, 0};
  T* orthogonal = scratch + 3 * pad;
  normalize_or_zero<T>(p, out.k, pad, out.key_scale);
  normalize_or_zero<T>(q, out.v, pad, out.value_scale);
  out.c = dot<T>(out.k, out.v, pad);
  set_scaled<T>(1, out.k, orthogonal, pad);
  add_scaled<T>(-out.c, out.v, orthogonal, pad);
  normalize_or_zero<T>(orthogonal, out.e, pad, out.orthogonal_scale);
  // If the key is nearly parallel to the value, the remainder is mostly rounding error: orthogonalise a second time.
  T again;
  add_scaled<T>(-dot<T>(out.e, out.v, pad), out.v, out.e, pad);
  set_scaled<T>(1, out.e, orthogonal, pad);
  normalize_or_zero<T>(orthogonal, out.e, pad, again);
  return out;
}

// Forward: replace p and q by a key with the fixed dot product and the unit value. Backward: from the gradients of
// these to gp and gq, in place.
template <class T> void fixed_dot_forward(const Scan& s, const T* p, const T* q, int64_t pad, T* scratch, T* out) {
  FixedDot<T> from = fix_dot<T>(p, q, pad, scratch);
  set_scaled<T>(std::sqrt(T(1 - s.dot * s.dot)), from.e, out, pad);
  add_scaled<T>(T(s.dot), from.v, out, pad);
  set_scaled<T>(1, from.v, out + pad, pad);
}
template <class T> void fixed_dot_backward(const Scan& s, const T* p, const T* q, int64_t pad, T* scratch,
                                           T* gradients) {
  FixedDot<T> from = fix_dot<T>(p, q, pad, scratch);
  T *key = gradients, *value = gradients + pad, *orthogonal = scratch + 3 * pad;
  add_scaled<T>(T(s.dot), key, value, pad);
  set_scaled<T>(std::sqrt(T(1 - s.dot * s.dot)) * from.orthogonal_scale, key, orthogonal, pad);
  add_scaled<T>(-dot<T>(from.e, orthogonal, pad), from.e, orthogonal, pad);
  T along_v = dot<T>(from.v, orthogonal, pad);  // minus the gradient of c
  add_scaled<T>(-from.c, orthogonal, value, pad);
  add_scaled<T>(-along_v, from.k, value, pad);
  set_scaled<T>(1, orthogonal, key, pad);
  add_scaled<T>(-along_v, from.v, key, pad);
  add_scaled<T>(-dot<T>(from.k, key, pad), from.k, key, pad);
  add_scaled<T>(-dot<T>(from.v, value, pad), from.v, value, pad);
  set_scaled<T>(from.key_scale, key, key, pad);
  set_scaled<T>(from.value_scale, value, value, pad);
}

// ---- Variant: a LayerNorm on key and value --------------------------------------------------------------------------

// Statistics of one projection p, which becomes weight * z + bias with z = (y - mean) inverse_std and y = p scale;
// scale is 1/|p|, or 0 if p counts as zero.
template <class T> struct NormStats {
  T scale, mean, inverse_std;
};

template <class T> T sum_entries(const T* from, int64_t pad) {
  Vec<T> sum[8] = {};
  for (int64_t i = 0; i < pad; i += lanes<T>) sum[0] += load<T>(from + i);
  T total[8];
  horizontal_sums<T, 8>(sum, total);
  return total[0];
}

// `ones` is 1 at the entries and 0 in the padding, which thus stays zero.
template <class T>
NormStats<T> norm_forward(const Scan& s, const T* p, const T* weight, const T* bias, const T* ones, int64_t pad,
                          T* out) {
  NormStats<T> stats;
  const T squared = dot<T>(p, p, pad);
  if (is_in_range(squared)) {
    stats.scale = 1 / std::sqrt(squared);
    set_scaled<T>(stats.scale, p, out, pad);
  } else {
    normalize_or_zero<T>(p, out, pad, stats.scale);
  }
  stats.mean = sum_entries<T>(out, pad) / s.size;
  add_scaled<T>(-stats.mean, ones, out, pad);
  stats.inverse_std = 1 / std::sqrt(dot<T>(out, out, pad) / s.size + T(s.norm_epsilon));
  for (int64_t i = 0; i < pad; i += lanes<T>)
    store<T>(out + i, stats.inverse_std * load<T>(out + i) * load<T>(weight + i) + load<T>(bias + i));
  return stats;
}

// From the gradient of the output to that of p, in place. The component along y has a closed form in scalars: without
// epsilon the output would not depend on the length of y.
template <class T>
void norm_backward(const Scan& s, const T* p, const NormStats<T>& stats, const T* weight, const T* ones, int64_t pad,
                   T* gradients, T* weight_sums, T* bias_sums) {
  const T p_scale = stats.inverse_std * stats.scale, shift = stats.inverse_std * stats.mean;
  auto z_at = [&](int64_t i) { return p_scale * load<T>(p + i) - shift * load<T>(ones + i); };
  Vec<T> sum[8] = {};
  for (int64_t i = 0; i < pad; i += lanes<T>) {
    Vec<T> from = load<T>(gradients + i), z = z_at(i), weighted = load<T>(weight + i) * from;
    sum[0] += weighted;
    sum[1] += weighted * z;
    store<T>(weight_sums + i, load<T>(weight_sums + i) + from * z);
    store<T>(bias_sums + i, load<T>(bias_sums + i) + from);
  }
  T total[8];
  horizontal_sums<T, 8>(sum, total);
  const T mean = total[0] / s.size, along_z = total[1] / s.size,
          along_y = total[1] * T(s.norm_epsilon) * stats.inverse_std * stats.inverse_std;
  for (int64_t i = 0; i < pad; i += lanes<T>) {
    Vec<T> weighted = load<T>(weight + i) * load<T>(gradients + i);
    Vec<T> gy = stats.inverse_std * (weighted - mean * load<T>(ones + i) - along_z * z_at(i));
    store<T>(gradients + i, stats.scale * (gy - along_y * stats.scale * load<T>(p + i)));
  }
}

// ---- Tasks ----------------------------------------------------------------------------------------------------------

// The source: what K and V are applied to.
template <class T> INLINE Vec<T> apply_source(const Scan& s, Vec<T> x) {
  if (s.source == relu) return x <= 0 ? Vec<T>{} : x;  // NaN passes
  if (s.source == spikes) return x >= T(s.spike_threshold) ? Vec<T>{} + 1 : Vec<T>{};
  return x;
}
// The gradient where the derivative of the source is one, and zero elsewhere.
template <class T> INLINE Vec<T> mask_by_source(const Scan& s, Vec<T> x, Vec<T> gradient) {
  if (s.source == identity) return gradient;
  if (s.source == relu) return x > 0 ? gradient : Vec<T>{};
  Vec<T> above = x - T(s.spike_threshold);
  return (above >= T(-0.5)) & (above <= T(0.5)) ? gradient : Vec<T>{};
}

// Return whether there are products with K and V at all.
INLINE bool has_weights(const Scan& s) { return s.rotates && !s.directions_in_drive; }
INLINE FactorShape factor_shape(const Scan& s) { return {s.size, s.rank, s.outer_size, s.inner_size}; }

// [K; V] of one head, or its transpose, packed.
template <class T> struct Weights {
  T* panels;
  bool for_matvec;  // packed for `matvec`
  Factors<T> factors;

  void allocate(const Scan& s, Arena<T>& memory) {
    if (s.factored)
      factors.allocate(factor_shape(s), memory);
    else
      panels = memory.allocate(2 * padded_size<T>(s.size) * s.size);
  }
};

// The backward runs in blocks of steps. The weight gradients are accumulated once per block of this many rows: long
// enough for an efficient product, short enough to stay in cache.
constexpr int64_t block_rows = 64;
constexpr int64_t partial_sum_rows = 128;  // rows summed in working precision before the sum is added to one in double
INLINE int64_t steps_per_block(const Scan& s, int64_t rows) {
  return has_weights(s) && rows < block_rows ? block_rows / rows : 1;
}

template <class T> struct Task {
  int64_t head, begin, rows;
  T *real, *imag, *bias, *feed_real, *feed_imag, *decay, *charge, *norm_weight, *norm_bias, *ones;
  T *x, *source, *slow, *u, *projections, *dots, *scratch, *normalized, *fixed_dot_rows, *fixed_dot_scratch;
  T *g, *slow_g;        // gradients with respect to the state and the slow memory after the step
  T* previous_g;        // that with respect to the state before the step
  T* gradients;         // gp and gq of the rows of a block
  T* sums;              // (sum_count, pad), see `Sum`: partial sums in working precision
  double* totals;       // the same in double; beta and the bias are accumulated here directly
  T* weight_sums;       // (2 pad, pad), shared by the tasks of a thread
  NormStats<T>* norms;  // of key and value of each row
  FactorScratch<T> factor_scratch;

  void allocate(const Scan& s, int64_t tile, bool backward, Arena<T>& memory) {
    int64_t pad = padded_size<T>(s.size);
    for (T** vector : {&real, &imag, &feed_real, &feed_imag, &decay, &charge}) *vector = memory.allocate(pad);
    for (T** vectors : {&bias, &norm_weight, &norm_bias}) *vectors = memory.allocate(2 * pad);
    ones = memory.allocate(pad);
    const int64_t rows = backward && tile < block_rows ? block_rows : tile;
    for (T** vectors : {&x, &source}) *vectors = memory.allocate(rows * row_stride<T>(pad));
    for (T** vectors : {&slow, &u}) *vectors = memory.allocate(tile * pad);
    projections = memory.allocate(rows * 2 * pad);
    dots = memory.allocate(tile * dot_count);
    scratch = memory.allocate(tile * 2 * pad);
    normalized = memory.allocate(s.has_norm ? tile * 2 * pad : 0);
    norms =
        reinterpret_cast<NormStats<T>*>(memory.allocate(s.has_norm ? tile * 2 * sizeof(NormStats<T>) / sizeof(T) : 0));
    if (s.factored) factor_scratch.allocate(factor_shape(s), rows, memory);
    fixed_dot_rows = memory.allocate(s.has_fixed_dot ? tile * 2 * pad : 0);
    fixed_dot_scratch = memory.allocate(s.has_fixed_dot ? 4 * pad : 0);
    if (!backward) return;
    for (T** vectors : {&g, &slow_g, &previous_g}) *vectors = memory.allocate(tile * pad);
    gradients = memory.allocate(rows * row_stride<T>(2 * pad));
    sums = memory.allocate(sum_count * pad);
  }

  T* sum(Sum which, int64_t pad) const { return sums + which * pad; }
};

template <class T> void copy_padded(const void* from, int64_t offset, int64_t size, int64_t pad, T* to) {
  const T* values = static_cast<const T*>(from);
  for (int64_t i = 0; i < pad; ++i) to[i] = values && i < size ? values[offset + i] : T(0);
}

template <class T> void load_constants(const Scan& s, Task<T>& task) {
  int64_t m = s.size, pad = padded_size<T>(m), at = task.head * m;
  copy_padded<T>(s.real, at, m, pad, task.real);
  copy_padded<T>(s.imag, at, m, pad, task.imag);
  copy_padded<T>(s.feed_real, at, m, pad, task.feed_real);
  copy_padded<T>(s.feed_imag, at, m, pad, task.feed_imag);
  copy_padded<T>(s.decay, at, m, pad, task.decay);
  copy_padded<T>(s.charge, at, m, pad, task.charge);
  for (int64_t half = 0; half < 2; ++half) {
    copy_padded<T>(s.bias, 2 * at + half * m, m, pad, task.bias + half * pad);
    copy_padded<T>(s.norm_weight, half * m, m, pad, task.norm_weight + half * pad);
    copy_padded<T>(s.norm_bias, half * m, m, pad, task.norm_bias + half * pad);
  }
  for (int64_t i = 0; i < pad; ++i) task.ones[i] = i < m;
}

// Compute p and q of `rows` rows of sources; if they come with the drive, copy those of the tile at step t instead.
template <class T>
INLINE void project(const Scan& s, const Task<T>& task, const Weights<T>& by, int64_t t, int64_t rows, T* out,
                    Prefetcher* prefetcher = nullptr) {
  const int64_t m = s.size, pad = padded_size<T>(m), n = s.heads * m;
  if (s.directions_in_drive) {
    for (int64_t r = 0; r < task.rows; ++r, out += 2 * pad) {
      const T* row = static_cast<const T*>(s.drive) + ((task.begin + r) * s.steps + t) * s.features + n + task.head * m;
      load_row<T>(row, m, out, pad);
      load_row<T>(row + n, m, out + pad, pad);
    }
    return;
  }
  if (s.factored)
    factored_forward<T>(factor_shape(s), by.factors, rows, task.source, row_stride<T>(pad), task.factor_scratch, out);
  else if (by.for_matvec)
    matvec<T>(task.source, m, by.panels, 2 * pad / panel_width<T>, out);
  else
    matmul<T, false>(rows, task.source, row_stride<T>(pad), {m, 0, 0}, by.panels, 2 * pad / panel_width<T>, out,
                     2 * pad, prefetcher);
  if (s.bias)
    for (int64_t r = 0; r < rows; ++r, out += 2 * pad)
      for (int64_t i = 0; i < 2 * pad; i += lanes<T>) store<T>(out + i, load<T>(out + i) + load<T>(task.bias + i));
}

// Return the projections after the LayerNorm, or the projections themselves if there is none.
template <class T> const T* apply_norm(const Scan& s, const Task<T>& task, const T* projections) {
  if (!s.has_norm) return projections;
  const int64_t pad = padded_size<T>(s.size);
  for (int64_t i = 0; i < 2 * task.rows; ++i) {
    const int64_t half = i % 2 * pad;
    task.norms[i] = norm_forward<T>(s, projections + i * pad, task.norm_weight + half, task.norm_bias + half, task.ones,
                                    pad, task.normalized + i * pad);
  }
  return task.normalized;
}
// Return the rows of p and q from which the directions are computed: with the fixed dot product, or unchanged.
template <class T> const T* apply_fixed_dot(const Scan& s, const Task<T>& task, const T* normalized) {
  if (!s.has_fixed_dot) return normalized;
  const int64_t pad = padded_size<T>(s.size);
  for (int64_t r = 0; r < task.rows; ++r) {
    const T* p = normalized + r * 2 * pad;
    fixed_dot_forward<T>(s, p, p + pad, pad, task.fixed_dot_scratch, task.fixed_dot_rows + r * 2 * pad);
  }
  return task.fixed_dot_rows;
}

template <class T> void update_source(const Scan& s, const Task<T>& task, int64_t r) {
  const int64_t pad = padded_size<T>(s.size), at = r * row_stride<T>(pad);
  if (s.source == identity) return;  // the source is x itself
  for (int64_t i = at; i < at + pad; i += lanes<T>) store<T>(task.source + i, apply_source<T>(s, load<T>(task.x + i)));
}

// The beta of `count` rows from `first` on at step t; lanes without a row repeat the first.
template <class T, class N> INLINE N load_betas(const Scan& s, const Task<T>& task, int64_t first, int count,
                                                int64_t t) {
  if (!s.beta_in_drive) return N{} + (s.beta ? static_cast<const T*>(s.beta)[task.head] : T(0));
  T each[rows_per<N>];
  for (int l = 0; l < rows_per<N>; ++l) {
    const int64_t sequence = task.begin + first + (l < count ? l : 0);
    each[l] = static_cast<const T*>(s.drive)[(sequence * s.steps + t + 1) * s.features - 1];
  }
  N out;
  std::memcpy(&out, each, sizeof out);
  return out;
}

template <class T> INLINE bool has_ended(const Scan& s, int64_t sequence, int64_t t) {
  return s.lengths && t >= s.lengths[sequence];
}

// From coefficients of k and w to coefficients of p and q.
template <class T, class N> INLINE RotationScalars<N> scalars_of_projections(const Group<T, N>& group,
                                                                             const RotationScalars<N>& by) {
  return {group.on_p * (by.y1 + group.on_k * by.y2), group.on_q * by.y2, group.on_p * (by.m1 + group.on_k * by.m2),
          group.on_q * by.m2};
}

// x <- L (x + y1 p + y2 q) + m1 p + m2 q + u, with the scalars of p and q; also written to `state`, an unpadded row of
// the caller.
template <class T, bool Pairs>
INLINE void update_state(const Spectrum<T> spectrum, int64_t size, const T* u, const T* p, const T* q,
                         RotationScalars<T> by, T* x, T* state) {
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

// Addresses of the projections of the rows at step t, and of their dot products: saved for the backward, or scratch.
template <class T> INLINE T* projections_at(const Scan& s, const Task<T>& task, int64_t t) {
  const int64_t row = (task.head * s.steps + t) * s.batch + task.begin;
  return s.projections ? static_cast<T*>(s.projections) + row * 2 * padded_size<T>(s.size) : task.projections;
}
template <class T> INLINE T* dots_at(const Scan& s, const Task<T>& task, int64_t t) {
  const int64_t row = (task.head * s.steps + t) * s.batch + task.begin, rows = s.heads * s.steps * s.batch;
  return s.projections ? static_cast<T*>(s.projections) + rows * 2 * padded_size<T>(s.size) + row * dot_count
                       : task.dots;
}

// Return a function from l to the addresses of the vectors of row first + l.
template <class T> INLINE auto row_vectors(const Scan& s, const Task<T>& task, const T* pairs, int64_t first) {
  const int64_t pad = padded_size<T>(s.size);
  return [=, &s, &task](int64_t l) -> RowVectors<T> {
    return {pairs + (first + l) * 2 * pad, task.x + (first + l) * row_stride<T>(pad),
            s.rotation_aware ? task.u + (first + l) * pad : nullptr};
  };
}

// Step `count` rows from `first` on. Their scalars are vectorised over the batch: one row (N = T) or one per lane.
template <class T, class N, bool Pairs>
void forward_rows(const Scan& s, const Task<T>& task, const Spectrum<T>& spectrum, const T* pairs, T* dots,
                  int64_t first, int count, int64_t t) {
  const int64_t m = s.size, pad = padded_size<T>(m), x_stride = row_stride<T>(pad), n = s.heads * m,
                offset = task.head * m;
  Group<T, N> group;
  RotationScalars<N> by = {};
  if (s.rotates) {
    compute_directions<T, N, Pairs>(spectrum, row_vectors(s, task, pairs, first), count, pad, dots + first * dot_count,
                                    false, task.scratch + first * 2 * pad, group);
    by = scalars_of_projections(
        group, rotation_scalars<N>(s.retraction, group.plane, load_betas<T, N>(s, task, first, count, t)));
  }
  for (int l = 0; l < count; ++l) {
    const int64_t r = first + l, sequence = task.begin + r;
    T* state = static_cast<T*>(s.states) + (sequence * s.steps + t) * s.width + offset;
    if (has_ended<T>(s, sequence, t)) {
      std::memset(state, 0, m * sizeof(T));
      if (s.slow_memory) std::memset(state + n, 0, m * sizeof(T));
      continue;
    }
    const T* drive = static_cast<const T*>(s.drive) + (sequence * s.steps + t) * s.features + offset;
    const T* u = s.slow_memory || s.rotation_aware ? task.u + r * pad : drive;
    T* x = task.x + r * x_stride;
    if (s.rotates && !group.no_rotation[l])
      update_state<T, Pairs>(spectrum, m, u, group.p[l], group.q[l],
                             {lane(by.y1, l), lane(by.y2, l), lane(by.m1, l), lane(by.m2, l)}, x, state);
    else
      // Without a rotation p and q are multiplied by zero: any finite vectors do.
      update_state<T, Pairs>(spectrum, m, u, task.real, task.real, {0, 0, 0, 0}, x, state);
    if (s.slow_memory) {
      T* slow = task.slow + r * pad;
      for (int64_t j = 0; j < pad; j += lanes<T>)
        store<T>(slow + j, load<T>(task.decay + j) * load<T>(slow + j) + load<T>(task.charge + j) * load<T>(x + j));
      store_row<T>(slow, m, state + n);
    }
    update_source(s, task, r);
  }
}

// Special case: a single sequence of the basic recurrence. No other row hides the latency of a step, so this loop skips
// every test and copy of the general one.
INLINE bool is_single_sequence(const Scan& s) {
  return s.tile == 1 && s.rotates && s.source == identity &&
         !(s.directions_in_drive || s.factored || s.bias || s.has_norm || s.has_fixed_dot || s.rotation_aware ||
           s.slow_memory || s.beta_in_drive || s.lengths);
}
template <class T, bool Pairs> void run_single_sequence(const Scan& s, Task<T>& task, const Weights<T>& weights) {
  const int64_t m = s.size, pad = padded_size<T>(m), offset = task.head * m;
  const Spectrum<T> spectrum = {task.real, task.imag};
  const T beta = static_cast<const T*>(s.beta)[task.head];
  const T* u = static_cast<const T*>(s.drive) + task.begin * s.steps * s.features + offset;
  T *state = static_cast<T*>(s.states) + task.begin * s.steps * s.width + offset, *x = task.x;
  T *const projections = projections_at(s, task, 0), *const all_dots = dots_at(s, task, 0);
  const int64_t step_rows = s.projections ? s.batch : 0, panels = 2 * pad / panel_width<T>;
  load_constants(s, task);
  load_row<T>(static_cast<const T*>(s.initial) + task.begin * s.width + offset, m, x, pad);
  for (int64_t t = 0; t < s.steps; ++t) {
    if (s.reset && s.reset[task.begin * s.steps + t]) std::memset(x, 0, pad * sizeof(T));
    T *const p = projections + t * step_rows * 2 * pad, *const dots = all_dots + t * step_rows * dot_count;
    matvec<T>(x, m, weights.panels, panels, p);
    Group<T, T> group;
    auto at = [&](int) -> RowVectors<T> { return {p, x, nullptr}; };
    compute_directions<T, T, Pairs>(spectrum, at, 1, pad, dots, false, task.scratch, group);
    if (group.no_rotation[0])  // p and q are multiplied by zero: any finite vectors do
      update_state<T, Pairs>(spectrum, m, u, task.real, task.real, {0, 0, 0, 0}, x, state);
    else
      update_state<T, Pairs>(spectrum, m, u, group.p[0], group.q[0],
                             scalars_of_projections(group, rotation_scalars<T>(s.retraction, group.plane, beta)), x,
                             state);
    u += s.features;
    state += s.width;
  }
}

template <class T, bool Pairs> void run_forward(const Scan& s, Task<T>& task, const Weights<T>& weights) {
  if (is_single_sequence(s)) return run_single_sequence<T, Pairs>(s, task, weights);
  const int64_t m = s.size, pad = padded_size<T>(m), x_stride = row_stride<T>(pad), n = s.heads * m,
                offset = task.head * m;
  const bool copies_drive = s.slow_memory || s.rotation_aware;  // into padded memory of the task
  load_constants(s, task);
  if (s.source == identity) task.source = task.x;
  Spectrum<T> spectrum = {task.real, task.imag};
  for (int64_t r = 0; r < task.rows; ++r) {
    const T* from = static_cast<const T*>(s.initial) + (task.begin + r) * s.width + offset;
    load_row<T>(from, m, task.x + r * x_stride, pad);
    if (s.slow_memory) load_row<T>(from + n, m, task.slow + r * pad, pad);
    update_source(s, task, r);
  }
  Prefetcher prefetcher;
  for (int64_t t = 0; t < s.steps; ++t) {
    if (s.reset)
      for (int64_t r = 0; r < task.rows; ++r)
        if (s.reset[(task.begin + r) * s.steps + t]) {
          for (T* vector : {task.x + r * x_stride, task.slow + r * pad}) std::memset(vector, 0, pad * sizeof(T));
          update_source(s, task, r);
        }
    T *const projections = projections_at(s, task, t), *const dots = dots_at(s, task, t);
    prefetcher.clear();
    if (task.rows >= min_prefetch_rows && t + 1 < s.steps) {
      const int64_t at = task.begin * s.steps + t + 1;
      prefetcher.add(static_cast<const T*>(s.drive) + at * s.features + offset, m, task.rows, s.steps * s.features);
      prefetcher.add(static_cast<const T*>(s.states) + at * s.width + offset, m, task.rows, s.steps * s.width);
      if (s.projections) {
        prefetcher.add(projections_at(s, task, t + 1), task.rows * 2 * pad);
        prefetcher.add(dots_at(s, task, t + 1), task.rows * dot_count);
      }
    }
    if (s.rotates) project<T>(s, task, weights, t, task.rows, projections, &prefetcher);
    prefetcher.issue_rest();
    const T* pairs = apply_fixed_dot<T>(s, task, apply_norm<T>(s, task, projections));
    for (int64_t r = 0; copies_drive && r < task.rows; ++r) {
      T* u = task.u + r * pad;
      load_row<T>(static_cast<const T*>(s.drive) + ((task.begin + r) * s.steps + t) * s.features + offset, m, u, pad);
      for (int64_t i = 0; s.slow_memory && i < pad; i += lanes<T>)
        store<T>(u + i, load<T>(u + i) + apply_lambda<T, Pairs>({task.feed_real, task.feed_imag}, i,
                                                                load<T>(task.slow + r * pad + i)));
    }
    for (int64_t first = 0; first < task.rows; first += lanes<T>) {
      const int count = std::min<int64_t>(lanes<T>, task.rows - first);
      count == 1 ? forward_rows<T, T, Pairs>(s, task, spectrum, pairs, dots, first, count, t)
                 : forward_rows<T, Vec<T>, Pairs>(s, task, spectrum, pairs, dots, first, count, t);
    }
  }
}

// ---- Backward -------------------------------------------------------------------------------------------------------

// Add the gradient of a product of eigenvalues, left' L right, to the sums of its real and its imaginary parts.
template <class T, bool Pairs>
INLINE void add_spectrum_gradient(T* sums, int64_t pad, int64_t i, Vec<T> left, Vec<T> right) {
  store<T>(sums + i, load<T>(sums + i) + left * right);
  if constexpr (Pairs) store<T>(sums + pad + i, load<T>(sums + pad + i) + left * swap_pairs<T>(right));
}

template <class T> INLINE void add_vector(T* to, Vec<T> change) { store<T>(to, load<T>(to) + change); }

// p.g, q.g, p.L'g and q.L'g, in the first four of eight.
template <class T, bool Pairs>
INLINE void dots_with_g(const Spectrum<T> spectrum, const T* p, const T* q, const T* g, int64_t pad, T* out) {
  Vec<T> sum[8] = {};
  for (int64_t i = 0; i < pad; i += lanes<T>) {
    Vec<T> p_i = load<T>(p + i), q_i = load<T>(q + i), g_i = load<T>(g + i),
           Lg_i = apply_lambda_transposed<T, Pairs>(spectrum, i, g_i);
    sum[0] += p_i * g_i;
    sum[1] += q_i * g_i;
    sum[2] += p_i * Lg_i;
    sum[3] += q_i * Lg_i;
  }
  horizontal_sums<T, 8>(sum, out);
}

// Coefficients of the gradients of a row. gp is 1/|p| times a linear combination of L'Q'g, L Q'x (plus the drive, if it
// is rotated), g, x, p and q; gq is 1/|q| times another. A Taylor polynomial is not a rotation: only a part of what it
// adds to x and g enters these formulas, and the remainder is kept separately.
template <class N> struct GradientScalars {
  N x_on_p, x_on_q, g_on_p, g_on_q;                      // Q'x = x + x_on_p p + x_on_q q, and likewise Q'g
  N rest_x_on_k, rest_x_on_w, rest_g_on_k, rest_g_on_w;  // the Taylor remainder
  N state_on_p, state_on_q;                              // gx = L'Q'g + state_on_p p + state_on_q q + K'gp + V'gq
  N key_LtQg, key_LQx, key_g, key_x, key_p, key_q;       // gp
  N value_LtQg, value_LQx, value_g, value_x, value_p, value_q;  // gq
  N beta;                                                       // the gradient of beta
  N padding;  // makes the size a multiple of every number of lanes, for `split_lanes`
};

// Compute them for the rows of a group from the dot products of p and q with g and with L'g.
template <class T, class N> INLINE GradientScalars<N> gradient_scalars(const Scan& s, const Group<T, N>& group, N beta,
                                                                       const N* with_g) {
  GradientScalars<N> out = {};
  const PlaneDots<N>& d = group.plane;
  const N c = group.cosine;
  const N kg = group.on_p * with_g[0], wg = group.on_q * with_g[1] + group.on_k * kg;
  const N gLk = group.on_p * with_g[2], gLw = group.on_q * with_g[3] + group.on_k * gLk;
  const RotationScalars<N> by = rotation_scalars<N>(s.retraction, d, beta);
  const PlaneDots<N> e = rotation_scalars_backward<N>(s.retraction, d, beta, {gLk, gLw, kg, wg}, out.beta);
  N x_on_k = by.y1, x_on_w = by.y2, g_on_k = e.kLx, g_on_w = e.wLx;  // Q'x = x + x_on_k k + x_on_w w, and likewise Q'g
  if (s.retraction == taylor_one) x_on_k = x_on_w = g_on_k = g_on_w = N{};
  if (s.retraction == taylor_two) {
    x_on_k = -beta * d.wx;
    x_on_w = beta * d.kx;
    g_on_k = -beta * wg;
    g_on_w = beta * kg;
  }
  // Dot products of k and w with L'Q'g and with L Q'x.
  const N k_LtQg = gLk + g_on_k * d.kLk + g_on_w * d.wLk, w_LtQg = gLw + g_on_k * d.kLw + g_on_w * d.wLw;
  const N k_LQx = d.kLx + x_on_k * d.kLk + x_on_w * d.kLw + d.ku;
  const N w_LQx = d.wLx + x_on_k * d.wLk + x_on_w * d.wLw + d.wu;
  // Components of gk and gw that the normalisations remove, in closed form.
  N k_gk = x_on_k * k_LtQg + g_on_k * k_LQx + by.m1 * kg + e.kx * d.kx;
  N k_gw = x_on_w * k_LtQg + g_on_w * k_LQx + by.m2 * kg + e.wx * d.kx;
  N w_gw = x_on_w * w_LtQg + g_on_w * w_LQx + by.m2 * wg + e.wx * d.wx + 2 * e.ww * d.ww;
  if (s.retraction >= taylor_one) {
    out.rest_x_on_k = by.y1 - x_on_k;
    out.rest_x_on_w = by.y2 - x_on_w;
    out.rest_g_on_k = e.kLx - g_on_k;
    out.rest_g_on_w = e.wLx - g_on_w;
    k_gk += out.rest_x_on_k * gLk + out.rest_g_on_k * d.kLx;
    k_gw += out.rest_x_on_w * gLk + out.rest_g_on_w * d.kLx;
    w_gw += out.rest_x_on_w * gLw + out.rest_g_on_w * d.wLx;
  }
  // From coefficients of k and w to coefficients of p and q.
  auto on_p = [&](N on_k, N on_w) { return group.on_p * (on_k + group.on_k * on_w); };
  auto on_q = [&](N on_w) { return group.on_q * on_w; };
  out.x_on_p = on_p(x_on_k, x_on_w);
  out.x_on_q = on_q(x_on_w);
  out.g_on_p = on_p(g_on_k, g_on_w);
  out.g_on_q = on_q(g_on_w);
  out.state_on_p = on_p(e.kx, e.wx);
  out.state_on_q = on_q(e.wx);
  out.key_LtQg = x_on_k - c * x_on_w;
  out.key_LQx = g_on_k - c * g_on_w;
  out.key_g = by.m1 - c * by.m2;
  out.key_x = e.kx - c * e.wx;
  out.key_p = on_p(c * k_gw - k_gk, -2 * c * e.ww - k_gw);
  out.key_q = on_q(-2 * c * e.ww - k_gw);
  out.value_LtQg = x_on_w;
  out.value_LQx = g_on_w;
  out.value_g = by.m2;
  out.value_x = e.wx;
  out.value_p = on_p(-(k_gw + c * w_gw), 2 * e.ww - w_gw);
  out.value_q = on_q(2 * e.ww - w_gw);
  return out;
}

// A row without a rotation (Q = I): compute `previous_g`, the gradient with respect to the state before the step.
template <class T, bool Pairs>
void backward_identity(const Scan& s, const Task<T>& task, const Spectrum<T>& spectrum, const T* x, const T* g,
                       T* u_gradient, T* previous_g, T* gradients) {
  const int64_t pad = padded_size<T>(s.size);
  for (int64_t i = 0; i < pad; i += lanes<T>) {
    Vec<T> g_i = load<T>(g + i);
    store<T>(previous_g + i, apply_lambda_transposed<T, Pairs>(spectrum, i, g_i));
    add_spectrum_gradient<T, Pairs>(task.sum(real_sum, pad), pad, i, g_i, load<T>(x + i));
    if (s.rotation_aware) store<T>(u_gradient + i, g_i);
  }
  std::memset(gradients, 0, 2 * pad * sizeof(T));
}

// A row with a rotation: compute gp and gq, in `gradients`, and `previous_g` without K'gp + V'gq.
template <class T, bool Pairs>
INLINE void backward_rotation(const Scan& s, const Task<T>& task, const Spectrum<T> spectrum, const T* p, const T* q,
                              T key_scale, T value_scale, const GradientScalars<T>& by, const T* x, const T* u,
                              const T* g, T* u_gradient, T* previous_g, T* gradients) {
  const int64_t pad = padded_size<T>(s.size);
  for (int64_t i = 0; i < pad; i += lanes<T>) {
    const Vec<T> g_i = load<T>(g + i), x_i = load<T>(x + i), p_i = load<T>(p + i), q_i = load<T>(q + i);
    const Vec<T> Qx = x_i + by.x_on_p * p_i + by.x_on_q * q_i, Qg = g_i + by.g_on_p * p_i + by.g_on_q * q_i;
    const Vec<T> LtQg = apply_lambda_transposed<T, Pairs>(spectrum, i, Qg);
    Vec<T> LQx = apply_lambda<T, Pairs>(spectrum, i, Qx);
    if (s.rotation_aware) {
      LQx += load<T>(u + i);
      store<T>(u_gradient + i, Qg);
    }
    store<T>(previous_g + i, LtQg + by.state_on_p * p_i + by.state_on_q * q_i);
    // Multiply by 1/|p| and 1/|q| last: terms multiplied by both could overflow or underflow.
    store<T>(gradients + i, key_scale * (by.key_LtQg * LtQg + by.key_LQx * LQx + by.key_g * g_i + by.key_x * x_i +
                                         by.key_p * p_i + by.key_q * q_i));
    store<T>(gradients + pad + i, value_scale * (by.value_LtQg * LtQg + by.value_LQx * LQx + by.value_g * g_i +
                                                 by.value_x * x_i + by.value_p * p_i + by.value_q * q_i));
    add_spectrum_gradient<T, Pairs>(task.sum(real_sum, pad), pad, i, Qg, Qx);
  }
}

// Add the remainder of a Taylor polynomial to those.
template <class T, bool Pairs>
void backward_taylor_remainder(const Scan& s, const Task<T>& task, const Spectrum<T> spectrum, const Row<T>& row,
                               const GradientScalars<T>& by, const T* x, const T* g, T* previous_g, T* gradients) {
  const int64_t pad = padded_size<T>(s.size);
  const T c = row.cosine, x_on_k = by.rest_x_on_k, x_on_w = by.rest_x_on_w, g_on_k = by.rest_g_on_k,
          g_on_w = by.rest_g_on_w;
  for (int64_t i = 0; i < pad; i += lanes<T>) {
    const Vec<T> g_i = load<T>(g + i), x_i = load<T>(x + i), k = row.on_p * load<T>(row.p + i);
    const Vec<T> w = row.on_q * load<T>(row.q + i) + row.on_k * k;
    const Vec<T> Ltg = apply_lambda_transposed<T, Pairs>(spectrum, i, g_i),
                 Lx = apply_lambda<T, Pairs>(spectrum, i, x_i);
    const Vec<T> rest_g = g_on_k * k + g_on_w * w;
    add_vector<T>(previous_g + i, apply_lambda_transposed<T, Pairs>(spectrum, i, rest_g));
    add_vector<T>(gradients + i, row.key_scale * ((x_on_k - c * x_on_w) * Ltg + (g_on_k - c * g_on_w) * Lx));
    add_vector<T>(gradients + pad + i, row.value_scale * (x_on_w * Ltg + g_on_w * Lx));
    add_spectrum_gradient<T, Pairs>(task.sum(real_sum, pad), pad, i, g_i, x_on_k * k + x_on_w * w);
    add_spectrum_gradient<T, Pairs>(task.sum(real_sum, pad), pad, i, rest_g, x_i);
  }
}

// Transpose the scalars of a group to one struct per row.
template <class T> INLINE void split_lanes(const GradientScalars<T>& scalars, GradientScalars<T>* to) { *to = scalars; }
template <class T> INLINE void split_lanes(const GradientScalars<Vec<T>>& scalars, GradientScalars<T>* to) {
  constexpr int count = sizeof(GradientScalars<T>) / sizeof(T);
  Vec<T> columns[count];
  std::memcpy(columns, &scalars, sizeof columns);
  for (int j = 0; j < count; j += lanes<T>) {
    transpose<T, lanes<T> / 2>(columns + j);
    for (int l = 0; l < lanes<T>; ++l) std::memcpy(reinterpret_cast<T*>(to + l) + j, columns + j + l, sizeof(Vec<T>));
  }
}

// The backward of row r of the task, lane l of its group. gp and gq are written to `gradients`.
template <class T, class N, bool Pairs>
INLINE void backward_row(const Scan& s, const Task<T>& task, const Spectrum<T>& spectrum, Group<T, N>& group,
                         const GradientScalars<T>& by, int l, const T* normalized, const T* projections, int64_t r,
                         int64_t t, T* gradients) {
  const int64_t m = s.size, pad = padded_size<T>(m), n = s.heads * m, offset = task.head * m, sequence = task.begin + r;
  const Spectrum<T> feed = {task.feed_real, task.feed_imag};
  const T* x = task.x + r * row_stride<T>(pad);
  T *g = task.g + r * pad, *u = task.u + r * pad, *previous_g = task.previous_g + r * pad;
  T* to_drive = static_cast<T*>(s.drive_gradients) + (sequence * s.steps + t) * s.features;
  T beta = 0;
  if (!s.rotates || group.no_rotation[l] || has_ended<T>(s, sequence, t)) {
    backward_identity<T, Pairs>(s, task, spectrum, x, g, u, previous_g, gradients);
  } else {
    backward_rotation<T, Pairs>(s, task, spectrum, group.p[l], group.q[l], lane(group.key_scale, l),
                                lane(group.value_scale, l), by, x, u, g, u, previous_g, gradients);
    if (s.retraction >= taylor_one)
      backward_taylor_remainder<T, Pairs>(s, task, spectrum, get_row(group, l), by, x, g, previous_g, gradients);
    beta = by.beta;
  }
  if (s.has_fixed_dot) {
    const T* p = normalized + r * 2 * pad;
    fixed_dot_backward<T>(s, p, p + pad, pad, task.fixed_dot_scratch, gradients);
  }
  for (int64_t half = 0; s.has_norm && half < 2; ++half)
    norm_backward<T>(s, projections + (2 * r + half) * pad, task.norms[2 * r + half], task.norm_weight + half * pad,
                     task.ones, pad, gradients + half * pad, task.sum(norm_weight_sum, pad) + half * pad,
                     task.sum(norm_bias_sum, pad) + half * pad);
  const T* to_u = s.rotation_aware ? u : g;
  if (!s.beta_in_drive) task.totals[0] += beta;
  if (s.beta_in_drive) to_drive[s.features - 1] = beta;
  store_row<T>(to_u, m, to_drive + offset);
  if (s.directions_in_drive) {
    store_row<T>(gradients, m, to_drive + n + offset);
    store_row<T>(gradients + pad, m, to_drive + 2 * n + offset);
  }
  for (int64_t i = 0; s.slow_memory && i < pad; i += lanes<T>) {
    T* slow_g = task.slow_g + r * pad;
    add_spectrum_gradient<T, Pairs>(task.sum(feed_real_sum, pad), pad, i, load<T>(to_u + i),
                                    load<T>(task.slow + r * pad + i));
    store<T>(slow_g + i, load<T>(slow_g + i) + apply_lambda_transposed<T, Pairs>(feed, i, load<T>(to_u + i)));
  }
}

// The backward of `count` rows from `first` on; the counterpart of `forward_rows`.
template <class T, class N, bool Pairs>
void backward_rows(const Scan& s, const Task<T>& task, const Spectrum<T>& spectrum, const T* pairs, const T* normalized,
                   const T* projections, T* dots, bool dots_known, int64_t first, int count, int64_t t, T* gradients) {
  const int64_t pad = padded_size<T>(s.size);
  Group<T, N> group;
  GradientScalars<T> by[rows_per<N>];
  if (s.rotates) {
    compute_directions<T, N, Pairs>(spectrum, row_vectors(s, task, pairs, first), count, pad, dots + first * dot_count,
                                    dots_known, task.scratch + first * 2 * pad, group);
    T each[rows_per<N>][8];
    for (int l = 0; l < count; ++l)
      dots_with_g<T, Pairs>(spectrum, group.p[l], group.q[l], task.g + (first + l) * pad, pad, each[l]);
    N with_g[8];
    transpose_rows<T, 8>(each[0], count, with_g);
    split_lanes<T>(gradient_scalars<T, N>(s, group, load_betas<T, N>(s, task, first, count, t), with_g), by);
  }
  for (int l = 0; l < count; ++l)
    backward_row<T, N, Pairs>(s, task, spectrum, group, by[l], l, normalized, projections, first + l, t,
                              gradients + (first + l) * row_stride<T>(2 * pad));
}

// Add the gradients of K and V, and of the bias, from gp and gq of `rows` rows.
template <class T> void add_weight_gradients(const Scan& s, const Task<T>& task, int64_t rows) {
  const int64_t m = s.size, pad = padded_size<T>(m), gradient_stride = row_stride<T>(2 * pad);
  for (int64_t half = 0; half < 2; ++half)
    add_outer_products<T>(rows, task.gradients + half * pad, gradient_stride, m, task.source, row_stride<T>(pad),
                          pad / panel_width<T>, task.weight_sums + half * pad * pad, pad);
}
template <class T> void add_bias_gradients(const Scan& s, const Task<T>& task, int64_t rows) {
  const int64_t pad = padded_size<T>(s.size), gradient_stride = row_stride<T>(2 * pad);
  double* const totals = task.totals + bias_sum * pad;
  for (int64_t i = 0; i < 2 * pad; i += lanes<T>) {
    Vec<T> sum = {};
    for (int64_t r = 0; r < rows; ++r) sum += load<T>(task.gradients + r * gradient_stride + i);
    for (int64_t l = 0; l < lanes<T>; ++l) totals[i + l] += sum[l];
  }
}

// Load the states before `count` steps, from step `last` backwards, and their sources.
template <class T> void load_states(const Scan& s, const Task<T>& task, int64_t last, int64_t count) {
  const int64_t m = s.size, pad = padded_size<T>(m), x_stride = row_stride<T>(pad), offset = task.head * m;
  for (int64_t i = 0; i < count * task.rows; ++i) {
    const int64_t t = last - i / task.rows, sequence = task.begin + i % task.rows;
    const T* before = t ? static_cast<const T*>(s.states) + (sequence * s.steps + t - 1) * s.width
                        : static_cast<const T*>(s.initial) + sequence * s.width;
    if (s.reset && s.reset[sequence * s.steps + t])
      std::memset(task.x + i * x_stride, 0, pad * sizeof(T));
    else
      load_row<T>(before + offset, m, task.x + i * x_stride, pad);
    update_source(s, task, i);
  }
}

// The backward of every row at step t, in a block of steps whose states are loaded. On return task.g is the gradient
// with respect to the state before the step.
template <class T, bool Pairs>
void step_backward(const Scan& s, Task<T>& task, const Weights<T>& transposed, int64_t t, const T* projections,
                   T* gradients, int64_t block_steps, Prefetcher& prefetcher) {
  const int64_t m = s.size, pad = padded_size<T>(m), n = s.heads * m, offset = task.head * m,
                x_stride = row_stride<T>(pad);
  const int64_t gradient_stride = row_stride<T>(2 * pad), prefetch_distance = task.rows < 8 ? 16 / task.rows : 1;
  const bool saved = has_weights(s) && s.projections;
  const Spectrum<T> spectrum = {task.real, task.imag}, feed = {task.feed_real, task.feed_imag};
  const T* normalized = apply_norm<T>(s, task, projections);
  const T* pairs = apply_fixed_dot<T>(s, task, normalized);
  prefetcher.clear();
  const int64_t row = task.begin * s.steps + t, ahead = row - prefetch_distance, state_stride = s.steps * s.width;
  if (t > block_steps)  // time runs backwards, which defeats the hardware prefetcher
    prefetcher.add(static_cast<const T*>(s.states) + (row - block_steps - 1) * s.width + offset, m, task.rows,
                   state_stride);
  if (t > prefetch_distance) {
    prefetcher.add(static_cast<const T*>(s.state_gradients) + ahead * s.width + offset, m, task.rows, state_stride);
    prefetcher.add(static_cast<const T*>(s.drive_gradients) + ahead * s.features + offset, m, task.rows,
                   s.steps * s.features);
    if (saved) prefetcher.add(projections - prefetch_distance * s.batch * 2 * pad, task.rows * 2 * pad);
    if (saved && task.rows >= min_prefetch_rows)
      prefetcher.add(dots_at(s, task, t - prefetch_distance), task.rows * dot_count);
  }
  for (int64_t r = 0; r < task.rows; ++r) {  // the incoming gradient, and the drive where it is needed
    const int64_t sequence = task.begin + r, at = (sequence * s.steps + t) * s.width + offset;
    T *g = task.g + r * pad, *slow_g = task.slow_g + r * pad, *u = task.u + r * pad, *slow = task.slow + r * pad;
    const T* incoming = static_cast<const T*>(s.state_gradients) + at;
    if (has_ended<T>(s, sequence, t)) {
      for (T* vectors : {g, slow_g}) std::memset(vectors, 0, pad * sizeof(T));
    } else {
      add_row<T>(incoming, m, g);
      if (s.slow_memory) add_row<T>(incoming + n, m, slow_g);
    }
    if (s.slow_memory) {
      T *decay_gradient = task.sum(decay_sum, pad), *charge_gradient = task.sum(charge_sum, pad),
        *after = task.scratch + r * 2 * pad;
      const T* before = t ? static_cast<const T*>(s.states) + at - s.width
                          : static_cast<const T*>(s.initial) + sequence * s.width + offset;
      if (s.reset && s.reset[sequence * s.steps + t])
        std::memset(slow, 0, pad * sizeof(T));
      else
        load_row<T>(before + n, m, slow, pad);
      load_row<T>(static_cast<const T*>(s.states) + at, m, after, pad);
      for (int64_t i = 0; i < pad; i += lanes<T>) {
        Vec<T> from = load<T>(slow_g + i);
        store<T>(g + i, load<T>(g + i) + load<T>(task.charge + i) * from);
        store<T>(decay_gradient + i, load<T>(decay_gradient + i) + from * load<T>(slow + i));
        store<T>(charge_gradient + i, load<T>(charge_gradient + i) + from * load<T>(after + i));
        store<T>(slow_g + i, load<T>(task.decay + i) * from);
      }
    }
    if (s.rotation_aware) {
      load_row<T>(static_cast<const T*>(s.drive) + (sequence * s.steps + t) * s.features + offset, m, u, pad);
      for (int64_t i = 0; s.slow_memory && i < pad; i += lanes<T>)
        store<T>(u + i, load<T>(u + i) + apply_lambda<T, Pairs>(feed, i, load<T>(slow + i)));
    }
  }
  T* const dots = dots_at(s, task, t);
  for (int64_t first = 0; first < task.rows; first += lanes<T>) {
    const int count = std::min<int64_t>(lanes<T>, task.rows - first);
    if (count == 1)
      backward_rows<T, T, Pairs>(s, task, spectrum, pairs, normalized, projections, dots, saved, first, count, t,
                                 gradients);
    else
      backward_rows<T, Vec<T>, Pairs>(s, task, spectrum, pairs, normalized, projections, dots, saved, first, count, t,
                                      gradients);
  }
  const Ranges both = {m, pad - m, m};
  const bool weighted = has_weights(s);
  if (weighted && s.source == identity && !s.factored) {
    matmul<T, true>(task.rows, gradients, gradient_stride, both, transposed.panels, pad / panel_width<T>,
                    task.previous_g, pad, &prefetcher);
  } else if (weighted) {
    if (s.factored)
      factored_backward<T>(factor_shape(s), transposed.factors, task.rows, gradients, gradient_stride,
                           task.factor_scratch, task.scratch);
    else
      matmul<T, false>(task.rows, gradients, gradient_stride, both, transposed.panels, pad / panel_width<T>,
                       task.scratch, pad);
    for (int64_t r = 0; r < task.rows; ++r)
      for (int64_t i = 0; i < pad; i += lanes<T>)
        add_vector<T>(task.previous_g + r * pad + i,
                      mask_by_source<T>(s, load<T>(task.x + r * x_stride + i), load<T>(task.scratch + r * pad + i)));
  }
  prefetcher.issue_rest();
  std::swap(task.g, task.previous_g);
  if (s.reset)
    for (int64_t r = 0; r < task.rows; ++r)
      if (s.reset[(task.begin + r) * s.steps + t])
        for (T* vectors : {task.g, task.slow_g}) std::memset(vectors + r * pad, 0, pad * sizeof(T));
}

template <class T, bool Pairs>
void run_backward(const Scan& s, Task<T>& task, const Weights<T>& weights, const Weights<T>& transposed) {
  const int64_t m = s.size, pad = padded_size<T>(m), n = s.heads * m, offset = task.head * m;
  const int64_t x_stride = row_stride<T>(pad), gradient_stride = row_stride<T>(2 * pad),
                block_steps = steps_per_block(s, task.rows);
  const bool weighted = has_weights(s);
  load_constants(s, task);
  const int64_t summed = (s.has_norm ? bias_sum : norm_weight_sum) * pad,
                partial_sum_steps = std::max<int64_t>(1, partial_sum_rows / task.rows);
  std::memset(task.sums, 0, summed * sizeof(T));
  for (T* vectors : {task.g, task.slow_g}) std::memset(vectors, 0, task.rows * pad * sizeof(T));
  if (s.source == identity) task.x = task.source;
  T* const x = task.x;
  Prefetcher prefetcher;
  for (int64_t last = s.steps - 1; last >= 0; last -= block_steps) {
    const int64_t count = std::min(block_steps, last + 1);
    task.x = x;
    load_states(s, task, last, count);
    if (s.directions_in_drive || (weighted && !s.projections))
      project<T>(s, task, weights, last, count * task.rows, task.projections);
    for (int64_t t = last, at = 0; t > last - count; --t, at += task.rows) {
      const T* projections = projections_at(s, task, t) + (s.projections ? 0 : at * 2 * pad);
      task.x = x + at * x_stride;
      step_backward<T, Pairs>(s, task, transposed, t, projections, task.gradients + at * gradient_stride, block_steps,
                              prefetcher);
      if (t % partial_sum_steps == 0) {  // partial sums, then a sum in double: the error does not grow with T
        for (int64_t i = pad; i < summed; ++i) task.totals[i] += task.sums[i];
        std::memset(task.sums, 0, summed * sizeof(T));
      }
    }
    if (weighted && s.weight_gradients) add_weight_gradients<T>(s, task, count * task.rows);
    if (weighted && s.bias_gradients) add_bias_gradients<T>(s, task, count * task.rows);
  }
  for (int64_t r = 0; s.initial_gradients && r < task.rows; ++r) {
    T* to = static_cast<T*>(s.initial_gradients) + (task.begin + r) * s.width + offset;
    std::memcpy(to, task.g + r * pad, m * sizeof(T));
    if (s.slow_memory) std::memcpy(to + n, task.slow_g + r * pad, m * sizeof(T));
  }
}

// Benchmarks only: run the matrix products of all steps and nothing else, as a baseline.
enum Products { forward_products, backward_products, weight_products, not_only_products };

template <class T>
void run_products(const Scan& s, Task<T>& task, const Weights<T>& weights, const Weights<T>& transposed,
                  int64_t which) {
  const int64_t m = s.size, pad = padded_size<T>(m), x_stride = row_stride<T>(pad),
                gradient_stride = row_stride<T>(2 * pad);
  const int64_t block_steps = which == forward_products ? 1 : steps_per_block(s, task.rows);
  for (int64_t i = 0; i < block_steps * task.rows * x_stride; ++i) task.source[i] = 1;
  for (int64_t i = 0; which != forward_products && i < block_steps * task.rows * gradient_stride; ++i)
    task.gradients[i] = 1;
  for (int64_t t = 0; t < s.steps; ++t)
    if (which == forward_products)
      project<T>(s, task, weights, t, task.rows, task.projections);
    else if (which == backward_products)
      matmul<T, false>(task.rows, task.gradients, gradient_stride, {m, pad - m, m}, transposed.panels,
                       pad / panel_width<T>, task.previous_g, pad);
    else if (t % block_steps == 0)
      add_weight_gradients<T>(s, task, std::min(block_steps, s.steps - t) * task.rows);
}

// Sizes in entries of T.
template <class T> int64_t task_memory(const Scan& s, bool backward) {
  Arena<T> memory = {nullptr, 0};
  Task<T>{}.allocate(s, s.tile, backward, memory);
  return memory.used;
}

template <class T> int64_t weight_memory(const Scan& s) {
  Arena<T> memory = {nullptr, 0};
  Weights<T>{}.allocate(s, memory);
  return has_weights(s) ? memory.used : 0;
}

template <class T> void pack_weights(const Scan& s, int64_t head, bool backward, Weights<T>& to) {
  const int64_t m = s.size;
  auto head_part = [&](const void* input, int64_t each) { return static_cast<const T*>(input) + head * 2 * each; };
  if (s.factored) {
    const FactorInputs<T> inputs = {head_part(s.left, m * s.rank), head_part(s.right, m * s.rank),
                                    head_part(s.outer, s.outer_size * s.outer_size),
                                    head_part(s.inner, s.inner_size * s.inner_size)};
    backward ? pack_factors_backward<T>(factor_shape(s), inputs, to.factors)
             : pack_factors<T>(factor_shape(s), inputs, to.factors);
  } else {
    backward ? pack_backward<T>(head_part(s.weight, m * m), m, to.panels)
             : pack_forward<T>(head_part(s.weight, m * m), m, to.panels, to.for_matvec);
  }
}

// Entries of the weight gradients that one thread accumulates: (heads, 2 pad, pad).
template <class T> int64_t sum_memory(const Scan& s) {
  return has_weights(s) ? s.heads * 2 * padded_size<T>(s.size) * padded_size<T>(s.size) : 0;
}

// Sum the weight gradients over the threads; zero if `sums` is null, because there is no rotation.
template <class T> void reduce_weight_gradients(const Scan& s, const T* sums) {
  const int64_t m = s.size, pad = padded_size<T>(m);
  T* to = static_cast<T*>(s.weight_gradients);
  for (int64_t part = 0; part < 2 * s.heads; ++part)
    for (int64_t i = 0; i < m; ++i, to += m) {
      std::memset(to, 0, m * sizeof(T));
      for (int64_t thread = 0; sums && thread < s.threads; ++thread)
        add_row<T>(sums + thread * sum_memory<T>(s) + (part * pad + i) * pad, m, to);
    }
}

// Sum the gradients of all other constants over the tiles; `sums` is (heads, tiles, sum_count, pad). The sums of
// imaginary parts belong to the multipliers of swapped pairs, whose first entry has the sign reversed.
template <class T> void reduce_sums(const Scan& s, const double* sums, int64_t tiles) {
  const int64_t m = s.size, pad = padded_size<T>(m);
  auto reduce = [&](void* gradient, Sum which, int64_t vectors, int64_t size, bool imaginary = false) {
    T* to = static_cast<T*>(gradient);
    for (int64_t at = 0; to && at < s.heads * vectors * size; ++at) {
      const int64_t i = at % size, vector = at / size % vectors, head = at / size / vectors;
      double total = 0;
      for (int64_t tile = 0; sums && tile < tiles; ++tile)
        total += sums[((head * tiles + tile) * sum_count + which + vector) * pad + i];
      to[at] = T(imaginary && i % 2 == 0 ? -total : total);
    }
  };
  reduce(s.real_gradients, real_sum, 1, m);
  reduce(s.imag_gradients, imag_sum, 1, m, true);
  reduce(s.bias_gradients, bias_sum, 2, m);
  reduce(s.beta_gradients, beta_sum, 1, 1);
  reduce(s.feed_real_gradients, feed_real_sum, 1, m);
  reduce(s.feed_imag_gradients, feed_imag_sum, 1, m, true);
  reduce(s.decay_gradients, decay_sum, 1, m);
  reduce(s.charge_gradients, charge_sum, 1, m);
  reduce(s.norm_weight_gradients, norm_weight_sum, 2, m);
  reduce(s.norm_bias_gradients, norm_bias_sum, 2, m);
}

// Size of the sums in double of all tasks, counted in T and rounded up as `Arena` does.
template <class T> int64_t totals_memory(const Scan& s, int64_t tasks) {
  const int64_t count = tasks * sum_count * padded_size<T>(s.size) * int64_t(sizeof(double) / sizeof(T));
  return (count + 15) / 16 * 16;
}
INLINE int64_t tile_count(const Scan& s) { return (s.batch + s.tile - 1) / s.tile; }

template <class T> void run(const Scan& s, bool backward, Products products = not_only_products) {
  const int64_t tiles = tile_count(s), tasks = tiles * s.heads;
  const bool weighted = has_weights(s);
  Arena<T> memory = {static_cast<T*>(s.workspace), 0};
  std::vector<Weights<T>> weights(s.heads), transposed(s.heads);
  for (int64_t h = 0; weighted && h < s.heads; ++h) {
    weights[h].allocate(s, memory);
    weights[h].for_matvec = s.tile == 1 && !backward;  // the backward projects many steps at once
    if (!backward || !s.projections) pack_weights<T>(s, h, false, weights[h]);
    if (!backward) continue;
    transposed[h].allocate(s, memory);
    pack_weights<T>(s, h, true, transposed[h]);
  }
  const int64_t totals_size = backward ? totals_memory<T>(s, tasks) : 0, sums_size = sum_memory<T>(s);
  double* const totals = reinterpret_cast<double*>(memory.allocate(totals_size));
  if (totals_size) std::memset(totals, 0, totals_size * sizeof(T));
  T* const sums = backward && sums_size ? memory.allocate(s.threads * sums_size) : nullptr;
  auto worker = [&](int64_t thread) {
    if (sums) std::memset(sums + thread * sums_size, 0, sums_size * sizeof(T));
    for (int64_t i = thread; i < tasks; i += s.threads) {
      Task<T> task = {};
      if (backward) task.totals = totals + i * sum_count * padded_size<T>(s.size);
      task.head = i / tiles;
      if (sums) task.weight_sums = sums + thread * sums_size + task.head * (sums_size / s.heads);
      task.begin = i % tiles * s.tile;
      task.rows = task.begin + s.tile > s.batch ? s.batch - task.begin : s.tile;
      Arena<T> own = {memory.base + memory.used + thread * task_memory<T>(s, backward), 0};
      task.allocate(s, s.tile, backward, own);
      const Weights<T>&by = weights[task.head], &by_transposed = transposed[task.head];
      if (products != not_only_products)
        run_products<T>(s, task, by, by_transposed, products);
      else if (backward)
        s.complex_pairs ? run_backward<T, true>(s, task, by, by_transposed)
                        : run_backward<T, false>(s, task, by, by_transposed);
      else
        s.complex_pairs ? run_forward<T, true>(s, task, by) : run_forward<T, false>(s, task, by);
    }
  };
  run_in_threads(s.threads, worker);
  if (s.weight_gradients) reduce_weight_gradients<T>(s, sums);
  if (backward) reduce_sums<T>(s, totals, tiles);
}

// Size of the workspace in bytes.
template <class T> int64_t workspace(const Scan& s, bool backward) {
  const int64_t weights = s.heads * weight_memory<T>(s) * (backward ? 2 : 1);
  const int64_t each = task_memory<T>(s, backward) + (backward ? sum_memory<T>(s) : 0);
  return (weights + s.threads * each + (backward ? totals_memory<T>(s, tile_count(s) * s.heads) : 0)) * sizeof(T);
}

}  // namespace

extern "C" {
EXPORT int64_t adpt_scan_layout() { return sizeof(Scan); }
EXPORT int64_t adpt_scan_workspace(const Scan* s, int64_t backward) { return workspace<SCALAR>(*s, backward); }
EXPORT void adpt_scan_forward(const Scan* s) { run<SCALAR>(*s, false); }
EXPORT void adpt_scan_backward(const Scan* s) { run<SCALAR>(*s, true); }
EXPORT void adpt_scan_products(const Scan* s, int64_t which) {
  run<SCALAR>(*s, which != forward_products, Products(which));
}
}
