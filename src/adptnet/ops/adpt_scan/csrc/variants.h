// Variants of the recurrence: what K and V are applied to, what replaces the projections p = K x and q = V x before the
// directions are computed, a slow memory beside the state, and a phase after M. Each is a class of its own, with its constants, its
// memory, and the mathematics of one row, forward and backward. A variant that is off has no memory, and only `is_on`
// is read.
//
// Letters, as in ../README.md and plane.h:
//   x, u      the state before the step, and the drive
//   p, q      the projections; gp and gq are the gradients with respect to them
//   k, v, c   unit key and value, and k.v
//   y, z      LayerNorm: p/|p|, and y standardised to mean 0 and variance 1
//   e         fixed dot product: the unit vector along the part of k orthogonal to v
//   g..       the gradient with respect to ..
// Sizes and indices:
//   m, n, pad   the state dimension of a head, that of all heads, and m padded to whole cache lines
//   r, i        row of the tile and entry of a vector; half is 0 for the key and 1 for the value, of the first plane,
//               and so on for further planes
//   s           the arguments of the call, `struct Scan`

#pragma once

#include "directions.h"
#include "sums.h"

namespace {

// ---- Vectors of `pad` entries ---------------------------------------------------------------------------------------

INLINE T dot(const T* a, const T* b, int64_t pad) {
  Vec<T> sum[8] = {};
  for (int64_t i = 0; i < pad; i += lanes<T>) sum[0] += load<T>(a + i) * load<T>(b + i);
  T total[8];
  horizontal_sums<T, 8>(sum, total);
  return total[0];
}
INLINE T sum_entries(const T* from, int64_t pad) {
  Vec<T> sum[8] = {};
  for (int64_t i = 0; i < pad; i += lanes<T>) sum[0] += load<T>(from + i);
  T total[8];
  horizontal_sums<T, 8>(sum, total);
  return total[0];
}
INLINE void add_scaled(T scale, const T* from, T* to, int64_t pad) {
  for (int64_t i = 0; i < pad; i += lanes<T>) store<T>(to + i, load<T>(to + i) + scale * load<T>(from + i));
}
INLINE void set_scaled(T scale, const T* from, T* to, int64_t pad) {
  for (int64_t i = 0; i < pad; i += lanes<T>) store<T>(to + i, scale * load<T>(from + i));
}
INLINE void set_zero(T* to, int64_t pad) { std::memset(to, 0, pad * sizeof(T)); }

// Normalise `from`, and set `scale` to one over its length; to zero, both, if it counts as zero.
inline void normalize_or_zero(const T* from, T* to, int64_t pad, T& scale) {
  if (normalize<T>(from, to, pad, scale)) return;
  set_zero(to, pad);
  scale = 0;
}

// Copy a vector of a tensor, which may be null for zeros, to padded memory.
inline void copy_padded(const T* from, int64_t size, int64_t pad, T* to) {
  for (int64_t i = 0; i < pad; ++i) to[i] = from && i < size ? from[i] : T(0);
}

// ---- The source: what K and V are applied to ------------------------------------------------------------------------

INLINE Vec<T> apply_source(const Options& options, Vec<T> x) {
  if (options.source == relu) return x <= 0 ? Vec<T>{} : x;  // NaN passes
  if (options.source == spikes) return x >= T(options.spike_threshold) ? Vec<T>{} + 1 : Vec<T>{};
  return x;
}
// The gradient where the derivative of the source is one, and zero elsewhere.
INLINE Vec<T> mask_by_source(const Options& options, Vec<T> x, Vec<T> gradient) {
  if (options.source == identity) return gradient;
  if (options.source == relu) return x > 0 ? gradient : Vec<T>{};
  Vec<T> above = x - T(options.spike_threshold);
  return (above >= T(-0.5)) & (above <= T(0.5)) ? gradient : Vec<T>{};
}

// ---- LayerNorm of the directions ------------------------------------------------------------------------------------

// p becomes weight * z + bias with z = (y - mean) inverse_std and y = p scale, and q likewise.
struct LayerNorm {
  // Of p or q; scale is 1/|p|, or 0 if p counts as zero.
  struct Stats {
    T scale, mean, inverse_std;
  };
  bool is_on;
  int64_t size, pad, halves;
  double epsilon;
  T *weight, *bias;  // (halves, pad)
  T* ones;           // 1 at the entries and 0 in the padding, which thus stays zero
  T* rows;           // (tile, halves, pad), the results
  Stats* stats;      // (tile, halves)

  void allocate(const Scan& s, Arena<T>& memory) {
    is_on = s.options.has_norm;
    if (!is_on) return;
    size = s.sizes.size;
    pad = padded_size<T>(size);
    halves = half_count(s);
    epsilon = s.options.norm_epsilon;
    for (T** vectors : {&weight, &bias}) *vectors = memory.allocate(halves * pad);
    ones = memory.allocate(pad);
    rows = memory.allocate(s.sizes.tile * halves * pad);
    stats = reinterpret_cast<Stats*>(memory.allocate(s.sizes.tile * halves * sizeof(Stats) / sizeof(T)));
  }
  void load_constants(const Scan& s) {
    for (int64_t half = 0; half < halves; ++half) {
      copy_padded(s.inputs.norm_weight + half * size, size, pad, weight + half * pad);
      copy_padded(s.inputs.norm_bias + half * size, size, pad, bias + half * pad);
    }
    for (int64_t i = 0; i < pad; ++i) ones[i] = i < size;
  }

  // Normalise p and q of `count` rows into `rows`.
  void forward(const T* projections, int64_t count) const {
    for (int64_t i = 0; i < halves * count; ++i)
      stats[i] = forward_vector(projections + i * pad, i % halves, rows + i * pad);
  }
  // From the gradients of the results of row r to gp and gq, in place.
  void backward(const T* projections, int64_t r, T* gradients, const Sums& sums) const {
    for (int64_t half = 0; half < halves; ++half) {
      const int64_t at = halves * r + half;
      backward_vector(projections + at * pad, stats[at], half, gradients + half * pad, sums);
    }
  }

 private:
  Stats forward_vector(const T* p, int64_t half, T* out) const {
    const T *gamma = weight + half * pad, *delta = bias + half * pad;
    const int64_t end = pad;
    Stats of;
    const T squared = dot(p, p, end);
    if (is_in_range(squared)) {
      of.scale = 1 / std::sqrt(squared);
      set_scaled(of.scale, p, out, end);
    } else {
      normalize_or_zero(p, out, end, of.scale);
    }
    of.mean = sum_entries(out, end) / size;
    add_scaled(-of.mean, ones, out, end);
    of.inverse_std = 1 / std::sqrt(dot(out, out, end) / size + T(epsilon));
    for (int64_t i = 0; i < end; i += lanes<T>)
      store<T>(out + i, of.inverse_std * load<T>(out + i) * load<T>(gamma + i) + load<T>(delta + i));
    return of;
  }
  // The component along y has a closed form in scalars: without epsilon the result would not depend on the length of y.
  void backward_vector(const T* p, const Stats of, int64_t half, T* gradients, const Sums& sums) const {
    const T *gamma = weight + half * pad, *one = ones;
    T *weight_sums = sums.vector(norm_weight_sum) + half * pad, *bias_sums = sums.vector(sums.norm_bias) + half * pad;
    const int64_t end = pad;
    const T p_scale = of.inverse_std * of.scale, shift = of.inverse_std * of.mean;
    auto z_at = [&](int64_t i) { return p_scale * load<T>(p + i) - shift * load<T>(one + i); };
    Vec<T> sum[8] = {};
    for (int64_t i = 0; i < end; i += lanes<T>) {
      Vec<T> from = load<T>(gradients + i), z = z_at(i), weighted = load<T>(gamma + i) * from;
      sum[0] += weighted;
      sum[1] += weighted * z;
      store<T>(weight_sums + i, load<T>(weight_sums + i) + from * z);
      store<T>(bias_sums + i, load<T>(bias_sums + i) + from);
    }
    T total[8];
    horizontal_sums<T, 8>(sum, total);
    const T mean = total[0] / size, along_z = total[1] / size,
            along_y = total[1] * T(epsilon) * of.inverse_std * of.inverse_std;
    for (int64_t i = 0; i < end; i += lanes<T>) {
      Vec<T> weighted = load<T>(gamma + i) * load<T>(gradients + i);
      Vec<T> gy = of.inverse_std * (weighted - mean * load<T>(one + i) - along_z * z_at(i));
      store<T>(gradients + i, of.scale * (gy - along_y * of.scale * load<T>(p + i)));
    }
  }
};

// ---- A fixed dot product of key and value ---------------------------------------------------------------------------

// p becomes a unit key with the fixed dot product, q the unit value.
struct FixedDot {
  bool is_on;
  int64_t pad;
  double dot_product;
  T* rows;     // (tile, planes, 2, pad), the results
  T* scratch;  // (4, pad)

  void allocate(const Scan& s, Arena<T>& memory) {
    is_on = s.options.has_fixed_dot;
    if (!is_on) return;
    pad = padded_size<T>(s.sizes.size);
    dot_product = s.options.dot;
    rows = memory.allocate(s.sizes.tile * half_count(s) * pad);
    scratch = memory.allocate(4 * pad);
  }

  // Compute the results of `count` pairs of p and q: rows times planes.
  void forward(const T* directions, int64_t count) const {
    for (int64_t r = 0; r < count; ++r) {
      const Basis from = make_basis(directions + r * 2 * pad);
      T* out = rows + r * 2 * pad;
      set_scaled(sine(), from.e, out, pad);
      add_scaled(T(dot_product), from.v, out, pad);
      set_scaled(1, from.v, out + pad, pad);
    }
  }
  // From the gradients of the results of pair r to gp and gq, in place.
  void backward(const T* directions, int64_t r, T* gradients) const {
    const Basis from = make_basis(directions + r * 2 * pad);
    T *key = gradients, *value = gradients + pad, *orthogonal = scratch + 3 * pad;
    add_scaled(T(dot_product), key, value, pad);
    set_scaled(sine() * from.orthogonal_scale, key, orthogonal, pad);
    add_scaled(-dot(from.e, orthogonal, pad), from.e, orthogonal, pad);
    T along_v = dot(from.v, orthogonal, pad);  // minus the gradient of c
    add_scaled(-from.c, orthogonal, value, pad);
    add_scaled(-along_v, from.k, value, pad);
    set_scaled(1, orthogonal, key, pad);
    add_scaled(-along_v, from.v, key, pad);
    add_scaled(-dot(from.k, key, pad), from.k, key, pad);
    add_scaled(-dot(from.v, value, pad), from.v, value, pad);
    set_scaled(from.key_scale, key, key, pad);
    set_scaled(from.value_scale, value, value, pad);
  }

 private:
  // k = unit(p), v = unit(q), e = unit(k - c v) with c = k.v, and one over the length of each; 0 for a vector that
  // counts as zero.
  struct Basis {
    T *k, *v, *e;
    T key_scale, value_scale, orthogonal_scale, c;
  };

  T sine() const { return std::sqrt(T(1 - dot_product * dot_product)); }

  Basis make_basis(const T* p) const {
    Basis out = {scratch, scratch + pad, scratch + 2 * pad, 0, 0, 0, 0};
    T* orthogonal = scratch + 3 * pad;
    normalize_or_zero(p, out.k, pad, out.key_scale);
    normalize_or_zero(p + pad, out.v, pad, out.value_scale);
    out.c = dot(out.k, out.v, pad);
    set_scaled(1, out.k, orthogonal, pad);
    add_scaled(-out.c, out.v, orthogonal, pad);
    normalize_or_zero(orthogonal, out.e, pad, out.orthogonal_scale);
    // If the key is nearly parallel to the value, the remainder is mostly rounding error: orthogonalise a second time.
    T again;
    add_scaled(-dot(out.e, out.v, pad), out.v, out.e, pad);
    set_scaled(1, out.e, orthogonal, pad);
    normalize_or_zero(orthogonal, out.e, pad, again);
    return out;
  }
};

// ---- A slow memory beside the state ---------------------------------------------------------------------------------

// The memory is stored behind the state, in columns n to 2n. A step adds feed * memory to the drive, and then replaces
// the memory by decay * memory + charge * x', x' the state after the step.
struct SlowMemory {
  bool is_on;
  int64_t size, pad;
  T *feed_real, *feed_imag, *decay, *charge;
  T* rows;       // (tile, pad): the memory before the step
  T* gradients;  // (tile, pad): with respect to the memory after the step
  T* after;      // x' of one row, in the backward

  void allocate(const Scan& s, bool backward, Arena<T>& memory) {
    is_on = s.options.slow_memory;
    if (!is_on) return;
    size = s.sizes.size;
    pad = padded_size<T>(size);
    for (T** vector : {&feed_real, &feed_imag, &decay, &charge}) *vector = memory.allocate(pad);
    rows = memory.allocate(s.sizes.tile * pad);
    if (!backward) return;
    gradients = memory.allocate(s.sizes.tile * pad);
    after = memory.allocate(pad);
  }
  void load_constants(const Scan& s, int64_t head) {
    auto copy = [&](const T* from, T* to) { copy_padded(from ? from + head * size : nullptr, size, pad, to); };
    copy(s.inputs.feed_real, feed_real);
    copy(s.inputs.feed_imag, feed_imag);
    copy(s.inputs.decay, decay);
    copy(s.inputs.charge, charge);
  }
  void set_row(int64_t r, const T* from) const { load_row<T>(from, size, rows + r * pad, pad); }
  void reset(int64_t r) const { set_zero(rows + r * pad, pad); }

  // u += feed * memory.
  template <bool Pairs> INLINE void add_feed(int64_t r, T* u) const {
    const Spectrum<T> feed = {feed_real, feed_imag};
    const T* memory = rows + r * pad;
    for (int64_t i = 0, end = pad; i < end; i += lanes<T>)
      store<T>(u + i, load<T>(u + i) + apply_lambda<T, Pairs>(feed, i, load<T>(memory + i)));
  }
  // Advance the memory of row r, and write it to `state`.
  void forward(int64_t r, const T* x, T* state) const {
    T* memory = rows + r * pad;
    const T *keep = decay, *take = charge;
    for (int64_t i = 0, end = pad; i < end; i += lanes<T>)
      store<T>(memory + i, load<T>(keep + i) * load<T>(memory + i) + load<T>(take + i) * load<T>(x + i));
    store_row<T>(memory, size, state);
  }

  // Backward of `forward`: add to g, the gradient with respect to the state after the step, which is `state`.
  void backward(int64_t r, const T* state, T* g, const Sums& sums) const {
    T *memory_g = gradients + r * pad, *decay_gradient = sums.vector(decay_sum),
      *charge_gradient = sums.vector(charge_sum);
    const T *memory = rows + r * pad, *keep = decay, *take = charge, *x = after;
    load_row<T>(state, size, after, pad);
    for (int64_t i = 0, end = pad; i < end; i += lanes<T>) {
      Vec<T> from = load<T>(memory_g + i);
      store<T>(g + i, load<T>(g + i) + load<T>(take + i) * from);
      store<T>(decay_gradient + i, load<T>(decay_gradient + i) + from * load<T>(memory + i));
      store<T>(charge_gradient + i, load<T>(charge_gradient + i) + from * load<T>(x + i));
      store<T>(memory_g + i, load<T>(keep + i) * from);
    }
  }
  // Backward of `add_feed`, from the gradient of u.
  template <bool Pairs> void backward_feed(int64_t r, const T* u_gradient, const Sums& sums) const {
    const Spectrum<T> feed = {feed_real, feed_imag};
    T *memory_g = gradients + r * pad, *feed_gradient = sums.vector(feed_real_sum);
    const T* memory = rows + r * pad;
    for (int64_t i = 0, end = pad; i < end; i += lanes<T>) {
      add_spectrum_gradient<Pairs>(feed_gradient, end, i, load<T>(u_gradient + i), load<T>(memory + i));
      store<T>(memory_g + i,
               load<T>(memory_g + i) + apply_lambda_transposed<T, Pairs>(feed, i, load<T>(u_gradient + i)));
    }
  }
};

// ---- An input-driven phase ------------------------------------------------------------------------------------------

// A step rotates the pairs of M x (of Q (L Q'x + u), if the drive is rotated) by P = [[c, -s], [s, c]], with c and s of
// each pair from the drive. It then adds u.
struct Phase {
  bool is_on;
  int64_t size, pad;
  T* none;       // zeros, the drive of `update_state` if u is added afterwards
  T* row;        // c and s of the pairs of one row
  T* change;     // P M x of one row, in the backward
  T* gradients;  // (tile, pad): P'g

  void allocate(const Scan& s, bool backward, Arena<T>& memory) {
    is_on = s.options.phased;
    if (!is_on) return;
    size = s.sizes.size;
    pad = padded_size<T>(size);
    none = memory.allocate(pad);
    row = memory.allocate(pad);
    if (!backward) return;
    change = memory.allocate(pad);
    gradients = memory.allocate(s.sizes.tile * pad);
  }
  void load_constants() const { set_zero(none, pad); }

  // x <- P x + u, with the phase `from` of the drive and u null for none; copy x to `state`.
  void forward(const T* from, const T* u, T* x, T* state) const {
    load_row<T>(from, size, row, pad);
    const T* by = row;
    for (int64_t i = 0, end = pad; i < end; i += lanes<T>) {
      const Vec<T> cs = load<T>(by + i), x_i = load<T>(x + i);
      const Vec<T> rotated = repeat_first<T>(cs) * x_i + repeat_second<T>(cs) * quarter_turn(x_i);
      store<T>(x + i, u ? rotated + load<T>(u + i) : rotated);
    }
    store_row<T>(x, size, state);
  }

  // From the gradient g of `state`, the state after the step of row r, to P'g and to the gradient of the phase. P M x is
  // the state less u, so that nothing is saved for it.
  void backward(int64_t r, const T* from, const T* u, const T* state, const T* g, T* to_phase) const {
    load_row<T>(from, size, row, pad);
    load_row<T>(state, size, change, pad);
    const T* by = row;
    T *d = change, *out = gradients + r * pad;
    for (int64_t i = 0, end = pad; i < end; i += lanes<T>) {
      const Vec<T> cs = load<T>(by + i), g_i = load<T>(g + i), d_i = load<T>(d + i) - (u ? load<T>(u + i) : Vec<T>{});
      store<T>(out + i, repeat_first<T>(cs) * g_i - repeat_second<T>(cs) * quarter_turn(g_i));
      const Vec<T> along = g_i * d_i, across = g_i * quarter_turn(d_i);
      store<T>(d + i, cs * (along + swap_pairs<T>(along)) + quarter_turn(cs) * (across + swap_pairs<T>(across)));
    }
    store_row<T>(d, size, to_phase);
  }
  // After the end of a sequence.
  void backward_ended(int64_t r, T* to_phase) const {
    set_zero(gradients + r * pad, pad);
    std::memset(to_phase, 0, size * sizeof(T));
  }

 private:
  // Map (a, b) to (-b, a) in each pair of lanes.
  static INLINE Vec<T> quarter_turn(Vec<T> x) {
    Vec<T> sign;
    for (int l = 0; l < lanes<T>; ++l) sign[l] = l % 2 ? 1 : -1;
    return sign * swap_pairs<T>(x);
  }
};

}  // namespace
