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

// Coefficients of S and S^2 and their derivatives with respect to the squared angle.
template <class T> struct Coefficients {
  T linear, quadratic, linear_slope, quadratic_slope;
};

template <class T> INLINE Coefficients<T> coefficients(int64_t form, T s) {
  if (form == cayley) {
    T linear = T(1) / (T(1) + s / 4), slope = -linear * linear / 4;
    return {linear, linear / 2, slope, slope / 2};
  }
  T third, fourth;  // (a - sin a) / a^3 and (a^2/2 - 1 + cos a) / a^4, from which the rest follows without cancellation
  T linear, quadratic;
  constexpr T limit = sizeof(T) == 4 ? 4 : 1;
  if (s < limit) {
    constexpr int terms = sizeof(T) == 4 ? 7 : 9;
    // 1 / (2 i + 3)! and 1 / (2 i + 4)!
    constexpr double odd[] = {1 / 6.0, 1 / 120.0, 1 / 5040.0, 1 / 362880.0, 1 / 39916800.0, 1 / 6227020800.0,
                              1 / 1307674368000.0, 1 / 355687428096000.0, 1 / 121645100408832000.0};
    constexpr double even[] = {1 / 24.0, 1 / 720.0, 1 / 40320.0, 1 / 3628800.0, 1 / 479001600.0, 1 / 87178291200.0,
                               1 / 20922789888000.0, 1 / 6402373705728000.0, 1 / 2432902008176640000.0};
    third = T(odd[terms - 1]);
    fourth = T(even[terms - 1]);
#pragma GCC unroll 8
    for (int i = terms - 2; i >= 0; --i) {
      third = T(odd[i]) - s * third;
      fourth = T(even[i]) - s * fourth;
    }
    linear = 1 - s * third;
    quadratic = T(0.5) - s * fourth;
  } else {
    T angle = std::sqrt(s), half = std::sin(angle / 2) / angle;
    linear = std::sin(angle) / angle;
    quadratic = 2 * half * half;
    third = (1 - linear) / s;
    fourth = (T(0.5) - quadratic) / s;
  }
  return {linear, quadratic, (third - quadratic) / 2, fourth - third / 2};
}

// What the vectors of a row come down to: k unit, w orthogonal to k, L the eigenvalues, u the drive.
template <class T> struct Plane {
  T kx, wx, kLx, wLx, kLk, kLw, wLk, wLw, ww, ku, wu;
};

// M x = L (x + y1 k + y2 w) + m1 k + m2 w.
template <class T> struct Turn {
  T y1, y2, m1, m2;
};

template <class T> INLINE Turn<T> turn(int64_t form, const Plane<T>& d, T beta) {
  T a = beta, b = beta * beta / 2;
  if (form == taylor_one) return {-a * d.wx, a * d.kx, a * d.wLx, -a * d.kLx};
  if (form == taylor_two) {
    T kz = d.kLx - a * d.wx * d.kLk + a * d.kx * d.kLw, wz = d.wLx - a * d.wx * d.wLk + a * d.kx * d.wLw;
    return {-a * d.wx - b * d.ww * d.kx, a * d.kx - b * d.wx, a * wz - b * d.ww * d.kLx, -a * kz - b * d.wLx};
  }
  Coefficients<T> q = coefficients<T>(form, beta * beta * d.ww);
  a = beta * q.linear;
  b = beta * beta * q.quadratic;
  T y1 = -a * d.wx - b * d.ww * d.kx, y2 = a * d.kx - b * d.wx;
  T kz = d.kLx + y1 * d.kLk + y2 * d.kLw + d.ku, wz = d.wLx + y1 * d.wLk + y2 * d.wLw + d.wu;
  return {y1, y2, a * wz - b * d.ww * kz, -a * kz - b * wz};
}

// The derivative of `turn`: from that of its four results to those of the plane, and of beta.
template <class T>
INLINE Plane<T> turn_backward(int64_t form, const Plane<T>& d, T beta, const Turn<T>& g, T& beta_gradient) {
  Plane<T> out = {};
  T a = beta, b = beta * beta / 2, ga, gb;
  if (form == taylor_one) {
    out.kx = a * g.y2;
    out.wx = -a * g.y1;
    out.kLx = -a * g.m2;
    out.wLx = a * g.m1;
    beta_gradient = -d.wx * g.y1 + d.kx * g.y2 + d.wLx * g.m1 - d.kLx * g.m2;
    return out;
  }
  if (form == taylor_two) {
    T y1 = -a * d.wx, y2 = a * d.kx;  // to first order
    T kz = d.kLx + y1 * d.kLk + y2 * d.kLw, wz = d.wLx + y1 * d.wLk + y2 * d.wLw;
    T gkz = -a * g.m2, gwz = a * g.m1;
    T first1 = d.kLk * gkz + d.wLk * gwz, first2 = d.kLw * gkz + d.wLw * gwz;
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
  Coefficients<T> q = coefficients<T>(form, beta * beta * d.ww);
  a = beta * q.linear;
  b = beta * beta * q.quadratic;
  T y1 = -a * d.wx - b * d.ww * d.kx, y2 = a * d.kx - b * d.wx;
  T kz = d.kLx + y1 * d.kLk + y2 * d.kLw + d.ku, wz = d.wLx + y1 * d.wLk + y2 * d.wLw + d.wu;
  T gkz = -b * d.ww * g.m1 - a * g.m2, gwz = a * g.m1 - b * g.m2;
  T g1 = g.y1 + d.kLk * gkz + d.wLk * gwz, g2 = g.y2 + d.kLw * gkz + d.wLw * gwz;
  ga = wz * g.m1 - kz * g.m2 - d.wx * g1 + d.kx * g2;
  gb = -d.ww * (kz * g.m1 + d.kx * g1) - wz * g.m2 - d.wx * g2;
  T gs = beta * (ga * q.linear_slope + gb * beta * q.quadratic_slope);
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

// ---- Directions of one row ------------------------------------------------------------------------------------------

// k = on_p p,  w = on_q q + on_k k. Where p and q are almost parallel, or their squares leave the range of numbers, p and
// q point to k and w themselves, made in `scratch`.
template <class T> struct Row {
  const T *p, *q;
  T on_p, on_q, on_k;
  T dot, key_scale, value_scale;  // k.v, 1/|p|, 1/|q|
  bool still;                     // p or q is zero: no rotation
  Plane<T> plane;
};

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
INLINE void dot_products(const Eigen<T>& eigen, const T* p, const T* q, const T* x, const T* u, int64_t pad, T* out) {
  Vec<T> sum[dots] = {};
  for (int64_t i = 0; i < pad; i += lanes<T>) {
    Vec<T> a = load<T>(p + i), b = load<T>(q + i), c = load<T>(x + i);
    Vec<T> La = times<T, Pairs>(eigen, i, a), Lb = times<T, Pairs>(eigen, i, b), Lc = times<T, Pairs>(eigen, i, c);
    sum[pp] += a * a;
    sum[qq] += b * b;
    sum[pq] += a * b;
    sum[px] += a * c;
    sum[qx] += b * c;
    sum[pLx] += a * Lc;
    sum[qLx] += b * Lc;
    sum[pLp] += a * La;
    sum[pLq] += a * Lb;
    sum[qLq] += b * Lb;
    if constexpr (Pairs) sum[qLp] += b * La;
  }
  if (u)
    for (int64_t i = 0; i < pad; i += lanes<T>) {
      sum[pu] += load<T>(p + i) * load<T>(u + i);
      sum[qu] += load<T>(q + i) * load<T>(u + i);
    }
  sum_lanes<T, dots>(sum, out);
  if constexpr (!Pairs) out[qLp] = out[pLq];
}

// Whether a sum of squares kept its digits.
template <class T> INLINE bool within_range(T squared) {
  constexpr T far = T(1 << 30);
  return squared > std::numeric_limits<T>::min() * far && squared < std::numeric_limits<T>::max() / far;
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
__attribute__((noinline)) void look_closely(const Eigen<T>& eigen, const T* p, const T* q, const T* x, const T* u,
                                            int64_t pad, T* scratch, Row<T>& row) {
  T *k = scratch, *w = scratch + pad;
  row.still = !to_unit<T>(p, k, pad, row.key_scale);
  row.still |= !to_unit<T>(q, w, pad, row.value_scale);
  if (row.still) return;
  T along = 0;
  for (int64_t i = 0; i < pad; ++i) along += k[i] * w[i];
  for (int64_t i = 0; i < pad; ++i) w[i] -= along * k[i];
  T d[dots];
  dot_products<T, Pairs>(eigen, k, w, x, u, pad, d);
  row.p = k;
  row.q = w;
  row.on_p = row.on_q = 1;
  row.on_k = 0;
  row.dot = along;
  row.plane = {d[px], d[qx], d[pLx], d[qLx], d[pLp], d[pLq], d[qLp], d[qLq], d[qq], d[pu], d[qu]};
}

template <class T, bool Pairs>
INLINE void directions(const Eigen<T>& eigen, const T* p, const T* q, const T* x, const T* u, int64_t pad, T* scratch,
                       Row<T>& row) {
  T d[dots];
  dot_products<T, Pairs>(eigen, p, q, x, u, pad, d);
  T ip = 1 / std::sqrt(d[pp]), iq = 1 / std::sqrt(d[qq]), c = d[pq] * ip * iq;
  bool plain = within_range(d[pp]) && within_range(d[qq]) && c * c < T(0.8);
  if (__builtin_expect(!plain, 0)) return look_closely<T, Pairs>(eigen, p, q, x, u, pad, scratch, row);
  T kx = d[px] * ip, vx = d[qx] * iq, kLx = d[pLx] * ip, vLx = d[qLx] * iq;
  T kLk = d[pLp] * ip * ip, kLv = d[pLq] * ip * iq, vLk = d[qLp] * ip * iq, vLv = d[qLq] * iq * iq;
  T ku = d[pu] * ip, vu = d[qu] * iq;
  row.p = p;
  row.q = q;
  row.on_p = row.key_scale = ip;
  row.on_q = row.value_scale = iq;
  row.on_k = -c;
  row.dot = c;
  row.still = false;
  row.plane = {kx, vx - c * kx, kLx, vLx - c * kLx, kLk, kLv - c * kLk, vLk - c * kLk,
               vLv - c * (kLv + vLk) + c * c * kLk, 1 - c * c, ku, vu - c * ku};
}

}  // namespace
