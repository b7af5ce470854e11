// The directions of the rotation: from the vectors of a row (one sequence at one step) to its scalars.
//
// Letters as in plane.h. Sizes and indices:
//   pad   the padded length of a vector
//   i, l  entry of a vector, and row of a group (lane of a SIMD vector)

#pragma once

#include <limits>

#include "plane.h"

namespace {

// ---- Eigenvalues ----------------------------------------------------------------------------------------------------

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

// ---- Rows and groups of rows ----------------------------------------------------------------------------------------

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

// Addresses of the vectors of a row: p, followed by q; x; and u, null unless the drive is rotated with the state.
template <class T> struct RowVectors {
  const T *p, *x, *u;
};

// Memory of a group: dot_count dot products per row, which the forward may have computed already, and scratch for two
// vectors per row.
template <class T> struct GroupMemory {
  T* dots;
  bool dots_known;
  T* scratch;
};

// ---- Dot products ---------------------------------------------------------------------------------------------------

// The dot products of a row, in the order in which they are stored and saved for the backward.
enum Dot { pp, qq, pq, px, qx, pLx, qLx, pLp, pLq, qLq, qLp, pu, qu, dot_count = 16 };

template <class T, bool Pairs>
INLINE void compute_dots(const Spectrum<T> spectrum, const RowVectors<T> at, int64_t pad, T* out) {
  const T *p = at.p, *q = at.p + pad, *x = at.x, *u = at.u;
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

// The dot products with g, see `DotWithG`.
template <class T, bool Pairs>
INLINE void compute_dots_with_g(const Spectrum<T> spectrum, const T* p, const T* q, const T* g, int64_t pad, T* out) {
  Vec<T> sum[dot_with_g_count] = {};
  for (int64_t i = 0; i < pad; i += lanes<T>) {
    Vec<T> p_i = load<T>(p + i), q_i = load<T>(q + i), g_i = load<T>(g + i),
           Ltg_i = apply_lambda_transposed<T, Pairs>(spectrum, i, g_i);
    sum[pg] += p_i * g_i;
    sum[qg] += q_i * g_i;
    sum[pLtg] += p_i * Ltg_i;
    sum[qLtg] += q_i * Ltg_i;
  }
  horizontal_sums<T, dot_with_g_count>(sum, out);
}

// ---- Lengths --------------------------------------------------------------------------------------------------------

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

// ---- Directions -----------------------------------------------------------------------------------------------------

// Slow path: normalise p, which is followed by q, by their largest entries first, and form k and w as vectors. Set the
// scalars of `row` except its dot products.
template <class T> void orthogonalize_carefully(const T* p, int64_t pad, T* k, T* w, Row<T>& row) {
  row.p = p;
  row.q = p + pad;
  const bool no_key = !normalize<T>(row.p, k, pad, row.key_scale),
             no_value = !normalize<T>(row.q, w, pad, row.value_scale);
  // A zero key or value does not hide a NaN.
  const bool nan = row.key_scale != row.key_scale || row.value_scale != row.value_scale;
  row.no_rotation = (no_key || no_value) && !nan;
  if (row.no_rotation) return;
  if (no_key) std::memset(k, 0, pad * sizeof(T));
  if (no_value) std::memset(w, 0, pad * sizeof(T));
  row.p = k;
  row.q = w;
  T along = 0;
  for (int64_t i = 0; i < pad; ++i) along += k[i] * w[i];
  for (int64_t i = 0; i < pad; ++i) w[i] -= along * k[i];
  row.on_p = row.on_q = 1;
  row.cosine = along;
}
// And compute its dot products.
template <class T, bool Pairs>
__attribute__((noinline)) Row<T> compute_directions_carefully(const Spectrum<T>& spectrum, const RowVectors<T>& at,
                                                              int64_t pad, T* scratch) {
  T *k = scratch, *w = scratch + pad;
  Row<T> row = {};
  orthogonalize_carefully<T>(at.p, pad, k, w, row);
  if (row.no_rotation) return row;
  T d[dot_count];
  compute_dots<T, Pairs>(spectrum, {k, at.x, at.u}, pad, d);
  row.plane = {d[px], d[qx], d[pLx], d[qLx], d[pLp], d[pLq], d[qLp], d[qLq], d[qq], d[pu], d[qu]};
  return row;
}

// Compute the directions of `count` rows, the vectors of row l at `row_vectors(l)`.
template <class T, class N, bool Pairs, class Where>
INLINE void compute_directions(const Spectrum<T>& spectrum, Where row_vectors, int count, int64_t pad,
                               const GroupMemory<T> memory, Group<T, N>& out) {
  T single[dot_count];  // a single row keeps its dot products in registers, without a store-to-load round trip
  for (int l = 0; l < count; ++l) {
    const RowVectors<T> at = row_vectors(l);
    if (!memory.dots_known)
      compute_dots<T, Pairs>(spectrum, at, pad, rows_per<N> == 1 ? single : memory.dots + l * dot_count);
    out.p[l] = at.p;
    out.q[l] = at.p + pad;
    out.no_rotation[l] = false;
  }
  N d[dot_count];
  if (rows_per<N> == 1 && !memory.dots_known) {
    transpose_rows<T, dot_count>(single, count, d);
    for (int i = 0; i < dot_count; i += lanes<T>) store<T>(memory.dots + i, load<T>(single + i));  // still in registers
  } else {
    transpose_rows<T, dot_count>(memory.dots, count, d);
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
    Row<T> row = compute_directions_carefully<T, Pairs>(spectrum, row_vectors(l), pad, memory.scratch + l * 2 * pad);
    set_row<T, N>(row, l, out);
  }
}

}  // namespace
