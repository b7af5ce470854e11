// The rotation of one row (one sequence at one step): its directions, its scalars, and their derivatives.
//
// Letters, as in ../README.md; code writes L for Λ and ww for ω:
//   x, u         the state before the step, and the drive; x' = Q L Q'x + u is the state after it
//   L            the eigenvalues: a diagonal, or 2x2 blocks for complex pairs
//   p, q         the projections K x and V x
//   k, v         the unit key p/|p| and the unit value q/|q|
//   c, w, ww     c = k.v (`cosine`), w = v - c k (orthogonal to k), ww = w.w
//   s            the squared angle beta^2 ww
//   a, b         beta A(s) and beta^2 B(s), with A (`linear`) and B (`quadratic`) the coefficients of S and S^2 in Q
//   y1, y2       Q'x = x + y1 k + y2 w
//   m1, m2       Q z = z + m1 k + m2 w, for z = L Q'x
//   kLx, wLk ..  dot products k.Lx, w.Lk ..; ku and wu are those with a drive that is rotated with the state
//   g..          the gradient with respect to ..

#pragma once

#include <cmath>
#include <limits>

#include "../../csrc/simd.h"

namespace {

enum Retraction { exponential, cayley, taylor_one, taylor_two };

// ---- SIMD helpers ---------------------------------------------------------------------------------------------------

// Shuffle index that collects one half (lower or upper) of each group of lanes: of `a` in the lower half of the result,
// of `b` in its upper half.
constexpr int half_index(int lane, int group, int all, bool upper) {
  int start = lane / group * group, offset = lane % group, half = group / 2;
  return (offset < half ? start + offset : all + start + offset - half) + (upper ? half : 0);
}
template <class T, int Group, int... I> INLINE Vec<T> add_halves(Vec<T> a, Vec<T> b, std::integer_sequence<int, I...>) {
  return SHUFFLE(T, a, b, half_index(I, Group, lanes<T>, false)...) +
         SHUFFLE(T, a, b, half_index(I, Group, lanes<T>, true)...);
}
template <class T, int Group> INLINE Vec<T> reduce_group(Vec<T>* sums) {
  if constexpr (Group == 1) {
    return sums[0];
  } else {
    Vec<T> next[Group / 2];
#pragma GCC unroll 8
    for (int i = 0; i < Group / 2; ++i)
      next[i] = add_halves<T, Group>(sums[i], sums[i + Group / 2], std::make_integer_sequence<int, lanes<T>>());
    return reduce_group<T, Group / 2>(next);
  }
}
// Sum each of `Count` vectors over its lanes. Count is a multiple of eight, hence of every possible number of lanes.
template <class T, int Count> INLINE void horizontal_sums(Vec<T>* sums, T* out) {
#pragma GCC unroll 16
  for (int i = 0; i < Count; i += lanes<T>) store<T>(out + i, reduce_group<T, lanes<T>>(sums + i));
}

// Transpose blocks of lanes<T> vectors.
template <class T, int Half, int... I> INLINE void exchange(Vec<T>& a, Vec<T>& b, std::integer_sequence<int, I...>) {
  const Vec<T> lower = SHUFFLE(T, a, b, half_index(I, 2 * Half, lanes<T>, false)...);
  b = SHUFFLE(T, a, b, half_index(I, 2 * Half, lanes<T>, true)...);
  a = lower;
}
template <class T, int Half> INLINE void transpose(Vec<T>* rows) {
#pragma GCC unroll 8
  for (int i = 0; i < lanes<T>; ++i)
    if (!(i & Half)) exchange<T, Half>(rows[i], rows[i + Half], std::make_integer_sequence<int, lanes<T>>());
  if constexpr (Half > 1) transpose<T, Half / 2>(rows);
}
// Transpose a matrix of `count` rows: lane l of out[j] becomes rows[l * Columns + j]. Lanes from `count` on repeat
// row 0.
template <class T, int Columns> INLINE void transpose_rows(const T* rows, int, T* out) {
  std::memcpy(out, rows, Columns * sizeof(T));
}
template <class T, int Columns> INLINE void transpose_rows(const T* rows, int count, Vec<T>* out) {
#pragma GCC unroll 16
  for (int j = 0; j < Columns; j += lanes<T>) {
#pragma GCC unroll 8
    for (int l = 0; l < lanes<T>; ++l) out[j + l] = load<T>(rows + (l < count) * l * Columns + j);  // branch-free
    transpose<T, lanes<T> / 2>(out + j);
  }
}

// Return whether a comparison holds in all lanes.
INLINE bool all_lanes(bool holds) { return holds; }
INLINE bool all_lanes(int holds) { return holds; }  // several bools joined by &
template <class Mask> INLINE bool all_lanes(Mask mask) {
  int64_t parts[sizeof(Mask) / 8], both = -1;
  std::memcpy(parts, &mask, sizeof mask);
  for (int64_t part : parts) both &= part;
  return both == -1;
}

// From here on N holds the same scalar of one row (N = T), or of lanes<T> rows, one row per lane (N = Vec<T>).
template <class N> struct Scalar {
  typedef N type;
};
template <> struct Scalar<Vec<float>> {
  typedef float type;
};
template <> struct Scalar<Vec<double>> {
  typedef double type;
};

template <class N> constexpr int rows_per = sizeof(N) / sizeof(typename Scalar<N>::type);
template <class N> INLINE auto lane(const N& numbers, int l) {
  if constexpr (rows_per<N> == 1)
    return numbers;
  else
    return numbers[l];
}

INLINE float sqrt_lanes(float s) { return std::sqrt(s); }
INLINE double sqrt_lanes(double s) { return std::sqrt(s); }
template <class N> INLINE N sqrt_lanes(N s) {
  typename Scalar<N>::type each[rows_per<N>];
  std::memcpy(each, &s, sizeof s);
#pragma omp simd
  for (int l = 0; l < rows_per<N>; ++l) each[l] = std::sqrt(each[l]);
  std::memcpy(&s, each, sizeof s);
  return s;
}

// ---- Scalars of the rotation ----------------------------------------------------------------------------------------

// A(s) and B(s), the coefficients of S and S^2, and their derivatives with respect to s.
template <class N> struct Coefficients {
  N linear, quadratic, linear_slope, quadratic_slope;
};

// Derivatives without cancellation, from c3 = (t - sin t) / t^3 (`third`) and c4 = (t^2/2 - 1 + cos t) / t^4
// (`fourth`), t the angle.
template <class N> INLINE Coefficients<N> from_remainders(N linear, N quadratic, N third, N fourth) {
  return {linear, quadratic, (third - quadratic) / 2, fourth - third / 2};
}

template <class T> __attribute__((noinline)) Coefficients<T> coefficients_by_sine(T s) {
  T angle = std::sqrt(s), half = std::sin(angle / 2) / angle;
  T linear = std::sin(angle) / angle, quadratic = 2 * half * half;
  return from_remainders<T>(linear, quadratic, (1 - linear) / s, (T(0.5) - quadratic) / s);
}

template <class N, int Terms> INLINE Coefficients<N> coefficients_by_series(N s) {
  typedef typename Scalar<N>::type T;
  // 1 / (2i + 3)! and 1 / (2i + 4)!
  constexpr double odd[] = {1 / 6.0,
                            1 / 120.0,
                            1 / 5040.0,
                            1 / 362880.0,
                            1 / 39916800.0,
                            1 / 6227020800.0,
                            1 / 1307674368000.0,
                            1 / 355687428096000.0,
                            1 / 121645100408832000.0};
  constexpr double even[] = {1 / 24.0,
                             1 / 720.0,
                             1 / 40320.0,
                             1 / 3628800.0,
                             1 / 479001600.0,
                             1 / 87178291200.0,
                             1 / 20922789888000.0,
                             1 / 6402373705728000.0,
                             1 / 2432902008176640000.0};
  N third = N{} + T(odd[Terms - 1]), fourth = N{} + T(even[Terms - 1]);
#pragma GCC unroll 8
  for (int i = Terms - 2; i >= 0; --i) {
    third = T(odd[i]) - s * third;
    fourth = T(even[i]) - s * fourth;
  }
  return from_remainders<N>(T(1) - s * third, T(0.5) - s * fourth, third, fourth);
}

template <class N> INLINE Coefficients<N> coefficients(int64_t retraction, N s) {
  typedef typename Scalar<N>::type T;
  if (retraction == cayley) {
    N linear = T(1) / (T(1) + s / 4), slope = -linear * linear / 4;
    return {linear, linear / 2, slope, slope / 2};
  }
  // Both series are truncated below half a unit in the last place. Small angles take few terms, which shortens the
  // latency of a single row; angles up to `limit` take many.
  constexpr bool single = sizeof(T) == 4;
  constexpr int few = single ? 3 : 6, many = single ? 7 : 9;
  constexpr T small = T(0.125), limit = single ? 4 : 1;
  const Coefficients<N> near = coefficients_by_series<N, few>(s);
  if (__builtin_expect(all_lanes(s < small), 1)) return near;
  if constexpr (rows_per<N> == 1) {
    return s < limit ? coefficients_by_series<T, many>(s) : coefficients_by_sine<T>(s);
  } else {
    Coefficients<N> out = coefficients_by_series<N, many>(s);
    out.linear =
        s < small ? near.linear : out.linear;  // as for a single row: results must not depend on the other lanes
    out.quadratic = s < small ? near.quadratic : out.quadratic;
    out.linear_slope = s < small ? near.linear_slope : out.linear_slope;
    out.quadratic_slope = s < small ? near.quadratic_slope : out.quadratic_slope;
    if (__builtin_expect(all_lanes(s < limit), 1)) return out;
    for (int l = 0; l < lanes<T>; ++l) {
      if (s[l] < limit) continue;
      const Coefficients<T> one = coefficients_by_sine<T>(s[l]);
      out.linear[l] = one.linear;
      out.quadratic[l] = one.quadratic;
      out.linear_slope[l] = one.linear_slope;
      out.quadratic_slope[l] = one.quadratic_slope;
    }
    return out;
  }
}

// The dot products that determine the scalars of a row.
template <class N> struct PlaneDots {
  N kx, wx, kLx, wLx, kLk, kLw, wLk, wLw, ww, ku, wu;
};

// M x = L (x + y1 k + y2 w) + m1 k + m2 w, in terms of k and w; with p and q instead after `scalars_of_projections`.
template <class N> struct RotationScalars {
  N y1, y2, m1, m2;
};

template <class N> INLINE RotationScalars<N> rotation_scalars(int64_t retraction, const PlaneDots<N>& d, N beta) {
  N a = beta, b = beta * beta / 2;
  if (retraction == taylor_one) return {-a * d.wx, a * d.kx, a * d.wLx, -a * d.kLx};
  if (retraction == taylor_two) {
    N kz = d.kLx - a * d.wx * d.kLk + a * d.kx * d.kLw, wz = d.wLx - a * d.wx * d.wLk + a * d.kx * d.wLw;
    return {-a * d.wx - b * d.ww * d.kx, a * d.kx - b * d.wx, a * wz - b * d.ww * d.kLx, -a * kz - b * d.wLx};
  }
  Coefficients<N> coef = coefficients<N>(retraction, beta * beta * d.ww);
  a = beta * coef.linear;
  b = beta * beta * coef.quadratic;
  N y1 = -a * d.wx - b * d.ww * d.kx, y2 = a * d.kx - b * d.wx;
  N kz = d.kLx + d.ku + y1 * d.kLk + y2 * d.kLw, wz = d.wLx + d.wu + y1 * d.wLk + y2 * d.wLw;
  return {y1, y2, a * wz - b * d.ww * kz, -a * kz - b * wz};
}

// Backward of `rotation_scalars`: from the gradients of y1, y2, m1, m2 to those of the dot products and of beta.
template <class N>
INLINE PlaneDots<N> rotation_scalars_backward(int64_t retraction, const PlaneDots<N>& d, N beta,
                                              const RotationScalars<N>& g, N& beta_gradient) {
  PlaneDots<N> out = {};
  N a = beta, b = beta * beta / 2, ga, gb;
  if (retraction == taylor_one) {
    out.kx = a * g.y2;
    out.wx = -a * g.y1;
    out.kLx = -a * g.m2;
    out.wLx = a * g.m1;
    beta_gradient = -d.wx * g.y1 + d.kx * g.y2 + d.wLx * g.m1 - d.kLx * g.m2;
    return out;
  }
  if (retraction == taylor_two) {
    N y1 = -a * d.wx, y2 = a * d.kx;  // first order in beta
    N kz = d.kLx + y1 * d.kLk + y2 * d.kLw, wz = d.wLx + y1 * d.wLk + y2 * d.wLw;
    N gkz = -a * g.m2, gwz = a * g.m1;
    N first1 = d.kLk * gkz + d.wLk * gwz, first2 = d.kLw * gkz + d.wLw * gwz;
    ga = wz * g.m1 - kz * g.m2 - d.wx * (g.y1 + first1) + d.kx * (g.y2 + first2);
    gb = -d.ww * d.kLx * g.m1 - d.wLx * g.m2 - d.ww * d.kx * g.y1 - d.wx * g.y2;
    out.ww = -b * (d.kLx * g.m1 + d.kx * g.y1);
    out.kLx = gkz - b * d.ww * g.m1;
    out.wLx = gwz - b * g.m2;
    out.kLk = y1 * gkz;
    out.kLw = y2 * gkz;
    out.wLk = y1 * gwz;
    out.wLw = y2 * gwz;
    out.kx = a * (g.y2 + first2) - b * d.ww * g.y1;
    out.wx = -a * (g.y1 + first1) - b * g.y2;
    beta_gradient = ga + beta * gb;
    return out;
  }
  Coefficients<N> coef = coefficients<N>(retraction, beta * beta * d.ww);
  a = beta * coef.linear;
  b = beta * beta * coef.quadratic;
  N y1 = -a * d.wx - b * d.ww * d.kx, y2 = a * d.kx - b * d.wx;
  N kz = d.kLx + d.ku + y1 * d.kLk + y2 * d.kLw, wz = d.wLx + d.wu + y1 * d.wLk + y2 * d.wLw;
  N gkz = -b * d.ww * g.m1 - a * g.m2, gwz = a * g.m1 - b * g.m2;
  N g1 = g.y1 + d.kLk * gkz + d.wLk * gwz, g2 = g.y2 + d.kLw * gkz + d.wLw * gwz;
  ga = wz * g.m1 - kz * g.m2 - d.wx * g1 + d.kx * g2;
  gb = -d.ww * (kz * g.m1 + d.kx * g1) - wz * g.m2 - d.wx * g2;
  N gs = beta * (ga * coef.linear_slope + gb * beta * coef.quadratic_slope);
  out.ww = -b * (kz * g.m1 + d.kx * g1) + gs * beta * beta;
  out.kLx = out.ku = gkz;
  out.wLx = out.wu = gwz;
  out.kLk = y1 * gkz;
  out.kLw = y2 * gkz;
  out.wLk = y1 * gwz;
  out.wLw = y2 * gwz;
  out.kx = -b * d.ww * g1 + a * g2;
  out.wx = -a * g1 - b * g2;
  beta_gradient = ga * coef.linear + 2 * beta * (gb * coef.quadratic + gs * d.ww);
  return out;
}

// ---- Directions -----------------------------------------------------------------------------------------------------

// Express k and w by p and q: k = on_p p, w = on_q q + on_k k.
template <class N> struct Frame {
  N on_p, on_q, on_k;
  N cosine, key_scale, value_scale;  // k.v, 1/|p|, 1/|q|
  PlaneDots<N> plane;
};

// One row. On the slow path (p and q nearly parallel, or squares out of range), p and q point to k and w themselves,
// which are in scratch memory.
template <class T> struct Row : Frame<T> {
  const T *p, *q;
  bool no_rotation;  // p or q is zero, hence Q = I
};

// As many rows as N has lanes, whose scalars are vectorised over the batch. Lanes without a row repeat the first row.
template <class T, class N> struct Group : Frame<N> {
  const T *p[rows_per<N>], *q[rows_per<N>];
  bool no_rotation[rows_per<N>];
};

template <class A, class B, class Move> INLINE void for_each_scalar(Frame<A>& a, Frame<B>& b, Move move) {
  move(a.on_p, b.on_p);
  move(a.on_q, b.on_q);
  move(a.on_k, b.on_k);
  move(a.cosine, b.cosine);
  move(a.key_scale, b.key_scale);
  move(a.value_scale, b.value_scale);
  move(a.plane.kx, b.plane.kx);
  move(a.plane.wx, b.plane.wx);
  move(a.plane.kLx, b.plane.kLx);
  move(a.plane.wLx, b.plane.wLx);
  move(a.plane.kLk, b.plane.kLk);
  move(a.plane.kLw, b.plane.kLw);
  move(a.plane.wLk, b.plane.wLk);
  move(a.plane.wLw, b.plane.wLw);
  move(a.plane.ww, b.plane.ww);
  move(a.plane.ku, b.plane.ku);
  move(a.plane.wu, b.plane.wu);
}
template <class T, class N> INLINE void set_row(Row<T>& row, int l, Group<T, N>& group) {
  for_each_scalar(group, row, [&](N& to, T from) {
    if constexpr (rows_per<N> == 1)
      to = from;
    else
      to[l] = from;
  });
  group.p[l] = row.p;
  group.q[l] = row.q;
  group.no_rotation[l] = row.no_rotation;
}
template <class T, class N> Row<T> get_row(Group<T, N>& group, int l) {
  Row<T> out;
  for_each_scalar(group, out, [&](const N& from, T& to) { to = lane(from, l); });
  out.p = group.p[l];
  out.q = group.q[l];
  out.no_rotation = group.no_rotation[l];
  return out;
}

// The eigenvalues. For complex pairs, `imag` multiplies the swapped pairs and has the sign of the first entry reversed.
template <class T> struct Spectrum {
  const T *real, *imag;
};
template <class T, bool Pairs> INLINE Vec<T> apply_lambda(const Spectrum<T>& spectrum, int64_t i, Vec<T> x) {
  Vec<T> out = load<T>(spectrum.real + i) * x;
  if constexpr (Pairs) out += load<T>(spectrum.imag + i) * swap_pairs<T>(x);
  return out;
}
template <class T, bool Pairs> INLINE Vec<T> apply_lambda_transposed(const Spectrum<T>& spectrum, int64_t i, Vec<T> x) {
  Vec<T> out = load<T>(spectrum.real + i) * x;
  if constexpr (Pairs) out += swap_pairs<T>(load<T>(spectrum.imag + i) * x);
  return out;
}

// The dot products of a row, in the order in which they are stored and saved for the backward.
enum Dot { pp, qq, pq, px, qx, pLx, qLx, pLp, pLq, qLq, qLp, pu, qu, dot_count = 16 };

template <class T, bool Pairs>
INLINE void compute_dots(const Spectrum<T> spectrum, const T* p, const T* q, const T* x, const T* u, int64_t pad,
                         T* out) {
  Vec<T> sum[dot_count] = {};
  for (int64_t i = 0; i < pad; i += lanes<T>) {
    Vec<T> p_i = load<T>(p + i), q_i = load<T>(q + i), x_i = load<T>(x + i);
    Vec<T> Lp_i = apply_lambda<T, Pairs>(spectrum, i, p_i), Lq_i = apply_lambda<T, Pairs>(spectrum, i, q_i);
    sum[pp] += p_i * p_i;
    sum[qq] += q_i * q_i;
    sum[pq] += p_i * q_i;
    sum[px] += p_i * x_i;
    sum[qx] += q_i * x_i;
    sum[pLp] += p_i * Lp_i;
    sum[pLq] += p_i * Lq_i;
    sum[qLq] += q_i * Lq_i;
    if constexpr (Pairs) {
      Vec<T> Lx_i = apply_lambda<T, true>(spectrum, i, x_i);
      sum[pLx] += p_i * Lx_i;
      sum[qLx] += q_i * Lx_i;
      sum[qLp] += q_i * Lp_i;
    } else {
      sum[pLx] += Lp_i * x_i;
      sum[qLx] += Lq_i * x_i;
    }
  }
  if (u)
    for (int64_t i = 0; i < pad; i += lanes<T>) {
      sum[pu] += load<T>(p + i) * load<T>(u + i);
      sum[qu] += load<T>(q + i) * load<T>(u + i);
    }
  if constexpr (!Pairs) sum[qLp] = sum[pLq];
  horizontal_sums<T, dot_count>(sum, out);
}

// Return whether a sum of squares is neither under- nor overflowed, with room to multiply by the vector and divide by
// its length again.
template <class N> INLINE auto is_in_range(N squared) {
  typedef typename Scalar<N>::type T;
  constexpr T far = T(int64_t(1) << 62), least = std::numeric_limits<T>::min() * far,
              most = std::numeric_limits<T>::max() / far;
  return (squared > least) & (squared < most);
}
// Return whether that holds for p and q, and they are far enough from parallel for w to be formed without cancellation.
template <class N> INLINE auto is_well_conditioned(N key, N value, N cosine) {
  return is_in_range(key) & is_in_range(value) & (cosine * cosine < typename Scalar<N>::type(0.8));
}

// Write `from`, scaled to length one, to `to`, and one over its length to `inverse`. Return false if `from` counts as
// zero (below 1e-35 in float).
template <class T> bool normalize(const T* from, T* to, int64_t pad, T& inverse) {
  T largest = 0;
  for (int64_t i = 0; i < pad; ++i) {
    T size = std::fabs(from[i]);
    if (size > largest || size != size) largest = size;
  }
  if (largest < 1024 * std::numeric_limits<T>::min()) return false;
  T shrink = 1 / largest, sum = 0;
  for (int64_t i = 0; i < pad; ++i) {
    to[i] = from[i] * shrink;
    sum += to[i] * to[i];
  }
  T rest = 1 / std::sqrt(sum);
  for (int64_t i = 0; i < pad; ++i) to[i] *= rest;
  inverse = shrink * rest;
  return true;
}

// Slow path: normalise p and q by their largest entry first, and form k and w as vectors.
template <class T, bool Pairs>
__attribute__((noinline)) Row<T> compute_directions_carefully(const Spectrum<T>& spectrum, const T* p, const T* q,
                                                              const T* x, const T* u, int64_t pad, T* scratch) {
  T *k = scratch, *w = scratch + pad;
  Row<T> row = {};
  row.p = p;
  row.q = q;
  const bool no_key = !normalize<T>(p, k, pad, row.key_scale), no_value = !normalize<T>(q, w, pad, row.value_scale);
  const bool nan =
      row.key_scale != row.key_scale || row.value_scale != row.value_scale;  // a zero key or value does not hide a NaN
  row.no_rotation = (no_key || no_value) && !nan;
  if (row.no_rotation) return row;
  if (no_key) std::memset(k, 0, pad * sizeof(T));
  if (no_value) std::memset(w, 0, pad * sizeof(T));
  row.p = k;
  row.q = w;
  T along = 0;
  for (int64_t i = 0; i < pad; ++i) along += k[i] * w[i];
  for (int64_t i = 0; i < pad; ++i) w[i] -= along * k[i];
  T d[dot_count];
  compute_dots<T, Pairs>(spectrum, k, w, x, u, pad, d);
  row.on_p = row.on_q = 1;
  row.cosine = along;
  row.plane = {d[px], d[qx], d[pLx], d[qLx], d[pLp], d[pLq], d[qLp], d[qLq], d[qq], d[pu], d[qu]};
  return row;
}

// Addresses of the vectors of a row: p, followed by q; x; and u, if the drive is rotated with the state.
template <class T> struct RowVectors {
  const T *p, *x, *u;
};

// Compute the directions of `count` rows, the vectors of row l at `row_vectors(l)`. `dots` holds dot_count dot products
// per row; they are computed unless `dots_known`. `scratch` has room for two vectors per row.
template <class T, class N, bool Pairs, class Where>
INLINE void compute_directions(const Spectrum<T>& spectrum, Where row_vectors, int count, int64_t pad, T* dots,
                               bool dots_known, T* scratch, Group<T, N>& out) {
  T single[dot_count];  // a single row keeps its dot products in registers, without a store-to-load round trip
  for (int l = 0; l < count; ++l) {
    const RowVectors<T> at = row_vectors(l);
    if (!dots_known)
      compute_dots<T, Pairs>(spectrum, at.p, at.p + pad, at.x, at.u, pad,
                             rows_per<N> == 1 ? single : dots + l * dot_count);
    out.p[l] = at.p;
    out.q[l] = at.p + pad;
    out.no_rotation[l] = false;
  }
  N d[dot_count];
  if (rows_per<N> == 1 && !dots_known) {
    transpose_rows<T, dot_count>(single, count, d);
    for (int i = 0; i < dot_count; i += lanes<T>) store<T>(dots + i, load<T>(single + i));  // still in registers
  } else {
    transpose_rows<T, dot_count>(dots, count, d);
  }
  N ip = T(1) / sqrt_lanes(d[pp]), iq = T(1) / sqrt_lanes(d[qq]), c = d[pq] * ip * iq;
  N ww = T(1) - (d[pq] / d[pp]) * (d[pq] / d[qq]);  // not 1 - c * c, which would lengthen the dependency chain
  N kx = d[px] * ip, vx = d[qx] * iq, kLx = d[pLx] * ip, vLx = d[qLx] * iq;
  N kLk = d[pLp] * ip * ip, kLv = d[pLq] * ip * iq, vLk = d[qLp] * ip * iq, vLv = d[qLq] * iq * iq;
  N ku = d[pu] * ip, vu = d[qu] * iq;
  out.on_p = out.key_scale = ip;
  out.on_q = out.value_scale = iq;
  out.on_k = -c;
  out.cosine = c;
  out.plane = {
      kx, vx - c * kx, kLx, vLx - c * kLx, kLk, kLv - c * kLk, vLk - c * kLk, vLv - c * (kLv + vLk) + c * c * kLk, ww,
      ku, vu - c * ku};
  if (__builtin_expect(all_lanes(is_well_conditioned(d[pp], d[qq], c)), 1)) return;
  for (int l = 0; l < count; ++l) {
    if (is_well_conditioned(lane(d[pp], l), lane(d[qq], l), lane(c, l))) continue;
    const RowVectors<T> at = row_vectors(l);
    Row<T> row =
        compute_directions_carefully<T, Pairs>(spectrum, at.p, at.p + pad, at.x, at.u, pad, scratch + l * 2 * pad);
    set_row<T, N>(row, l, out);
  }
}

}  // namespace
