// The ADPT recurrence, forward and backward, for float and double. The derivation is in the README beside this file.
//
// A task is one head of a tile of sequences; it runs all its steps alone, so there is no barrier. Vectors of a state are
// padded with zeros to `pad`, a whole number of panels, in the memory of a task; tensors of the caller are not padded,
// except the projections, which nobody else reads. Only GCC and Clang vector extensions are used.

#include <algorithm>

#include "factored.h"
#include "products.h"
#include "rotation.h"

// Mirrored field by field in cpu.py. Pointers without a type are to NUMBER: float or double, chosen when it is compiled.
struct Scan {
  int64_t batch, steps, heads, size;      // size: of one head
  int64_t features, width;                // of a row of the drive, of a row of the state
  int64_t tile, threads;                  // sequences in a tile
  int64_t complex_pairs, given, turns, source, form, aware, coupled, beta_given, mixes, norms;
  int64_t factored, rank, outer_size, inner_size;  // K and V by their factors, and the sizes of those
  double spike, dot, norm;                // dot: of key and value, if `mixes`; norm: an epsilon, if `norms`
  // Inputs. With `factored`: left to inner, of one head after the other, of K and then of V.
  const void *drive, *initial, *real, *imag, *weight, *bias, *beta;
  const void *feed_real, *feed_imag, *decay, *charge, *norm_weight, *norm_bias;
  const uint8_t* reset;
  const int64_t* lengths;
  const void *left, *right, *outer, *inner;
  void *states, *projections;  // projections: (heads, steps, batch, 2 pad), then their dot products; may be null
  const void* state_gradients;
  // Derivatives of the first thirteen inputs; but for the first any may be null: nobody asks for it.
  void *drive_gradients, *initial_gradients;
  void *real_gradients, *imag_gradients, *weight_gradients, *bias_gradients, *beta_gradients;
  void *feed_real_gradients, *feed_imag_gradients, *decay_gradients, *charge_gradients;
  void *norm_weight_gradients, *norm_bias_gradients;
  void* workspace;
};

namespace {

enum Source { identity, relu, spikes };

// Derivatives that are summed over rows and steps, one vector each but for beta, which is the first number of its own. The
// last six are those of the LayerNorm and of the bias, of key and of value.
enum Sum {
  of_beta, of_real, of_imag, of_feed_real, of_feed_imag, of_decay, of_charge,
  of_norm_weight, of_norm_bias = of_norm_weight + 2, of_bias = of_norm_bias + 2, every_sum = of_bias + 2
};

// Of so many sequences, whose rows lie far apart, the processor does not see the next step coming.
constexpr int64_t many_rows = 4;

// ---- A fixed dot product --------------------------------------------------------------------------------------------

template <class T> INLINE T dot(const T* a, const T* b, int64_t pad) {
  Vec<T> sum[8] = {};
  for (int64_t i = 0; i < pad; i += lanes<T>) sum[0] += load<T>(a + i) * load<T>(b + i);
  T total[8];
  sum_lanes<T, 8>(sum, total);
  return total[0];
}
template <class T> INLINE void add_times(T scale, const T* from, T* to, int64_t pad) {
  for (int64_t i = 0; i < pad; i += lanes<T>) store<T>(to + i, load<T>(to + i) + scale * load<T>(from + i));
}
template <class T> INLINE void set_times(T scale, const T* from, T* to, int64_t pad) {
  for (int64_t i = 0; i < pad; i += lanes<T>) store<T>(to + i, scale * load<T>(from + i));
}

// k = unit(p), v = unit(q), e = unit(k - (k.v) v); their scales, 0 for a vector that counts as zero.
template <class T> struct Mix {
  T *k, *v, *e;
  T key_scale, value_scale, across_scale, along;
};

template <class T> void unit_or_zero(const T* from, T* to, int64_t pad, T& scale) {
  if (to_unit<T>(from, to, pad, scale)) return;
  std::memset(to, 0, pad * sizeof(T));
  scale = 0;
}

template <class T> Mix<T> mix(const T* p, const T* q, int64_t pad, T* scratch) {
  Mix<T> out = {scratch, scratch + pad, scratch + 2 * pad, 0, 0, 0, 0};
  T* across = scratch + 3 * pad;
  unit_or_zero<T>(p, out.k, pad, out.key_scale);
  unit_or_zero<T>(q, out.v, pad, out.value_scale);
  out.along = dot<T>(out.k, out.v, pad);
  set_times<T>(1, out.k, across, pad);
  add_times<T>(-out.along, out.v, across, pad);
  unit_or_zero<T>(across, out.e, pad, out.across_scale);
  // What is left of a key that is almost the value is mostly rounding: take its part again.
  T again;
  add_times<T>(-dot<T>(out.e, out.v, pad), out.v, out.e, pad);
  set_times<T>(1, out.e, across, pad);
  unit_or_zero<T>(across, out.e, pad, again);
  return out;
}

// p and q with the key at the fixed angle from the value, and back: derivatives of those to derivatives of p and q.
template <class T> void mix_forward(const Scan& s, const T* p, const T* q, int64_t pad, T* scratch, T* out) {
  Mix<T> from = mix<T>(p, q, pad, scratch);
  set_times<T>(std::sqrt(T(1 - s.dot * s.dot)), from.e, out, pad);
  add_times<T>(T(s.dot), from.v, out, pad);
  set_times<T>(1, from.v, out + pad, pad);
}
template <class T> void mix_backward(const Scan& s, const T* p, const T* q, int64_t pad, T* scratch, T* gradients) {
  Mix<T> from = mix<T>(p, q, pad, scratch);
  T *key = gradients, *value = gradients + pad, *across = scratch + 3 * pad;
  add_times<T>(T(s.dot), key, value, pad);
  set_times<T>(std::sqrt(T(1 - s.dot * s.dot)) * from.across_scale, key, across, pad);
  add_times<T>(-dot<T>(from.e, across, pad), from.e, across, pad);
  T lost = dot<T>(from.v, across, pad);
  add_times<T>(-from.along, across, value, pad);
  add_times<T>(-lost, from.k, value, pad);
  set_times<T>(1, across, key, pad);
  add_times<T>(-lost, from.v, key, pad);
  add_times<T>(-dot<T>(from.k, key, pad), from.k, key, pad);
  add_times<T>(-dot<T>(from.v, value, pad), from.v, value, pad);
  set_times<T>(from.key_scale, key, key, pad);
  set_times<T>(from.value_scale, value, value, pad);
}

// ---- A LayerNorm ----------------------------------------------------------------------------------------------------

// What a projection p became on its way to weight (y - mean) spread + bias, y = p scale; scale is 0 if p counts as zero.
template <class T> struct Normed {
  T scale, mean, spread;
};

template <class T> T sum_of(const T* from, int64_t pad) {
  Vec<T> sum[8] = {};
  for (int64_t i = 0; i < pad; i += lanes<T>) sum[0] += load<T>(from + i);
  T total[8];
  sum_lanes<T, 8>(sum, total);
  return total[0];
}

// `ones` are one where there are entries, so that the padding stays zero.
template <class T>
Normed<T> norm_forward(const Scan& s, const T* p, const T* weight, const T* bias, const T* ones, int64_t pad, T* out) {
  Normed<T> by;
  const T squared = dot<T>(p, p, pad);
  if (within_range(squared)) {
    by.scale = 1 / std::sqrt(squared);
    set_times<T>(by.scale, p, out, pad);
  } else {
    unit_or_zero<T>(p, out, pad, by.scale);
  }
  by.mean = sum_of<T>(out, pad) / s.size;
  add_times<T>(-by.mean, ones, out, pad);
  by.spread = 1 / std::sqrt(dot<T>(out, out, pad) / s.size + T(s.norm));
  for (int64_t i = 0; i < pad; i += lanes<T>)
    store<T>(out + i, by.spread * load<T>(out + i) * load<T>(weight + i) + load<T>(bias + i));
  return by;
}

// Derivatives of what came out to derivatives of p, in their place. The part along y is closed in scalars: without epsilon
// the length of y would not matter at all.
template <class T>
void norm_backward(const Scan& s, const T* p, const Normed<T>& by, const T* weight, const T* ones, int64_t pad,
                   T* gradients, T* weight_sums, T* bias_sums) {
  const T by_p = by.spread * by.scale, by_one = by.spread * by.mean;
  auto normed = [&](int64_t i) { return by_p * load<T>(p + i) - by_one * load<T>(ones + i); };
  Vec<T> sum[8] = {};
  for (int64_t i = 0; i < pad; i += lanes<T>) {
    Vec<T> from = load<T>(gradients + i), z = normed(i), weighted = load<T>(weight + i) * from;
    sum[0] += weighted;
    sum[1] += weighted * z;
    store<T>(weight_sums + i, load<T>(weight_sums + i) + from * z);
    store<T>(bias_sums + i, load<T>(bias_sums + i) + from);
  }
  T total[8];
  sum_lanes<T, 8>(sum, total);
  const T shift = total[0] / s.size, along = total[1] / s.size, lost = total[1] * T(s.norm) * by.spread * by.spread;
  for (int64_t i = 0; i < pad; i += lanes<T>) {
    Vec<T> weighted = load<T>(weight + i) * load<T>(gradients + i);
    Vec<T> to_y = by.spread * (weighted - shift * load<T>(ones + i) - along * normed(i));
    store<T>(gradients + i, by.scale * (to_y - lost * by.scale * load<T>(p + i)));
  }
}

// ---- Tasks ----------------------------------------------------------------------------------------------------------

template <class T> INLINE Vec<T> sourced(const Scan& s, Vec<T> x) {
  if (s.source == relu) return x <= 0 ? Vec<T>{} : x;  // NaN stays
  if (s.source == spikes) return x >= T(s.spike) ? Vec<T>{} + 1 : Vec<T>{};
  return x;
}
// Where the derivative of `sourced` is one; elsewhere it is zero.
template <class T> INLINE Vec<T> masked(const Scan& s, Vec<T> x, Vec<T> gradient) {
  if (s.source == identity) return gradient;
  if (s.source == relu) return x > 0 ? gradient : Vec<T>{};
  Vec<T> off = x - T(s.spike);
  return (off >= T(-0.5)) & (off <= T(0.5)) ? gradient : Vec<T>{};
}

INLINE Shape shape_of(const Scan& s) { return {s.size, s.rank, s.outer_size, s.inner_size}; }

// [K; V] of one head, or their transpose.
template <class T> struct Weights {
  T* panels;
  bool for_one;  // packed for products with one row
  Factors<T> factors;

  void lay_out(const Scan& s, Arena<T>& memory) {
    if (s.factored)
      factors.lay_out(shape_of(s), memory);
    else
      panels = memory.take(2 * padded<T>(s.size) * s.size);
  }
};

// Rows of the backward whose derivatives go into those of the weights together: long products, still in the cache.
constexpr int64_t rows_held = 64;
constexpr int64_t rows_summed = 128;  // before their sum goes to a sum in double
INLINE int64_t steps_held(const Scan& s, int64_t rows) {
  return s.turns && !s.given && rows < rows_held ? rows_held / rows : 1;
}

template <class T> struct Task {
  int64_t head, begin, rows;
  T *real, *imag, *bias, *feed_real, *feed_imag, *decay, *charge, *norm_weight, *norm_bias, *ones;
  T *x, *source, *slow, *u, *projections, *dots, *scratch, *normed, *mixed, *mixing;
  T *g, *slow_g, *partial, *gradients, *sums;
  double* totals;  // (every_sum, pad), see Sum: those of beta and of the bias, and from time to time what is in `sums`
  T* weight_sums;  // (2 pad, pad), of this thread
  Normed<T>* norms;  // of key and value of each row
  Between<T> between;

  void lay_out(const Scan& s, int64_t tile, bool backward, Arena<T>& memory) {
    int64_t pad = padded<T>(s.size);
    for (T** vector : {&real, &imag, &feed_real, &feed_imag, &decay, &charge}) *vector = memory.take(pad);
    for (T** vectors : {&bias, &norm_weight, &norm_bias}) *vectors = memory.take(2 * pad);
    ones = memory.take(pad);
    const int64_t held = backward && tile < rows_held ? rows_held : tile;
    for (T** vectors : {&x, &source}) *vectors = memory.take(held * spaced<T>(pad));
    for (T** vectors : {&slow, &u}) *vectors = memory.take(tile * pad);
    projections = memory.take(held * 2 * pad);
    dots = memory.take(tile * ::dots);
    scratch = memory.take(tile * 2 * pad);
    normed = memory.take(s.norms ? tile * 2 * pad : 0);
    norms = reinterpret_cast<Normed<T>*>(memory.take(s.norms ? tile * 2 * sizeof(Normed<T>) / sizeof(T) : 0));
    if (s.factored) between.lay_out(shape_of(s), held, memory);
    mixed = memory.take(s.mixes ? tile * 2 * pad : 0);
    mixing = memory.take(s.mixes ? 4 * pad : 0);
    if (!backward) return;
    for (T** vectors : {&g, &slow_g, &partial}) *vectors = memory.take(tile * pad);
    gradients = memory.take(held * spaced<T>(2 * pad));
    sums = memory.take(every_sum * pad);
  }

  T* sum(Sum which, int64_t pad) const { return sums + which * pad; }
};

template <class T> void copy_padded(const void* from, int64_t offset, int64_t size, int64_t pad, T* to) {
  const T* values = static_cast<const T*>(from);
  for (int64_t i = 0; i < pad; ++i) to[i] = values && i < size ? values[offset + i] : T(0);
}

template <class T> void load_constants(const Scan& s, Task<T>& task) {
  int64_t m = s.size, pad = padded<T>(m), at = task.head * m;
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

// The p and q of `rows` sources; those that come with the drive are of every row at step t.
template <class T>
INLINE void project(const Scan& s, const Task<T>& task, const Weights<T>& by, int64_t t, int64_t rows, T* out,
                    Ahead* ahead = nullptr) {
  const int64_t m = s.size, pad = padded<T>(m), n = s.heads * m;
  if (s.given) {
    for (int64_t r = 0; r < task.rows; ++r, out += 2 * pad) {
      const T* row = static_cast<const T*>(s.drive) + ((task.begin + r) * s.steps + t) * s.features + n + task.head * m;
      fetch<T>(row, m, out, pad);
      fetch<T>(row + n, m, out + pad, pad);
    }
    return;
  }
  if (s.factored)
    factored<T>(shape_of(s), by.factors, rows, task.source, spaced<T>(pad), task.between, out);
  else if (by.for_one)
    product_of_one<T>(task.source, m, by.panels, 2 * pad / panel<T>, out);
  else
    product<T, false>(rows, task.source, spaced<T>(pad), {m, 0, 0}, by.panels, 2 * pad / panel<T>, out, 2 * pad, ahead);
  if (s.bias)
    for (int64_t r = 0; r < rows; ++r, out += 2 * pad)
      for (int64_t i = 0; i < 2 * pad; i += lanes<T>) store<T>(out + i, load<T>(out + i) + load<T>(task.bias + i));
}

// The projections, or those after the LayerNorm.
template <class T> const T* normed_rows(const Scan& s, const Task<T>& task, const T* projections) {
  if (!s.norms) return projections;
  const int64_t pad = padded<T>(s.size);
  for (int64_t i = 0; i < 2 * task.rows; ++i) {
    const int64_t half = i % 2 * pad;
    task.norms[i] = norm_forward<T>(s, projections + i * pad, task.norm_weight + half, task.norm_bias + half, task.ones,
                                    pad, task.normed + i * pad);
  }
  return task.normed;
}
// The rows that directions are taken of: those, or those with a fixed dot product.
template <class T> const T* mixed_rows(const Scan& s, const Task<T>& task, const T* normed) {
  if (!s.mixes) return normed;
  const int64_t pad = padded<T>(s.size);
  for (int64_t r = 0; r < task.rows; ++r) {
    const T* p = normed + r * 2 * pad;
    mix_forward<T>(s, p, p + pad, pad, task.mixing, task.mixed + r * 2 * pad);
  }
  return task.mixed;
}

template <class T> void make_sources(const Scan& s, const Task<T>& task, int64_t r) {
  const int64_t pad = padded<T>(s.size), at = r * spaced<T>(pad);
  if (s.source == identity) return;  // x itself
  for (int64_t i = at; i < at + pad; i += lanes<T>) store<T>(task.source + i, sourced<T>(s, load<T>(task.x + i)));
}

// Of `count` rows from `first` on at step t; lanes without a row hold that of the first.
template <class T, class N> INLINE N betas_of(const Scan& s, const Task<T>& task, int64_t first, int count, int64_t t) {
  if (!s.beta_given) return N{} + (s.beta ? static_cast<const T*>(s.beta)[task.head] : T(0));
  T each[rows_in<N>];
  for (int l = 0; l < rows_in<N>; ++l) {
    const int64_t sequence = task.begin + first + (l < count ? l : 0);
    each[l] = static_cast<const T*>(s.drive)[(sequence * s.steps + t + 1) * s.features - 1];
  }
  N out;
  std::memcpy(&out, each, sizeof out);
  return out;
}

template <class T> INLINE bool ended(const Scan& s, int64_t sequence, int64_t t) {
  return s.lengths && t >= s.lengths[sequence];
}

// From factors of k and w to factors of p and q.
template <class T, class N> INLINE Turn<N> on_pairs(const Group<T, N>& group, const Turn<N>& by) {
  return {group.on_p * (by.y1 + group.on_k * by.y2), group.on_q * by.y2, group.on_p * (by.m1 + group.on_k * by.m2),
          group.on_q * by.m2};
}

// x becomes L (x + y1 p + y2 q) + m1 p + m2 q + u, also in `state`, which is the caller's and not padded.
template <class T, bool Pairs>
INLINE void advance(const Eigen<T> eigen, int64_t size, const T* u, const T* p, const T* q, Turn<T> by, T* x, T* state) {
  auto next = [&](int64_t i, Vec<T> driven) {
    const Vec<T> a = load<T>(p + i), b = load<T>(q + i), old = load<T>(x + i);
    if constexpr (Pairs) {
      return times<T, true>(eigen, i, old + by.y1 * a + by.y2 * b) + (by.m1 * a + by.m2 * b) + driven;
    } else {
      const Vec<T> real = load<T>(eigen.real + i);
      return (real * old + driven) + (real * by.y1 + by.m1) * a + (real * by.y2 + by.m2) * b;
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
  Vec<T> driven = {};
  for (int64_t l = 0; i + l < size; ++l) driven[l] = u[i + l];
  Vec<T> value = next(i, driven);
  store<T>(x + i, value);
  for (int64_t l = 0; i + l < size; ++l) state[i + l] = value[l];
}

// Where the projections of the rows at step t are, and where their dot products: kept for the backward, or of the task.
template <class T> INLINE T* projections_at(const Scan& s, const Task<T>& task, int64_t t) {
  const int64_t row = (task.head * s.steps + t) * s.batch + task.begin;
  return s.projections ? static_cast<T*>(s.projections) + row * 2 * padded<T>(s.size) : task.projections;
}
template <class T> INLINE T* dots_at(const Scan& s, const Task<T>& task, int64_t t) {
  const int64_t row = (task.head * s.steps + t) * s.batch + task.begin, rows = s.heads * s.steps * s.batch;
  return s.projections ? static_cast<T*>(s.projections) + rows * 2 * padded<T>(s.size) + row * dots : task.dots;
}

// Where the rows of a step are, from `first` on.
template <class T> INLINE auto places(const Scan& s, const Task<T>& task, const T* pairs, int64_t first) {
  const int64_t pad = padded<T>(s.size);
  return [=, &s, &task](int64_t l) -> Place<T> {
    return {pairs + (first + l) * 2 * pad, task.x + (first + l) * spaced<T>(pad),
            s.aware ? task.u + (first + l) * pad : nullptr};
  };
}

// The next state of `count` rows from `first` on, whose numbers are computed together: one row or the lanes of a vector.
template <class T, class N, bool Pairs>
void forward_rows(const Scan& s, const Task<T>& task, const Eigen<T>& eigen, const T* pairs, T* products,
                  int64_t first, int count, int64_t t) {
  const int64_t m = s.size, pad = padded<T>(m), apart = spaced<T>(pad), n = s.heads * m, offset = task.head * m;
  Group<T, N> group;
  Turn<N> by = {};
  if (s.turns) {
    directions<T, N, Pairs>(eigen, places(s, task, pairs, first), count, pad, products + first * dots, false,
                            task.scratch + first * 2 * pad, group);
    by = on_pairs(group, turn<N>(s.form, group.plane, betas_of<T, N>(s, task, first, count, t)));
  }
  for (int l = 0; l < count; ++l) {
    const int64_t r = first + l, sequence = task.begin + r;
    T* state = static_cast<T*>(s.states) + (sequence * s.steps + t) * s.width + offset;
    if (ended<T>(s, sequence, t)) {
      std::memset(state, 0, m * sizeof(T));
      if (s.coupled) std::memset(state + n, 0, m * sizeof(T));
      continue;
    }
    const T* drive = static_cast<const T*>(s.drive) + (sequence * s.steps + t) * s.features + offset;
    const T* u = s.coupled || s.aware ? task.u + r * pad : drive;
    T* x = task.x + r * apart;
    if (s.turns && !group.still[l])
      advance<T, Pairs>(eigen, m, u, group.p[l], group.q[l],
                        {lane(by.y1, l), lane(by.y2, l), lane(by.m1, l), lane(by.m2, l)}, x, state);
    else
      advance<T, Pairs>(eigen, m, u, task.real, task.real, {0, 0, 0, 0}, x, state);  // anything, times zero
    if (s.coupled) {
      T* slow = task.slow + r * pad;
      for (int64_t j = 0; j < pad; j += lanes<T>)
        store<T>(slow + j, load<T>(task.decay + j) * load<T>(slow + j) + load<T>(task.charge + j) * load<T>(x + j));
      put<T>(slow, m, state + n);
    }
    make_sources(s, task, r);
  }
}

// One sequence by itself, whose K and V are applied to the state as it is: nothing hides what is done beside the product, so
// this does no more than it must.
INLINE bool is_alone(const Scan& s) {
  return s.tile == 1 && s.turns && s.source == identity &&
         !(s.given || s.factored || s.bias || s.norms || s.mixes || s.aware || s.coupled || s.beta_given || s.lengths);
}
template <class T, bool Pairs> void run_alone(const Scan& s, Task<T>& task, const Weights<T>& weights) {
  const int64_t m = s.size, pad = padded<T>(m), offset = task.head * m;
  const Eigen<T> eigen = {task.real, task.imag};
  const T beta = static_cast<const T*>(s.beta)[task.head];
  const T* u = static_cast<const T*>(s.drive) + task.begin * s.steps * s.features + offset;
  T *state = static_cast<T*>(s.states) + task.begin * s.steps * s.width + offset, *x = task.x;
  T *const projections = projections_at(s, task, 0), *const all_products = dots_at(s, task, 0);
  const int64_t to_next = s.projections ? s.batch : 0, panels = 2 * pad / panel<T>;
  load_constants(s, task);
  fetch<T>(static_cast<const T*>(s.initial) + task.begin * s.width + offset, m, x, pad);
  for (int64_t t = 0; t < s.steps; ++t) {
    if (s.reset && s.reset[task.begin * s.steps + t]) std::memset(x, 0, pad * sizeof(T));
    T *const p = projections + t * to_next * 2 * pad, *const products = all_products + t * to_next * dots;
    product_of_one<T>(x, m, weights.panels, panels, p);
    Group<T, T> group;
    auto place = [&](int) -> Place<T> { return {p, x, nullptr}; };
    directions<T, T, Pairs>(eigen, place, 1, pad, products, false, task.scratch, group);
    if (group.still[0])
      advance<T, Pairs>(eigen, m, u, task.real, task.real, {0, 0, 0, 0}, x, state);  // anything, times zero
    else
      advance<T, Pairs>(eigen, m, u, group.p[0], group.q[0], on_pairs(group, turn<T>(s.form, group.plane, beta)), x, state);
    u += s.features;
    state += s.width;
  }
}

template <class T, bool Pairs> void run_forward(const Scan& s, Task<T>& task, const Weights<T>& weights) {
  if (is_alone(s)) return run_alone<T, Pairs>(s, task, weights);
  const int64_t m = s.size, pad = padded<T>(m), apart = spaced<T>(pad), n = s.heads * m, offset = task.head * m;
  const bool kept_drive = s.coupled || s.aware;  // padded in memory of the task
  load_constants(s, task);
  if (s.source == identity) task.source = task.x;
  Eigen<T> eigen = {task.real, task.imag};
  for (int64_t r = 0; r < task.rows; ++r) {
    const T* from = static_cast<const T*>(s.initial) + (task.begin + r) * s.width + offset;
    fetch<T>(from, m, task.x + r * apart, pad);
    if (s.coupled) fetch<T>(from + n, m, task.slow + r * pad, pad);
    make_sources(s, task, r);
  }
  Ahead ahead;
  for (int64_t t = 0; t < s.steps; ++t) {
    if (s.reset)
      for (int64_t r = 0; r < task.rows; ++r)
        if (s.reset[(task.begin + r) * s.steps + t]) {
          for (T* vector : {task.x + r * apart, task.slow + r * pad}) std::memset(vector, 0, pad * sizeof(T));
          make_sources(s, task, r);
        }
    T *const projections = projections_at(s, task, t), *const products = dots_at(s, task, t);
    ahead.clear();
    if (task.rows >= many_rows && t + 1 < s.steps) {
      const int64_t at = task.begin * s.steps + t + 1;
      ahead.add(static_cast<const T*>(s.drive) + at * s.features + offset, m, task.rows, s.steps * s.features);
      ahead.add(static_cast<const T*>(s.states) + at * s.width + offset, m, task.rows, s.steps * s.width);
      if (s.projections) {
        ahead.add(projections_at(s, task, t + 1), task.rows * 2 * pad);
        ahead.add(dots_at(s, task, t + 1), task.rows * dots);
      }
    }
    if (s.turns) project<T>(s, task, weights, t, task.rows, projections, &ahead);
    ahead.rest();
    const T* normed = normed_rows<T>(s, task, projections);
    const T* pairs = mixed_rows<T>(s, task, normed);
    for (int64_t r = 0; kept_drive && r < task.rows; ++r) {
      T* fed = task.u + r * pad;
      fetch<T>(static_cast<const T*>(s.drive) + ((task.begin + r) * s.steps + t) * s.features + offset, m, fed, pad);
      for (int64_t i = 0; s.coupled && i < pad; i += lanes<T>)
        store<T>(fed + i, load<T>(fed + i) + times<T, Pairs>({task.feed_real, task.feed_imag}, i,
                                                            load<T>(task.slow + r * pad + i)));
    }
    for (int64_t first = 0; first < task.rows; first += lanes<T>) {
      const int count = std::min<int64_t>(lanes<T>, task.rows - first);
      count == 1 ? forward_rows<T, T, Pairs>(s, task, eigen, pairs, products, first, count, t)
                 : forward_rows<T, Vec<T>, Pairs>(s, task, eigen, pairs, products, first, count, t);
    }
  }
}

template <class T, bool Pairs>
INLINE void add_outer(T* sums, int64_t pad, int64_t i, Vec<T> left, Vec<T> right) {
  store<T>(sums + i, load<T>(sums + i) + left * right);
  if constexpr (Pairs) store<T>(sums + pad + i, load<T>(sums + pad + i) + left * swapped<T>(right));
}

template <class T> INLINE void add_at(T* to, Vec<T> change) { store<T>(to, load<T>(to) + change); }

// p.g, q.g, p.L'g and q.L'g, in the first four of eight.
template <class T, bool Pairs>
INLINE void dots_with_g(const Eigen<T> eigen, const T* p, const T* q, const T* g, int64_t pad, T* out) {
  Vec<T> sum[8] = {};
  for (int64_t i = 0; i < pad; i += lanes<T>) {
    Vec<T> a = load<T>(p + i), b = load<T>(q + i), from = load<T>(g + i), back = times_transposed<T, Pairs>(eigen, i, from);
    sum[0] += a * from;
    sum[1] += b * from;
    sum[2] += a * back;
    sum[3] += b * back;
  }
  sum_lanes<T, 8>(sum, out);
}

// What the derivatives of a row are made of. That of p is 1/|p| times a sum of L' Q'g, L Q'x (with the drive, if that is
// turned), g, x, p and q, that of q likewise. A Taylor polynomial is no rotation: of what is in Q'x and Q'g only a part is turned
// once more, and the rest of it is kept apart.
template <class N> struct Pull {
  N x_on_p, x_on_q, g_on_p, g_on_q;  // Q'x = x + x_on_p p + x_on_q q, and likewise Q'g
  N rest_x_on_k, rest_x_on_w, rest_g_on_k, rest_g_on_w;
  N state_on_p, state_on_q;          // the derivative of x is L' Q'g + these + what goes through p and q
  N key_back, key_kept, key_g, key_x, key_p, key_q;
  N value_back, value_kept, value_g, value_x, value_p, value_q;
  N beta, none;
};

// Of the rows of a group, from the dot products of p and q with g and with L' g.
template <class T, class N> INLINE Pull<N> pull_of(const Scan& s, const Group<T, N>& group, N beta, const N* with_g) {
  Pull<N> out = {};
  const Plane<N>& d = group.plane;
  const N c = group.dot;
  const N kg = group.on_p * with_g[0], wg = group.on_q * with_g[1] + group.on_k * kg;
  const N gLk = group.on_p * with_g[2], gLw = group.on_q * with_g[3] + group.on_k * gLk;
  const Turn<N> by = turn<N>(s.form, d, beta);
  const Plane<N> e = turn_backward<N>(s.form, d, beta, {gLk, gLw, kg, wg}, out.beta);
  N x_on_k = by.y1, x_on_w = by.y2, g_on_k = e.kLx, g_on_w = e.wLx;  // Q'x = x + x_on_k k + x_on_w w, and likewise Q'g
  if (s.form == taylor_one) x_on_k = x_on_w = g_on_k = g_on_w = N{};
  if (s.form == taylor_two) {
    x_on_k = -beta * d.wx;
    x_on_w = beta * d.kx;
    g_on_k = -beta * wg;
    g_on_w = beta * kg;
  }
  // Dot products of k and w with L' Q'g and with L Q'x.
  const N k_back = gLk + g_on_k * d.kLk + g_on_w * d.wLk, w_back = gLw + g_on_k * d.kLw + g_on_w * d.wLw;
  const N k_kept = d.kLx + x_on_k * d.kLk + x_on_w * d.kLw + d.ku;
  const N w_kept = d.wLx + x_on_k * d.wLk + x_on_w * d.wLw + d.wu;
  // The components of the derivatives of k and w that the normalisations take away, closed in scalars.
  N k_gk = x_on_k * k_back + g_on_k * k_kept + by.m1 * kg + e.kx * d.kx;
  N k_gw = x_on_w * k_back + g_on_w * k_kept + by.m2 * kg + e.wx * d.kx;
  N w_gw = x_on_w * w_back + g_on_w * w_kept + by.m2 * wg + e.wx * d.wx + 2 * e.ww * d.ww;
  if (s.form >= taylor_one) {
    out.rest_x_on_k = by.y1 - x_on_k;
    out.rest_x_on_w = by.y2 - x_on_w;
    out.rest_g_on_k = e.kLx - g_on_k;
    out.rest_g_on_w = e.wLx - g_on_w;
    k_gk += out.rest_x_on_k * gLk + out.rest_g_on_k * d.kLx;
    k_gw += out.rest_x_on_w * gLk + out.rest_g_on_w * d.kLx;
    w_gw += out.rest_x_on_w * gLw + out.rest_g_on_w * d.wLx;
  }
  // From k and w to p and q.
  auto on_p = [&](N on_k, N on_w) { return group.on_p * (on_k + group.on_k * on_w); };
  auto on_q = [&](N on_w) { return group.on_q * on_w; };
  out.x_on_p = on_p(x_on_k, x_on_w);
  out.x_on_q = on_q(x_on_w);
  out.g_on_p = on_p(g_on_k, g_on_w);
  out.g_on_q = on_q(g_on_w);
  out.state_on_p = on_p(e.kx, e.wx);
  out.state_on_q = on_q(e.wx);
  out.key_back = x_on_k - c * x_on_w;
  out.key_kept = g_on_k - c * g_on_w;
  out.key_g = by.m1 - c * by.m2;
  out.key_x = e.kx - c * e.wx;
  out.key_p = on_p(c * k_gw - k_gk, -2 * c * e.ww - k_gw);
  out.key_q = on_q(-2 * c * e.ww - k_gw);
  out.value_back = x_on_w;
  out.value_kept = g_on_w;
  out.value_g = by.m2;
  out.value_x = e.wx;
  out.value_p = on_p(-(k_gw + c * w_gw), 2 * e.ww - w_gw);
  out.value_q = on_q(2 * e.ww - w_gw);
  return out;
}

// A row without a rotation: on return `partial` is the derivative with respect to the state before the step.
template <class T, bool Pairs>
void pull_still(const Scan& s, const Task<T>& task, const Eigen<T>& eigen, const T* x, const T* g, T* u_gradient, T* partial,
                T* gradients) {
  const int64_t pad = padded<T>(s.size);
  for (int64_t i = 0; i < pad; i += lanes<T>) {
    Vec<T> from = load<T>(g + i);
    store<T>(partial + i, times_transposed<T, Pairs>(eigen, i, from));
    add_outer<T, Pairs>(task.sum(of_real, pad), pad, i, from, load<T>(x + i));
    if (s.aware) store<T>(u_gradient + i, from);
  }
  std::memset(gradients, 0, 2 * pad * sizeof(T));
}

// A row with one: the same but for what goes through p and q, whose derivatives are in `gradients`.
template <class T, bool Pairs>
INLINE void pull_row(const Scan& s, const Task<T>& task, const Eigen<T> eigen, const T* p, const T* q, T key_scale,
                     T value_scale, const Pull<T>& by, const T* x, const T* u, const T* g, T* u_gradient, T* partial,
                     T* gradients) {
  const int64_t pad = padded<T>(s.size);
  for (int64_t i = 0; i < pad; i += lanes<T>) {
    const Vec<T> from = load<T>(g + i), old = load<T>(x + i), a = load<T>(p + i), b = load<T>(q + i);
    const Vec<T> turned_x = old + by.x_on_p * a + by.x_on_q * b, turned_g = from + by.g_on_p * a + by.g_on_q * b;
    const Vec<T> back = times_transposed<T, Pairs>(eigen, i, turned_g);
    Vec<T> kept = times<T, Pairs>(eigen, i, turned_x);
    if (s.aware) {
      kept += load<T>(u + i);
      store<T>(u_gradient + i, turned_g);
    }
    store<T>(partial + i, back + by.state_on_p * a + by.state_on_q * b);
    // The scales come last: times another of them, numbers of the sum could leave the range of numbers.
    store<T>(gradients + i, key_scale * (by.key_back * back + by.key_kept * kept + by.key_g * from + by.key_x * old +
                                         by.key_p * a + by.key_q * b));
    store<T>(gradients + pad + i, value_scale * (by.value_back * back + by.value_kept * kept + by.value_g * from +
                                                 by.value_x * old + by.value_p * a + by.value_q * b));
    add_outer<T, Pairs>(task.sum(of_real, pad), pad, i, turned_g, turned_x);
  }
}

// What a Taylor polynomial adds to that.
template <class T, bool Pairs>
void pull_rest(const Scan& s, const Task<T>& task, const Eigen<T> eigen, const Row<T>& row, const Pull<T>& by, const T* x,
               const T* g, T* partial, T* gradients) {
  const int64_t pad = padded<T>(s.size);
  const T c = row.dot, on_k = by.rest_x_on_k, on_w = by.rest_x_on_w, g_on_k = by.rest_g_on_k, g_on_w = by.rest_g_on_w;
  for (int64_t i = 0; i < pad; i += lanes<T>) {
    const Vec<T> from = load<T>(g + i), old = load<T>(x + i), k = row.on_p * load<T>(row.p + i);
    const Vec<T> w = row.on_q * load<T>(row.q + i) + row.on_k * k;
    const Vec<T> back = times_transposed<T, Pairs>(eigen, i, from), kept = times<T, Pairs>(eigen, i, old);
    const Vec<T> moved_g = g_on_k * k + g_on_w * w;
    add_at<T>(partial + i, times_transposed<T, Pairs>(eigen, i, moved_g));
    add_at<T>(gradients + i, row.key_scale * ((on_k - c * on_w) * back + (g_on_k - c * g_on_w) * kept));
    add_at<T>(gradients + pad + i, row.value_scale * (on_w * back + g_on_w * kept));
    add_outer<T, Pairs>(task.sum(of_real, pad), pad, i, from, on_k * k + on_w * w);
    add_outer<T, Pairs>(task.sum(of_real, pad), pad, i, moved_g, old);
  }
}

// Those of each row, from those of a group.
template <class T> INLINE void split(const Pull<T>& numbers, Pull<T>* to) { *to = numbers; }
template <class T> INLINE void split(const Pull<Vec<T>>& numbers, Pull<T>* to) {
  constexpr int count = sizeof(Pull<T>) / sizeof(T);
  Vec<T> columns[count];
  std::memcpy(columns, &numbers, sizeof columns);
  for (int j = 0; j < count; j += lanes<T>) {
    transpose<T, lanes<T> / 2>(columns + j);
    for (int l = 0; l < lanes<T>; ++l) std::memcpy(reinterpret_cast<T*>(to + l) + j, columns + j + l, sizeof(Vec<T>));
  }
}

// The derivatives of row r of the task, lane `l` of its group; those of its projections in `gradients`.
template <class T, class N, bool Pairs>
INLINE void backward_row(const Scan& s, const Task<T>& task, const Eigen<T>& eigen, Group<T, N>& group, const Pull<T>& by, int l,
                         const T* normed, const T* projections, int64_t r, int64_t t, T* gradients) {
  const int64_t m = s.size, pad = padded<T>(m), n = s.heads * m, offset = task.head * m, sequence = task.begin + r;
  const Eigen<T> feed = {task.feed_real, task.feed_imag};
  const T* x = task.x + r * spaced<T>(pad);
  T *g = task.g + r * pad, *u = task.u + r * pad, *partial = task.partial + r * pad;
  T* to_drive = static_cast<T*>(s.drive_gradients) + (sequence * s.steps + t) * s.features;
  T beta = 0;
  if (!s.turns || group.still[l] || ended<T>(s, sequence, t)) {
    pull_still<T, Pairs>(s, task, eigen, x, g, u, partial, gradients);
  } else {
    pull_row<T, Pairs>(s, task, eigen, group.p[l], group.q[l], lane(group.key_scale, l), lane(group.value_scale, l), by, x, u, g,
                       u, partial, gradients);
    if (s.form >= taylor_one)
      pull_rest<T, Pairs>(s, task, eigen, row_of(group, l), by, x, g, partial, gradients);
    beta = by.beta;
  }
  if (s.mixes) {
    const T* p = normed + r * 2 * pad;
    mix_backward<T>(s, p, p + pad, pad, task.mixing, gradients);
  }
  for (int64_t half = 0; s.norms && half < 2; ++half)
    norm_backward<T>(s, projections + (2 * r + half) * pad, task.norms[2 * r + half], task.norm_weight + half * pad, task.ones,
                     pad, gradients + half * pad, task.sum(of_norm_weight, pad) + half * pad,
                     task.sum(of_norm_bias, pad) + half * pad);
  const T* to_u = s.aware ? u : g;
  if (!s.beta_given) task.totals[0] += beta;
  if (s.beta_given) to_drive[s.features - 1] = beta;
  put<T>(to_u, m, to_drive + offset);
  if (s.given) {
    put<T>(gradients, m, to_drive + n + offset);
    put<T>(gradients + pad, m, to_drive + 2 * n + offset);
  }
  for (int64_t i = 0; s.coupled && i < pad; i += lanes<T>) {
    T* slow_g = task.slow_g + r * pad;
    add_outer<T, Pairs>(task.sum(of_feed_real, pad), pad, i, load<T>(to_u + i), load<T>(task.slow + r * pad + i));
    store<T>(slow_g + i, load<T>(slow_g + i) + times_transposed<T, Pairs>(feed, i, load<T>(to_u + i)));
  }
}

// Those of `count` rows from `first` on, as `forward_rows`.
template <class T, class N, bool Pairs>
void backward_rows(const Scan& s, const Task<T>& task, const Eigen<T>& eigen, const T* pairs, const T* normed,
                   const T* projections, T* products, bool known, int64_t first, int count, int64_t t, T* gradients) {
  const int64_t pad = padded<T>(s.size);
  Group<T, N> group;
  Pull<T> by[rows_in<N>];
  if (s.turns) {
    directions<T, N, Pairs>(eigen, places(s, task, pairs, first), count, pad, products + first * dots, known,
                            task.scratch + first * 2 * pad, group);
    T each[rows_in<N>][8];
    for (int l = 0; l < count; ++l)
      dots_with_g<T, Pairs>(eigen, group.p[l], group.q[l], task.g + (first + l) * pad, pad, each[l]);
    N with_g[8];
    across<T, 8>(each[0], count, with_g);
    split<T>(pull_of<T, N>(s, group, betas_of<T, N>(s, task, first, count, t), with_g), by);
  }
  for (int l = 0; l < count; ++l)
    backward_row<T, N, Pairs>(s, task, eigen, group, by[l], l, normed, projections, first + l, t,
                              gradients + (first + l) * spaced<T>(2 * pad));
}

// The derivatives of the weights, and of the bias, by those of the projections of some rows.
template <class T> void add_weights(const Scan& s, const Task<T>& task, int64_t rows) {
  const int64_t m = s.size, pad = padded<T>(m), apart = spaced<T>(2 * pad);
  for (int64_t half = 0; half < 2; ++half)
    add_outer_products<T>(rows, task.gradients + half * pad, apart, m, task.source, spaced<T>(pad), pad / panel<T>,
                          task.weight_sums + half * pad * pad, pad);
}
template <class T> void add_bias(const Scan& s, const Task<T>& task, int64_t rows) {
  const int64_t pad = padded<T>(s.size), apart = spaced<T>(2 * pad);
  double* const totals = task.totals + of_bias * pad;
  for (int64_t i = 0; i < 2 * pad; i += lanes<T>) {
    Vec<T> sum = {};
    for (int64_t r = 0; r < rows; ++r) sum += load<T>(task.gradients + r * apart + i);
    for (int64_t l = 0; l < lanes<T>; ++l) totals[i + l] += sum[l];
  }
}

// The states before `count` steps, from `last` backwards, and what K and V are applied to.
template <class T> void load_states(const Scan& s, const Task<T>& task, int64_t last, int64_t count) {
  const int64_t m = s.size, pad = padded<T>(m), apart = spaced<T>(pad), offset = task.head * m;
  for (int64_t i = 0; i < count * task.rows; ++i) {
    const int64_t t = last - i / task.rows, sequence = task.begin + i % task.rows;
    const T* before = t ? static_cast<const T*>(s.states) + (sequence * s.steps + t - 1) * s.width
                        : static_cast<const T*>(s.initial) + sequence * s.width;
    if (s.reset && s.reset[sequence * s.steps + t])
      std::memset(task.x + i * apart, 0, pad * sizeof(T));
    else
      fetch<T>(before + offset, m, task.x + i * apart, pad);
    make_sources(s, task, i);
  }
}

// The derivatives of every row at step t, one of a stretch of steps whose states are loaded. On return task.g is that of the
// state before the step.
template <class T, bool Pairs>
void step_backward(const Scan& s, Task<T>& task, const Weights<T>& transposed, int64_t t, const T* projections, T* gradients,
                   int64_t stretch, Ahead& ahead) {
  const int64_t m = s.size, pad = padded<T>(m), n = s.heads * m, offset = task.head * m, apart = spaced<T>(pad);
  const int64_t gradients_apart = spaced<T>(2 * pad), steps_ahead = task.rows < 8 ? 16 / task.rows : 1;
  const bool saved = s.turns && !s.given && s.projections;
  const Eigen<T> eigen = {task.real, task.imag}, feed = {task.feed_real, task.feed_imag};
  const T* normed = normed_rows<T>(s, task, projections);
  const T* pairs = mixed_rows<T>(s, task, normed);
  ahead.clear();
  const int64_t first = task.begin * s.steps + t, then = first - steps_ahead, of_states = s.steps * s.width;
  if (t > stretch)  // time runs backwards, which the processor does not expect
    ahead.add(static_cast<const T*>(s.states) + (first - stretch - 1) * s.width + offset, m, task.rows, of_states);
  if (t > steps_ahead) {
    ahead.add(static_cast<const T*>(s.state_gradients) + then * s.width + offset, m, task.rows, of_states);
    ahead.add(static_cast<const T*>(s.drive_gradients) + then * s.features + offset, m, task.rows, s.steps * s.features);
    if (saved) ahead.add(projections - steps_ahead * s.batch * 2 * pad, task.rows * 2 * pad);
    if (saved && task.rows >= many_rows) ahead.add(dots_at(s, task, t - steps_ahead), task.rows * dots);
  }
  for (int64_t r = 0; r < task.rows; ++r) {  // the derivative at the step, and the drive where it is needed
    const int64_t sequence = task.begin + r, at = (sequence * s.steps + t) * s.width + offset;
    T *g = task.g + r * pad, *slow_g = task.slow_g + r * pad, *u = task.u + r * pad, *slow = task.slow + r * pad;
    const T* given = static_cast<const T*>(s.state_gradients) + at;
    if (ended<T>(s, sequence, t)) {
      for (T* vectors : {g, slow_g}) std::memset(vectors, 0, pad * sizeof(T));
    } else {
      add<T>(given, m, g);
      if (s.coupled) add<T>(given + n, m, slow_g);
    }
    if (s.coupled) {
      T *to_decay = task.sum(of_decay, pad), *to_charge = task.sum(of_charge, pad), *next = task.scratch + r * 2 * pad;
      const T* before = t ? static_cast<const T*>(s.states) + at - s.width
                          : static_cast<const T*>(s.initial) + sequence * s.width + offset;
      if (s.reset && s.reset[sequence * s.steps + t])
        std::memset(slow, 0, pad * sizeof(T));
      else
        fetch<T>(before + n, m, slow, pad);
      fetch<T>(static_cast<const T*>(s.states) + at, m, next, pad);
      for (int64_t i = 0; i < pad; i += lanes<T>) {
        Vec<T> from = load<T>(slow_g + i);
        store<T>(g + i, load<T>(g + i) + load<T>(task.charge + i) * from);
        store<T>(to_decay + i, load<T>(to_decay + i) + from * load<T>(slow + i));
        store<T>(to_charge + i, load<T>(to_charge + i) + from * load<T>(next + i));
        store<T>(slow_g + i, load<T>(task.decay + i) * from);
      }
    }
    if (s.aware) {
      fetch<T>(static_cast<const T*>(s.drive) + (sequence * s.steps + t) * s.features + offset, m, u, pad);
      for (int64_t i = 0; s.coupled && i < pad; i += lanes<T>)
        store<T>(u + i, load<T>(u + i) + times<T, Pairs>(feed, i, load<T>(slow + i)));
    }
  }
  T* const products = dots_at(s, task, t);
  for (int64_t first = 0; first < task.rows; first += lanes<T>) {
    const int count = std::min<int64_t>(lanes<T>, task.rows - first);
    if (count == 1)
      backward_rows<T, T, Pairs>(s, task, eigen, pairs, normed, projections, products, saved, first, count, t, gradients);
    else
      backward_rows<T, Vec<T>, Pairs>(s, task, eigen, pairs, normed, projections, products, saved, first, count, t, gradients);
  }
  const Ranges halves = {m, pad - m, m};
  const bool weighted = s.turns && !s.given;
  if (weighted && s.source == identity && !s.factored) {
    product<T, true>(task.rows, gradients, gradients_apart, halves, transposed.panels, pad / panel<T>, task.partial, pad,
                     &ahead);
  } else if (weighted) {
    if (s.factored)
      factored_back<T>(shape_of(s), transposed.factors, task.rows, gradients, gradients_apart, task.between, task.scratch);
    else
      product<T, false>(task.rows, gradients, gradients_apart, halves, transposed.panels, pad / panel<T>, task.scratch, pad);
    for (int64_t r = 0; r < task.rows; ++r)
      for (int64_t i = 0; i < pad; i += lanes<T>)
        add_at<T>(task.partial + r * pad + i,
                  masked<T>(s, load<T>(task.x + r * apart + i), load<T>(task.scratch + r * pad + i)));
  }
  ahead.rest();
  std::swap(task.g, task.partial);
  if (s.reset)
    for (int64_t r = 0; r < task.rows; ++r)
      if (s.reset[(task.begin + r) * s.steps + t])
        for (T* vectors : {task.g, task.slow_g}) std::memset(vectors + r * pad, 0, pad * sizeof(T));
}

template <class T, bool Pairs>
void run_backward(const Scan& s, Task<T>& task, const Weights<T>& weights, const Weights<T>& transposed) {
  const int64_t m = s.size, pad = padded<T>(m), n = s.heads * m, offset = task.head * m;
  const int64_t apart = spaced<T>(pad), gradients_apart = spaced<T>(2 * pad), stretch = steps_held(s, task.rows);
  const bool weighted = s.turns && !s.given;
  load_constants(s, task);
  const int64_t summed = (s.norms ? of_bias : of_norm_weight) * pad, together = std::max<int64_t>(1, rows_summed / task.rows);
  std::memset(task.sums, 0, summed * sizeof(T));
  for (T* vectors : {task.g, task.slow_g}) std::memset(vectors, 0, task.rows * pad * sizeof(T));
  if (s.source == identity) task.x = task.source;
  T* const x = task.x;
  Ahead ahead;
  for (int64_t last = s.steps - 1; last >= 0; last -= stretch) {
    const int64_t held = std::min(stretch, last + 1);
    task.x = x;
    load_states(s, task, last, held);
    if (s.given || (weighted && !s.projections)) project<T>(s, task, weights, last, held * task.rows, task.projections);
    for (int64_t t = last, at = 0; t > last - held; --t, at += task.rows) {
      const T* projections = projections_at(s, task, t) + (s.projections ? 0 : at * 2 * pad);
      task.x = x + at * apart;
      step_backward<T, Pairs>(s, task, transposed, t, projections, task.gradients + at * gradients_apart, stretch, ahead);
      if (t % together == 0) {  // sums of some rows, then of those in double: the error does not grow with T
        for (int64_t i = pad; i < summed; ++i) task.totals[i] += task.sums[i];
        std::memset(task.sums, 0, summed * sizeof(T));
      }
    }
    if (weighted && s.weight_gradients) add_weights<T>(s, task, held * task.rows);
    if (weighted && s.bias_gradients) add_bias<T>(s, task, held * task.rows);
  }
  for (int64_t r = 0; s.initial_gradients && r < task.rows; ++r) {
    T* to = static_cast<T*>(s.initial_gradients) + (task.begin + r) * s.width + offset;
    std::memcpy(to, task.g + r * pad, m * sizeof(T));
    if (s.coupled) std::memcpy(to + n, task.slow_g + r * pad, m * sizeof(T));
  }
}

// Only the matrix products of all steps, for benchmarks: what the rest is measured against.
enum Products { of_forward, of_backward, of_weights, none };

template <class T>
void run_products(const Scan& s, Task<T>& task, const Weights<T>& weights, const Weights<T>& transposed, int64_t which) {
  const int64_t m = s.size, pad = padded<T>(m), apart = spaced<T>(pad), gradients_apart = spaced<T>(2 * pad);
  const int64_t held = which == of_forward ? 1 : steps_held(s, task.rows);
  for (int64_t i = 0; i < held * task.rows * apart; ++i) task.source[i] = 1;
  for (int64_t i = 0; which != of_forward && i < held * task.rows * gradients_apart; ++i) task.gradients[i] = 1;
  for (int64_t t = 0; t < s.steps; ++t)
    if (which == of_forward)
      project<T>(s, task, weights, t, task.rows, task.projections);
    else if (which == of_backward)
      product<T, false>(task.rows, task.gradients, gradients_apart, {m, pad - m, m}, transposed.panels, pad / panel<T>,
                        task.partial, pad);
    else if (t % held == 0)
      add_weights<T>(s, task, std::min(held, s.steps - t) * task.rows);
}

template <class T> int64_t task_memory(const Scan& s, bool backward) {
  Arena<T> memory = {nullptr, 0};
  Task<T>{}.lay_out(s, s.tile, backward, memory);
  return memory.used;
}

template <class T> int64_t weight_memory(const Scan& s) {
  Arena<T> memory = {nullptr, 0};
  Weights<T>{}.lay_out(s, memory);
  return s.turns && !s.given ? memory.used : 0;
}

template <class T> void pack_weights(const Scan& s, int64_t head, bool back, Weights<T>& to) {
  const int64_t m = s.size;
  auto of = [&](const void* given, int64_t each) { return static_cast<const T*>(given) + head * 2 * each; };
  if (s.factored) {
    const Given<T> given = {of(s.left, m * s.rank), of(s.right, m * s.rank), of(s.outer, s.outer_size * s.outer_size),
                            of(s.inner, s.inner_size * s.inner_size)};
    back ? pack_factors_back<T>(shape_of(s), given, to.factors) : pack_factors<T>(shape_of(s), given, to.factors);
  } else {
    back ? pack_backward<T>(of(s.weight, m * m), m, to.panels)
         : pack_forward<T>(of(s.weight, m * m), m, to.panels, to.for_one);
  }
}

// Of the derivatives of the weights that one thread sums: (heads, 2 pad, pad).
template <class T> int64_t sum_memory(const Scan& s) {
  return s.turns && !s.given ? s.heads * 2 * padded<T>(s.size) * padded<T>(s.size) : 0;
}

// Those of all threads, together. Nothing was summed where nothing turns.
template <class T> void gather_weights(const Scan& s, const T* sums) {
  const int64_t m = s.size, pad = padded<T>(m);
  T* to = static_cast<T*>(s.weight_gradients);
  for (int64_t part = 0; part < 2 * s.heads; ++part)
    for (int64_t i = 0; i < m; ++i, to += m) {
      std::memset(to, 0, m * sizeof(T));
      for (int64_t thread = 0; sums && thread < s.threads; ++thread)
        add<T>(sums + thread * sum_memory<T>(s) + (part * pad + i) * pad, m, to);
    }
}

// The derivatives of all other constants. Sums are of the tiles of the first head, then of the second, and so on. Those of
// imaginary parts are of multipliers of swapped pairs, whose first has a minus.
template <class T> void gather_sums(const Scan& s, const double* sums, int64_t tiles) {
  const int64_t m = s.size, pad = padded<T>(m);
  auto gather = [&](void* given, Sum which, int64_t vectors, int64_t size, bool imaginary = false) {
    T* to = static_cast<T*>(given);
    for (int64_t at = 0; to && at < s.heads * vectors * size; ++at) {
      const int64_t i = at % size, vector = at / size % vectors, head = at / size / vectors;
      double total = 0;
      for (int64_t tile = 0; sums && tile < tiles; ++tile)
        total += sums[((head * tiles + tile) * every_sum + which + vector) * pad + i];
      to[at] = T(imaginary && i % 2 == 0 ? -total : total);
    }
  };
  gather(s.real_gradients, of_real, 1, m);
  gather(s.imag_gradients, of_imag, 1, m, true);
  gather(s.bias_gradients, of_bias, 2, m);
  gather(s.beta_gradients, of_beta, 1, 1);
  gather(s.feed_real_gradients, of_feed_real, 1, m);
  gather(s.feed_imag_gradients, of_feed_imag, 1, m, true);
  gather(s.decay_gradients, of_decay, 1, m);
  gather(s.charge_gradients, of_charge, 1, m);
  gather(s.norm_weight_gradients, of_norm_weight, 2, m);
  gather(s.norm_bias_gradients, of_norm_bias, 2, m);
}

// Of the sums of all tasks, in double, as so many numbers; in whole lines, as it is handed out.
template <class T> int64_t totals_memory(const Scan& s, int64_t tasks) {
  const int64_t count = tasks * every_sum * padded<T>(s.size) * int64_t(sizeof(double) / sizeof(T));
  return (count + 15) / 16 * 16;
}
INLINE int64_t tiles_of(const Scan& s) { return (s.batch + s.tile - 1) / s.tile; }

template <class T> void run(const Scan& s, bool backward, Products products = none) {
  const int64_t tiles = tiles_of(s), tasks = tiles * s.heads;
  const bool weighted = s.turns && !s.given;
  Arena<T> memory = {static_cast<T*>(s.workspace), 0};
  std::vector<Weights<T>> weights(s.heads), transposed(s.heads);
  for (int64_t h = 0; weighted && h < s.heads; ++h) {
    weights[h].lay_out(s, memory);
    weights[h].for_one = s.tile == 1 && !backward;  // there it is projections of many steps
    if (!backward || !s.projections) pack_weights<T>(s, h, false, weights[h]);
    if (!backward) continue;
    transposed[h].lay_out(s, memory);
    pack_weights<T>(s, h, true, transposed[h]);
  }
  const int64_t totalled = backward ? totals_memory<T>(s, tasks) : 0, each = sum_memory<T>(s);
  double* const totals = reinterpret_cast<double*>(memory.take(totalled));
  if (totalled) std::memset(totals, 0, totalled * sizeof(T));
  T* const sums = backward && each ? memory.take(s.threads * each) : nullptr;
  auto worker = [&](int64_t thread) {
    if (sums) std::memset(sums + thread * each, 0, each * sizeof(T));
    for (int64_t i = thread; i < tasks; i += s.threads) {
      Task<T> task = {};
      if (backward) task.totals = totals + i * every_sum * padded<T>(s.size);
      task.head = i / tiles;
      if (sums) task.weight_sums = sums + thread * each + task.head * (each / s.heads);
      task.begin = i % tiles * s.tile;
      task.rows = task.begin + s.tile > s.batch ? s.batch - task.begin : s.tile;
      Arena<T> own = {memory.base + memory.used + thread * task_memory<T>(s, backward), 0};
      task.lay_out(s, s.tile, backward, own);
      const Weights<T>&by = weights[task.head], &back = transposed[task.head];
      if (products != none)
        run_products<T>(s, task, by, back, products);
      else if (backward)
        s.complex_pairs ? run_backward<T, true>(s, task, by, back) : run_backward<T, false>(s, task, by, back);
      else
        s.complex_pairs ? run_forward<T, true>(s, task, by) : run_forward<T, false>(s, task, by);
    }
  };
  in_threads(s.threads, worker);
  if (s.weight_gradients) gather_weights<T>(s, sums);
  if (backward) gather_sums<T>(s, totals, tiles);
}

template <class T> int64_t workspace(const Scan& s, bool backward) {
  const int64_t weights = s.heads * weight_memory<T>(s) * (backward ? 2 : 1);
  const int64_t each = task_memory<T>(s, backward) + (backward ? sum_memory<T>(s) : 0);
  return (weights + s.threads * each + (backward ? totals_memory<T>(s, tiles_of(s) * s.heads) : 0)) * sizeof(T);
}

}  // namespace

extern "C" {
int64_t adpt_scan_layout() { return sizeof(Scan); }
int64_t adpt_scan_workspace(const Scan* s, int64_t backward) { return workspace<NUMBER>(*s, backward); }
void adpt_scan_forward(const Scan* s) { run<NUMBER>(*s, false); }
void adpt_scan_backward(const Scan* s) { run<NUMBER>(*s, true); }
void adpt_scan_products(const Scan* s, int64_t which) { run<NUMBER>(*s, which != of_forward, Products(which)); }
}
