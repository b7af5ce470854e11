// The scalars of one rotation, forward and backward. Nothing here reads a vector: the scalars of a row (one sequence at
// one step) follow from its dot products.
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
//   g..          the gradient with respect to ..; g itself is that with respect to x'
//   Qx, Qg       Q'x and Q'g; LQx = L Q'x and LtQg = L'Q'g

#pragma once

#include <cmath>

#include "../../csrc/simd.h"

namespace {

enum Retraction { exponential, cayley, taylor_one, taylor_two };

// ---- The coefficients of Q ------------------------------------------------------------------------------------------

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

// ---- The scalars of a row -------------------------------------------------------------------------------------------

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

// ---- From k and w to p and q ----------------------------------------------------------------------------------------

// Express k and w by p and q: k = on_p p, w = on_q q + on_k k.
template <class N> struct Frame {
  N on_p, on_q, on_k;
  N cosine, key_scale, value_scale;  // k.v, 1/|p|, 1/|q|
  PlaneDots<N> plane;
};

// From coefficients of k and w to coefficients of p and q.
template <class N>
INLINE RotationScalars<N> scalars_of_projections(const Frame<N>& frame, const RotationScalars<N>& by) {
  return {frame.on_p * (by.y1 + frame.on_k * by.y2), frame.on_q * by.y2, frame.on_p * (by.m1 + frame.on_k * by.m2),
          frame.on_q * by.m2};
}

// ---- The gradients of a row -----------------------------------------------------------------------------------------

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

// The dot products of p and q with g and with L'g, in the order of `with_g` below.
enum DotWithG { pg, qg, pLtg, qLtg, dot_with_g_count = 8 };

// Compute the coefficients from these dot products.
template <class N>
INLINE GradientScalars<N> gradient_scalars(int64_t retraction, const Frame<N>& frame, N beta, const N* with_g) {
  GradientScalars<N> out = {};
  const PlaneDots<N>& d = frame.plane;
  const N c = frame.cosine;
  const N kg = frame.on_p * with_g[pg], wg = frame.on_q * with_g[qg] + frame.on_k * kg;
  const N gLk = frame.on_p * with_g[pLtg], gLw = frame.on_q * with_g[qLtg] + frame.on_k * gLk;
  const RotationScalars<N> by = rotation_scalars<N>(retraction, d, beta);
  const PlaneDots<N> e = rotation_scalars_backward<N>(retraction, d, beta, {gLk, gLw, kg, wg}, out.beta);
  N x_on_k = by.y1, x_on_w = by.y2, g_on_k = e.kLx, g_on_w = e.wLx;  // Q'x = x + x_on_k k + x_on_w w, and likewise Q'g
  if (retraction == taylor_one) x_on_k = x_on_w = g_on_k = g_on_w = N{};
  if (retraction == taylor_two) {
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
  if (retraction >= taylor_one) {
    out.rest_x_on_k = by.y1 - x_on_k;
    out.rest_x_on_w = by.y2 - x_on_w;
    out.rest_g_on_k = e.kLx - g_on_k;
    out.rest_g_on_w = e.wLx - g_on_w;
    k_gk += out.rest_x_on_k * gLk + out.rest_g_on_k * d.kLx;
    k_gw += out.rest_x_on_w * gLk + out.rest_g_on_w * d.kLx;
    w_gw += out.rest_x_on_w * gLw + out.rest_g_on_w * d.wLx;
  }
  // From coefficients of k and w to coefficients of p and q.
  auto on_p = [&](N on_k, N on_w) { return frame.on_p * (on_k + frame.on_k * on_w); };
  auto on_q = [&](N on_w) { return frame.on_q * on_w; };
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

// Transpose the scalars of a group to one struct per row.
template <class T, template <class> class Scalars> INLINE void split_lanes(const Scalars<T>& scalars, Scalars<T>* to) {
  *to = scalars;
}
template <class T, template <class> class Scalars>
INLINE void split_lanes(const Scalars<Vec<T>>& scalars, Scalars<T>* to) {
  constexpr int count = sizeof(Scalars<T>) / sizeof(T);
  Vec<T> columns[count];
  std::memcpy(columns, &scalars, sizeof columns);
  for (int j = 0; j < count; j += lanes<T>) {
    transpose<T, lanes<T> / 2>(columns + j);
    for (int l = 0; l < lanes<T>; ++l) std::memcpy(reinterpret_cast<T*>(to + l) + j, columns + j + l, sizeof(Vec<T>));
  }
}

}  // namespace
