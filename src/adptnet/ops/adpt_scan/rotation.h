// The rotation of one row: its directions, the numbers it comes down to, and their derivatives.

#pragma once

#include <cmath>
#include <limits>

#include "../vectors.h"

namespace {

enum Form { exponential, cayley, taylor_one, taylor_two };

// One step of the transposed sum: lane l of group g from `a` in its lower half and from `b` in its upper.
constexpr int picked(int lane, int group, int all, bool upper) {
  int start = lane / group * group, offset = lane % group, half = group / 2;
  return (offset < half ? start + offset : all + start + offset - half) + (upper ? half : 0);
}
template <class T, int Group, int... I> INLINE Vec<T> halved(Vec<T> a, Vec<T> b, std::integer_sequence<int, I...>) {
  return SHUFFLE(T, a, b, picked(I, Group, lanes<T>, false)...) + SHUFFLE(T, a, b, picked(I, Group, lanes<T>, true)...);
}
template <class T, int Group> INLINE Vec<T> totals(Vec<T>* sums) {
  if constexpr (Group == 1) {
    return sums[0];
  } else {
    Vec<T> next[Group / 2];
#pragma GCC unroll 8
    for (int i = 0; i < Group / 2; ++i)
      next[i] = halved<T, Group>(sums[i], sums[i + Group / 2], std::make_integer_sequence<int, lanes<T>>());
    return totals<T, Group / 2>(next);
  }
}
// The sum over the lanes of each of `Count` vectors; Count is a multiple of eight, so of every number of lanes.
template <class T, int Count> INLINE void sum_lanes(Vec<T>* sums, T* out) {
#pragma GCC unroll 16
  for (int i = 0; i < Count; i += lanes<T>) store<T>(out + i, totals<T, lanes<T>>(sums + i));
}

// Columns of a matrix whose first `count` rows are given: lane l of out[j] is rows[l * Columns + j], and in lanes without a
// row that of the first.
template <class T, int Half, int... I> INLINE void exchange(Vec<T>& a, Vec<T>& b, std::integer_sequence<int, I...>) {
  const Vec<T> lower = SHUFFLE(T, a, b, picked(I, 2 * Half, lanes<T>, false)...);
  b = SHUFFLE(T, a, b, picked(I, 2 * Half, lanes<T>, true)...);
  a = lower;
}
template <class T, int Half> INLINE void transpose(Vec<T>* rows) {
#pragma GCC unroll 8
  for (int i = 0; i < lanes<T>; ++i)
    if (!(i & Half)) exchange<T, Half>(rows[i], rows[i + Half], std::make_integer_sequence<int, lanes<T>>());
  if constexpr (Half > 1) transpose<T, Half / 2>(rows);
}
template <class T, int Columns> INLINE void across(const T* rows, int, T* out) {
  std::memcpy(out, rows, Columns * sizeof(T));
}
template <class T, int Columns> INLINE void across(const T* rows, int count, Vec<T>* out) {
#pragma GCC unroll 16
  for (int j = 0; j < Columns; j += lanes<T>) {
#pragma GCC unroll 8
    for (int l = 0; l < lanes<T>; ++l) out[j + l] = load<T>(rows + (l < count) * l * Columns + j);  // without a branch
    transpose<T, lanes<T> / 2>(out + j);
  }
}

// Whether a comparison holds in all lanes.
INLINE bool all(bool holds) { return holds; }
INLINE bool all(int holds) { return holds; }  // of bools with & between them
template <class Mask> INLINE bool all(Mask mask) {
  int64_t parts[sizeof(Mask) / 8], both = -1;
  std::memcpy(parts, &mask, sizeof mask);
  for (int64_t part : parts) both &= part;
  return both == -1;
}

// From here on N is a number of one row, or a vector that holds those of as many rows as it has lanes.
template <class N> struct Lane {
  typedef N type;
};
template <> struct Lane<Vec<float>> {
  typedef float type;
};
template <> struct Lane<Vec<double>> {
  typedef double type;
};

template <class N> constexpr int rows_in = sizeof(N) / sizeof(typename Lane<N>::type);
template <class N> INLINE auto lane(const N& numbers, int l) {
  if constexpr (rows_in<N> == 1)
    return numbers;
  else
    return numbers[l];
}

INLINE float root(float s) { return std::sqrt(s); }
INLINE double root(double s) { return std::sqrt(s); }
template <class N> INLINE N root(N s) {
  typename Lane<N>::type each[rows_in<N>];
  std::memcpy(each, &s, sizeof s);
#pragma omp simd
  for (int l = 0; l < rows_in<N>; ++l) each[l] = std::sqrt(each[l]);
  std::memcpy(&s, each, sizeof s);
  return s;
}

// Coefficients of S and S^2 and their derivatives with respect to the squared angle.
template <class N> struct Coefficients {
  N linear, quadratic, linear_slope, quadratic_slope;
};

// From (a - sin a) / a^3 and (a^2/2 - 1 + cos a) / a^4, without cancellation.
template <class N> INLINE Coefficients<N> from_remainders(N linear, N quadratic, N third, N fourth) {
  return {linear, quadratic, (third - quadratic) / 2, fourth - third / 2};
}

template <class T> __attribute__((noinline)) Coefficients<T> coefficients_by_sine(T s) {
  T angle = std::sqrt(s), half = std::sin(angle / 2) / angle;
  T linear = std::sin(angle) / angle, quadratic = 2 * half * half;
  return from_remainders<T>(linear, quadratic, (1 - linear) / s, (T(0.5) - quadratic) / s);
}

template <class N, int Terms> INLINE Coefficients<N> coefficients_by_series(N s) {
  typedef typename Lane<N>::type T;
  // 1 / (2 i + 3)! and 1 / (2 i + 4)!
  constexpr double odd[] = {1 / 6.0, 1 / 120.0, 1 / 5040.0, 1 / 362880.0, 1 / 39916800.0, 1 / 6227020800.0,
                            1 / 1307674368000.0, 1 / 355687428096000.0, 1 / 121645100408832000.0};
  constexpr double even[] = {1 / 24.0, 1 / 720.0, 1 / 40320.0, 1 / 3628800.0, 1 / 479001600.0, 1 / 87178291200.0,
                             1 / 20922789888000.0, 1 / 6402373705728000.0, 1 / 2432902008176640000.0};
  N third = N{} + T(odd[Terms - 1]), fourth = N{} + T(even[Terms - 1]);
#pragma GCC unroll 8
  for (int i = Terms - 2; i >= 0; --i) {
    third = T(odd[i]) - s * third;
    fourth = T(even[i]) - s * fourth;
  }
  return from_remainders<N>(T(1) - s * third, T(0.5) - s * fourth, third, fourth);
}

template <class N> INLINE Coefficients<N> coefficients(int64_t form, N s) {
  typedef typename Lane<N>::type T;
  if (form == cayley) {
    N linear = T(1) / (T(1) + s / 4), slope = -linear * linear / 4;
    return {linear, linear / 2, slope, slope / 2};
  }
  // What is left out of a series is less than half a unit in the last place: of a few terms for small angles, so that a row by
  // itself waits less, and of many up to a limit.
  constexpr bool single = sizeof(T) == 4;
  constexpr int few = single ? 3 : 6, many = single ? 7 : 9;
  constexpr T small = T(0.125), limit = single ? 4 : 1;
  const Coefficients<N> near = coefficients_by_series<N, few>(s);
  if (__builtin_expect(all(s < small), 1)) return near;
  if constexpr (rows_in<N> == 1) {
    return s < limit ? coefficients_by_series<T, many>(s) : coefficients_by_sine<T>(s);
  } else {
    Coefficients<N> out = coefficients_by_series<N, many>(s);
    out.linear = s < small ? near.linear : out.linear;  // as if it were alone: no row moves the digits of another
    out.quadratic = s < small ? near.quadratic : out.quadratic;
    out.linear_slope = s < small ? near.linear_slope : out.linear_slope;
    out.quadratic_slope = s < small ? near.quadratic_slope : out.quadratic_slope;
    if (__builtin_expect(all(s < limit), 1)) return out;
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

// What the vectors of a row come down to: k unit, w orthogonal to k, L the eigenvalues, u the drive.
template <class N> struct Plane {
  N kx, wx, kLx, wLx, kLk, kLw, wLk, wLw, ww, ku, wu;
};

// M x = L (x + y1 k + y2 w) + m1 k + m2 w.
template <class N> struct Turn {
  N y1, y2, m1, m2;
};

template <class N> INLINE Turn<N> turn(int64_t form, const Plane<N>& d, N beta) {
  N a = beta, b = beta * beta / 2;
  if (form == taylor_one) return {-a * d.wx, a * d.kx, a * d.wLx, -a * d.kLx};
  if (form == taylor_two) {
    N kz = d.kLx - a * d.wx * d.kLk + a * d.kx * d.kLw, wz = d.wLx - a * d.wx * d.wLk + a * d.kx * d.wLw;
    return {-a * d.wx - b * d.ww * d.kx, a * d.kx - b * d.wx, a * wz - b * d.ww * d.kLx, -a * kz - b * d.wLx};
  }
  Coefficients<N> q = coefficients<N>(form, beta * beta * d.ww);
  a = beta * q.linear;
  b = beta * beta * q.quadratic;
  N y1 = -a * d.wx - b * d.ww * d.kx, y2 = a * d.kx - b * d.wx;
  N kz = d.kLx + d.ku + y1 * d.kLk + y2 * d.kLw, wz = d.wLx + d.wu + y1 * d.wLk + y2 * d.wLw;
  return {y1, y2, a * wz - b * d.ww * kz, -a * kz - b * wz};
}

// The derivative of `turn`: from that of its four results to those of the plane, and of beta.
template <class N>
INLINE Plane<N> turn_backward(int64_t form, const Plane<N>& d, N beta, const Turn<N>& g, N& beta_gradient) {
  Plane<N> out = {};
  N a = beta, b = beta * beta / 2, ga, gb;
  if (form == taylor_one) {
    out.kx = a * g.y2;
    out.wx = -a * g.y1;
    out.kLx = -a * g.m2;
    out.wLx = a * g.m1;
    beta_gradient = -d.wx * g.y1 + d.kx * g.y2 + d.wLx * g.m1 - d.kLx * g.m2;
    return out;
  }
  if (form == taylor_two) {
    N y1 = -a * d.wx, y2 = a * d.kx;  // to first order
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
  Coefficients<N> q = coefficients<N>(form, beta * beta * d.ww);
  a = beta * q.linear;
  b = beta * beta * q.quadratic;
  N y1 = -a * d.wx - b * d.ww * d.kx, y2 = a * d.kx - b * d.wx;
  N kz = d.kLx + d.ku + y1 * d.kLk + y2 * d.kLw, wz = d.wLx + d.wu + y1 * d.wLk + y2 * d.wLw;
  N gkz = -b * d.ww * g.m1 - a * g.m2, gwz = a * g.m1 - b * g.m2;
  N g1 = g.y1 + d.kLk * gkz + d.wLk * gwz, g2 = g.y2 + d.kLw * gkz + d.wLw * gwz;
  ga = wz * g.m1 - kz * g.m2 - d.wx * g1 + d.kx * g2;
  gb = -d.ww * (kz * g.m1 + d.kx * g1) - wz * g.m2 - d.wx * g2;
  N gs = beta * (ga * q.linear_slope + gb * beta * q.quadratic_slope);
  out.ww = -b * (kz * g.m1 + d.kx * g1) + gs * beta * beta;
  out.kLx = out.ku = gkz;
  out.wLx = out.wu = gwz;
  out.kLk = y1 * gkz;
  out.kLw = y2 * gkz;
  out.wLk = y1 * gwz;
  out.wLw = y2 * gwz;
  out.kx = -b * d.ww * g1 + a * g2;
  out.wx = -a * g1 - b * g2;
  beta_gradient = ga * q.linear + 2 * beta * (gb * q.quadratic + gs * d.ww);
  return out;
}

// ---- Directions -----------------------------------------------------------------------------------------------------

// k = on_p p,  w = on_q q + on_k k.
template <class N> struct Frame {
  N on_p, on_q, on_k;
  N dot, key_scale, value_scale;  // k.v, 1/|p|, 1/|q|
  Plane<N> plane;
};

// Where p and q are almost parallel, or their squares leave the range of numbers, p and q point to k and w themselves, made
// in scratch memory.
template <class T> struct Row : Frame<T> {
  const T *p, *q;
  bool still;  // p or q is zero: no rotation
};

// As many rows as N has lanes, so that their numbers are computed together; lanes without a row hold those of the first.
template <class T, class N> struct Group : Frame<N> {
  const T *p[rows_in<N>], *q[rows_in<N>];
  bool still[rows_in<N>];
};

template <class A, class B, class Move> INLINE void each_number(Frame<A>& a, Frame<B>& b, Move move) {
  move(a.on_p, b.on_p);
  move(a.on_q, b.on_q);
  move(a.on_k, b.on_k);
  move(a.dot, b.dot);
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
template <class T, class N> INLINE void put_row(Row<T>& row, int l, Group<T, N>& group) {
  each_number(group, row, [&](N& to, T from) {
    if constexpr (rows_in<N> == 1)
      to = from;
    else
      to[l] = from;
  });
  group.p[l] = row.p;
  group.q[l] = row.q;
  group.still[l] = row.still;
}
template <class T, class N> Row<T> row_of(Group<T, N>& group, int l) {
  Row<T> out;
  each_number(group, out, [&](const N& from, T& to) { to = lane(from, l); });
  out.p = group.p[l];
  out.q = group.q[l];
  out.still = group.still[l];
  return out;
}

template <class T> struct Eigen {
  const T *real, *imag;
};
template <class T, bool Pairs> INLINE Vec<T> times(const Eigen<T>& eigen, int64_t i, Vec<T> x) {
  Vec<T> out = load<T>(eigen.real + i) * x;
  if constexpr (Pairs) out += load<T>(eigen.imag + i) * swapped<T>(x);
  return out;
}
template <class T, bool Pairs> INLINE Vec<T> times_transposed(const Eigen<T>& eigen, int64_t i, Vec<T> x) {
  Vec<T> out = load<T>(eigen.real + i) * x;
  if constexpr (Pairs) out += swapped<T>(load<T>(eigen.imag + i) * x);
  return out;
}

enum Dot { pp, qq, pq, px, qx, pLx, qLx, pLp, pLq, qLq, qLp, pu, qu, dots = 16 };

template <class T, bool Pairs>
INLINE void dot_products(const Eigen<T> eigen, const T* p, const T* q, const T* x, const T* u, int64_t pad, T* out) {
  Vec<T> sum[dots] = {};
  for (int64_t i = 0; i < pad; i += lanes<T>) {
    Vec<T> a = load<T>(p + i), b = load<T>(q + i), c = load<T>(x + i);
    Vec<T> La = times<T, Pairs>(eigen, i, a), Lb = times<T, Pairs>(eigen, i, b);
    sum[pp] += a * a;
    sum[qq] += b * b;
    sum[pq] += a * b;
    sum[px] += a * c;
    sum[qx] += b * c;
    sum[pLp] += a * La;
    sum[pLq] += a * Lb;
    sum[qLq] += b * Lb;
    if constexpr (Pairs) {
      Vec<T> Lc = times<T, true>(eigen, i, c);
      sum[pLx] += a * Lc;
      sum[qLx] += b * Lc;
      sum[qLp] += b * La;
    } else {
      sum[pLx] += La * c;
      sum[qLx] += Lb * c;
    }
  }
  if (u)
    for (int64_t i = 0; i < pad; i += lanes<T>) {
      sum[pu] += load<T>(p + i) * load<T>(u + i);
      sum[qu] += load<T>(q + i) * load<T>(u + i);
    }
  if constexpr (!Pairs) sum[qLp] = sum[pLq];
  sum_lanes<T, dots>(sum, out);
}

// Whether a sum of squares kept its digits, and a vector of that length may multiply others and be divided by it again.
template <class N> INLINE auto within_range(N squared) {
  typedef typename Lane<N>::type T;
  constexpr T far = T(int64_t(1) << 62), least = std::numeric_limits<T>::min() * far, most = std::numeric_limits<T>::max() / far;
  return (squared > least) & (squared < most);
}
// Whether that holds for p and q, and their cosine leaves enough of w.
template <class N> INLINE auto plain(N key, N value, N cosine) {
  return within_range(key) & within_range(value) & (cosine * cosine < typename Lane<N>::type(0.8));
}

// `from` at length one, in `to`; the length is scale. False if it counts as zero: below 1e-35 in float.
template <class T> bool to_unit(const T* from, T* to, int64_t pad, T& inverse) {
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

template <class T, bool Pairs>
__attribute__((noinline)) Row<T> look_closely(const Eigen<T>& eigen, const T* p, const T* q, const T* x, const T* u,
                                              int64_t pad, T* scratch) {
  T *k = scratch, *w = scratch + pad;
  Row<T> row = {};
  row.p = p;
  row.q = q;
  const bool no_key = !to_unit<T>(p, k, pad, row.key_scale), no_value = !to_unit<T>(q, w, pad, row.value_scale);
  const bool nan = row.key_scale != row.key_scale || row.value_scale != row.value_scale;  // which zero does not hide
  row.still = (no_key || no_value) && !nan;
  if (row.still) return row;
  if (no_key) std::memset(k, 0, pad * sizeof(T));
  if (no_value) std::memset(w, 0, pad * sizeof(T));
  row.p = k;
  row.q = w;
  T along = 0;
  for (int64_t i = 0; i < pad; ++i) along += k[i] * w[i];
  for (int64_t i = 0; i < pad; ++i) w[i] -= along * k[i];
  T d[dots];
  dot_products<T, Pairs>(eigen, k, w, x, u, pad, d);
  row.on_p = row.on_q = 1;
  row.dot = along;
  row.plane = {d[px], d[qx], d[pLx], d[qLx], d[pLp], d[pLq], d[qLp], d[qLq], d[qq], d[pu], d[qu]};
  return row;
}

// Where the vectors of a row are: p, behind it q, x, and u if there is a drive that turns.
template <class T> struct Place {
  const T *p, *x, *u;
};

// The directions of `count` rows; `place(l)` is that of row l. `products` are their dot products, one row after the other,
// which are computed unless they are known. `scratch` has two vectors for each row.
template <class T, class N, bool Pairs, class Where>
INLINE void directions(const Eigen<T>& eigen, Where place, int count, int64_t pad, T* products, bool known, T* scratch,
                       Group<T, N>& out) {
  T alone[dots];  // for one row they are taken from here: they would have to come back from memory
  for (int l = 0; l < count; ++l) {
    const Place<T> at = place(l);
    if (!known) dot_products<T, Pairs>(eigen, at.p, at.p + pad, at.x, at.u, pad, rows_in<N> == 1 ? alone : products + l * dots);
    out.p[l] = at.p;
    out.q[l] = at.p + pad;
    out.still[l] = false;
  }
  N d[dots];
  if (rows_in<N> == 1 && !known) {
    across<T, dots>(alone, count, d);
    for (int i = 0; i < dots; i += lanes<T>) store<T>(products + i, load<T>(alone + i));  // still in registers
  } else {
    across<T, dots>(products, count, d);
  }
  N ip = T(1) / root(d[pp]), iq = T(1) / root(d[qq]), c = d[pq] * ip * iq;
  N ww = T(1) - (d[pq] / d[pp]) * (d[pq] / d[qq]);  // not by c, for which it would have to wait
  N kx = d[px] * ip, vx = d[qx] * iq, kLx = d[pLx] * ip, vLx = d[qLx] * iq;
  N kLk = d[pLp] * ip * ip, kLv = d[pLq] * ip * iq, vLk = d[qLp] * ip * iq, vLv = d[qLq] * iq * iq;
  N ku = d[pu] * ip, vu = d[qu] * iq;
  out.on_p = out.key_scale = ip;
  out.on_q = out.value_scale = iq;
  out.on_k = -c;
  out.dot = c;
  out.plane = {kx, vx - c * kx, kLx, vLx - c * kLx, kLk, kLv - c * kLk, vLk - c * kLk,
               vLv - c * (kLv + vLk) + c * c * kLk, ww, ku, vu - c * ku};
  if (__builtin_expect(all(plain(d[pp], d[qq], c)), 1)) return;
  for (int l = 0; l < count; ++l) {
    if (plain(lane(d[pp], l), lane(d[qq], l), lane(c, l))) continue;
    const Place<T> at = place(l);
    Row<T> row = look_closely<T, Pairs>(eigen, at.p, at.p + pad, at.x, at.u, pad, scratch + l * 2 * pad);
    put_row<T, N>(row, l, out);
  }
}

}  // namespace
