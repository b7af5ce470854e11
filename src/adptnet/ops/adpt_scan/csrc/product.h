// A step with several rotations, Q = Q_m ... Q_1: M x = Q L Q'x. Each has its own K and V, which see the same state.
//
// The vectors of a row are rotated one plane at a time. A pass rotates them, and at once computes the dot products that
// the next rotation needs. All passes run over a group of rows, whose scalars are vectorised over the batch.
//
// Letters as in plane.h, sizes and indices as in task.h; l is a row of a group. For plane j, from 1 to `planes`:
//   y_j    the state before Q_j' is applied: y_planes = x and y_(j-1) = Q_j' y_j
//   z_j    after Q_j: z_0 = L y_0, plus u if the drive is rotated with the state, and z_j = Q_j z_(j-1)
//   h_j    the gradient with respect to z_j: h_planes = g and h_(j-1) = Q_j' h_j
//   e_j    that with respect to y_j: e_0 = L' h_0 and e_j = Q_j e_(j-1)

#pragma once

#include "weights.h"

namespace {

// Dot products of k and w with a vector of each row.
template <class N> struct InPlane {
  N k, w;
};

// The rotation in one plane of a group of rows. k and w are expressed by p and q as in `Frame`.
template <class N> struct PlaneRows {
  const T *p[rows_per<N>], *q[rows_per<N>];
  N on_p, on_q, on_k, cosine, key_scale, value_scale, ww;
  Coefficients<N> coef;
  N beta, a, b;
  // With softness, key and value are shorter than one, k f and v f': beta is that of the head times `shortening` = f f'.
  // The derivative of log f with respect to log |p| is key_excess, that with respect to log |x| is its negative.
  N shortening, key_excess, value_excess;
  // A key or value of zero has a gradient if the other, `partner`, is not zero.
  const T* partner[rows_per<N>];
  T partner_scale[rows_per<N>];
  bool zero_key[rows_per<N>];
  InPlane<N> y, z, h, e;  // of y_j, z_(j-1), h_j and e_(j-1)
};

static_assert(sizeof(PlaneRows<Vec<T>>) <= plane_rows_bytes && alignof(PlaneRows<Vec<T>>) <= 64);

// Coefficients of the gradients of one plane: gp is 1/|p| times a linear combination of h_j, z_(j-1), y_j, e_(j-1), p
// and q, and gq is 1/|q| times another.
template <class N> struct PlaneGradients {
  N key_h, key_z, key_y, key_e, key_p, key_q;
  N value_h, value_z, value_y, value_e, value_p, value_q;
  N key_scale, value_scale;
  N padding[2];  // makes the size a multiple of every number of lanes, for `split_lanes`
};

template <class N> INLINE void set_lane(N& to, int l, T value) {
  if constexpr (rows_per<N> == 1)
    to = value;
  else
    to[l] = value;
}

// Sum `Count` terms over the entries of each of `count` rows: terms_of(l) returns a function of i and `sum`, which adds
// those of a SIMD vector of row l. Lanes without a row repeat the first.
template <class N, int Count, class TermsOf> INLINE void sum_rows(int count, int64_t pad, TermsOf terms_of, N* out) {
  if constexpr (rows_per<N> == 1) {
    Vec<T> sum[8] = {};
    auto add_terms = terms_of(0);
    for (int64_t i = 0; i < pad; i += lanes<T>) add_terms(i, sum);
    T total[8];
    horizontal_sums<T, 8>(sum, total);
    for (int j = 0; j < Count; ++j) out[j] = total[j];
  } else {
    Vec<T> sums[Count][lanes<T>];
    for (int l = 0; l < lanes<T>; ++l) {
      Vec<T> sum[Count] = {};
      if (l < count) {
        auto add_terms = terms_of(l);
        for (int64_t i = 0; i < pad; i += lanes<T>) add_terms(i, sum);
      }
      for (int j = 0; j < Count; ++j) sums[j][l] = l < count ? sum[j] : sums[j][0];
    }
    for (int j = 0; j < Count; ++j) out[j] = reduce_group<T, lanes<T>>(sums[j]);
  }
}

// ---- One rotation ---------------------------------------------------------------------------------------------------

// Find the rotation in one plane of `count` rows, with p of row l at directions + l * stride, followed by q. Rows for
// which is_none(l) holds, or with a key or value of zero, have Q = I.
template <class N, class IsNone>
void find_plane(const Task& task, const T* directions, int64_t stride, int count, IsNone is_none, N beta, N soft_length,
                T* scratch, PlaneRows<N>& out) {
  const int64_t pad = task.pad();
  for (int l = 0; l < count; ++l) {
    out.p[l] = directions + l * stride;
    out.q[l] = out.p[l] + pad;
  }
  N d[3];  // p.p, q.q and p.q
  sum_rows<N, 3>(
      count, pad,
      [&](int l) {
        const T *p = out.p[l], *q = out.q[l];
        return [=](int64_t i, Vec<T>* sum) {
          const Vec<T> p_i = load<T>(p + i), q_i = load<T>(q + i);
          sum[0] += p_i * p_i;
          sum[1] += q_i * q_i;
          sum[2] += p_i * q_i;
        };
      },
      d);
  const N ip = T(1) / sqrt_lanes(d[0]), iq = T(1) / sqrt_lanes(d[1]), c = d[2] * ip * iq;
  out.on_p = out.key_scale = ip;
  out.on_q = out.value_scale = iq;
  out.on_k = -c;
  out.cosine = c;
  out.ww = T(1) - (d[2] / d[0]) * (d[2] / d[1]);
  for (int l = 0; l < count; ++l) {
    const bool none = is_none(l);
    out.partner[l] = nullptr;
    if (!none && is_well_conditioned(lane(d[0], l), lane(d[1], l), lane(c, l))) continue;
    Row<T> row = {};
    T *k = scratch + l * 2 * pad, *w = k + pad;
    if (!none) orthogonalize_carefully<T>(out.p[l], pad, k, w, row);
    const bool rotates = !none && !row.no_rotation;
    if (row.no_rotation && (row.key_scale || row.value_scale)) {
      out.zero_key[l] = !row.key_scale;
      out.partner[l] = out.zero_key[l] ? w : k;
      out.partner_scale[l] = out.zero_key[l] ? row.value_scale : row.key_scale;
    }
    out.p[l] = rotates ? k : task.real;  // Q = I: they are multiplied by zero, so any finite vectors do
    out.q[l] = rotates ? w : task.real;
    for (N* scalar : {&out.on_p, &out.on_q}) set_lane(*scalar, l, T(rotates));
    set_lane(out.on_k, l, T(0));
    set_lane(out.cosine, l, rotates ? row.cosine : T(0));
    set_lane(out.key_scale, l, rotates ? row.key_scale : T(0));
    set_lane(out.value_scale, l, rotates ? row.value_scale : T(0));
    set_lane(out.ww, l, rotates ? dot(w, w, pad) : T(0));
  }
  const N of_key = soft_length * out.key_scale, of_value = soft_length * out.value_scale;
  const N key_factor = T(1) / sqrt_lanes(T(1) + of_key * of_key),
          value_factor = T(1) / sqrt_lanes(T(1) + of_value * of_value);
  out.shortening = key_factor * value_factor;
  out.key_excess = (of_key * key_factor) * (of_key * key_factor);
  out.value_excess = (of_value * value_factor) * (of_value * value_factor);
  beta = beta * out.shortening;
  out.beta = beta;
  out.coef = coefficients<N>(task.s.options.retraction, beta * beta * out.ww);
  out.a = beta * out.coef.linear;
  out.b = beta * beta * out.coef.quadratic;
}

// Return the softness times |x| of each row.
template <class N> INLINE N soft_lengths(const Task& task, int64_t first, int count) {
  N out = {};
  for (int l = 0; task.whole && l < count; ++l)
    set_lane(out, l, T(task.s.options.softness) * task.whole->length[first + l]);
  return out;
}

// Find the rotations of all planes. `directions` are the rows of p and q from the first row on.
template <class N, class IsNone>
void find_planes(const Task& task, const T* directions, int64_t first, int count, int64_t t, IsNone is_none,
                 PlaneRows<N>* out) {
  const int64_t stride = task.halves() * task.pad();
  const N beta = load_betas<N>(task, first, count, t), soft_length = soft_lengths<N>(task, first, count);
  for (int64_t j = 0; j < task.s.sizes.planes; ++j)
    find_plane<N>(task, directions + first * stride + j * 2 * task.pad(), stride, count, is_none, beta,
                  soft_length, task.scratch + first * stride + j * count * 2 * task.pad(), out[j]);
}

template <class N> INLINE InPlane<N> in_plane(const PlaneRows<N>& plane, const N* dots) {
  const N k = plane.on_p * dots[0];
  return {k, plane.on_q * dots[1] + plane.on_k * k};
}
// The dot products of vectors with k and w.
template <class N>
INLINE InPlane<N> dots_in_plane(const PlaneRows<N>& plane, int count, int64_t pad, Rows<const T> vectors) {
  N dots[2];
  sum_rows<N, 2>(
      count, pad,
      [&](int l) {
        const T *p = plane.p[l], *q = plane.q[l], *from = vectors.data + l * vectors.stride;
        return [=](int64_t i, Vec<T>* sum) {
          const Vec<T> value = load<T>(from + i);
          sum[0] += load<T>(p + i) * value;
          sum[1] += load<T>(q + i) * value;
        };
      },
      dots);
  return in_plane(plane, dots);
}

enum Sense { forwards, backwards };  // Q_j, and its transpose

// Rotate vectors by Q_j or by its transpose. after(l) returns a function of i and of a rotated SIMD vector of row l; its
// result is written to `to`. Return the dot products of that with the plane `next`, if there is one.
template <class N, class After>
INLINE InPlane<N> rotate_rows(const PlaneRows<N>& plane, Sense sense, const InPlane<N>& dots, const PlaneRows<N>* next,
                              int count, int64_t pad, Rows<const T> from, Rows<T> to, After after) {
  const N a = sense == forwards ? plane.a : -plane.a;
  const N on_k = a * dots.w - plane.b * plane.ww * dots.k, on_w = -a * dots.k - plane.b * dots.w;
  const N by_p = plane.on_p * (on_k + plane.on_k * on_w), by_q = plane.on_q * on_w;
  auto rotation_of = [&](int l) {
    const T *p = plane.p[l], *q = plane.q[l], *in = from.data + l * from.stride, p_l = lane(by_p, l),
            q_l = lane(by_q, l);
    T* out = to.data + l * to.stride;
    auto after_l = after(l);
    return [=](int64_t i) {
      const Vec<T> value = after_l(i, load<T>(in + i) + p_l * load<T>(p + i) + q_l * load<T>(q + i));
      store<T>(out + i, value);
      return value;
    };
  };
  if (!next) {
    for (int l = 0; l < count; ++l) {
      auto rotate = rotation_of(l);
      for (int64_t i = 0; i < pad; i += lanes<T>) rotate(i);
    }
    return InPlane<N>{};
  }
  N next_dots[2];
  sum_rows<N, 2>(
      count, pad,
      [&](int l) {
        const T *p = next->p[l], *q = next->q[l];
        auto rotate = rotation_of(l);
        return [=](int64_t i, Vec<T>* sum) {
          const Vec<T> value = rotate(i);
          sum[0] += load<T>(p + i) * value;
          sum[1] += load<T>(q + i) * value;
        };
      },
      next_dots);
  return in_plane(*next, next_dots);
}

INLINE auto unchanged(int) {
  return [](int64_t, Vec<T> value) { return value; };
}

// ---- Forward --------------------------------------------------------------------------------------------------------

// x <- Q L Q'x of `count` rows, or Q (L Q'x + u) if the drive is rotated with the state, in place.
template <class N, bool Pairs>
void rotate_states(const Task& task, const T* directions, int64_t first, int count, int64_t t) {
  const int64_t planes = task.s.sizes.planes, pad = task.pad(), stride = task.x_stride();
  PlaneRows<N>* const plane = reinterpret_cast<PlaneRows<N>*>(task.plane_rows);
  find_planes<N>(task, directions, first, count, t, [&](int l) { return task.has_ended(first + l, t); }, plane);
  const Rows<T> x = {task.x + first * stride, stride};
  const Rows<const T> from = {x.data, stride};
  auto apply_spectrum = [&](int l) {
    const Spectrum<T> spectrum = task.spectrum();
    const T* u = task.s.options.rotation_aware ? task.u + (first + l) * pad : nullptr;
    return [=](int64_t i, Vec<T> y) {
      const Vec<T> z = apply_lambda<T, Pairs>(spectrum, i, y);
      return u ? z + load<T>(u + i) : z;
    };
  };
  InPlane<N> dots = dots_in_plane<N>(plane[planes - 1], count, pad, from);
  for (int64_t j = planes - 1; j > 0; --j)
    dots = rotate_rows<N>(plane[j], backwards, dots, plane + j - 1, count, pad, from, x, unchanged);
  dots = rotate_rows<N>(plane[0], backwards, dots, plane, count, pad, from, x, apply_spectrum);
  for (int64_t j = 0; j < planes; ++j)
    dots = rotate_rows<N>(plane[j], forwards, dots, j + 1 < planes ? plane + j + 1 : nullptr, count, pad, from, x,
                          unchanged);
}

// ---- Backward -------------------------------------------------------------------------------------------------------

// From the dot products of a plane to the coefficients of its gradients; add the gradients of beta and of log |x|.
template <class N>
INLINE PlaneGradients<N> plane_gradients(const PlaneRows<N>& at, N& beta_gradient, N& length_gradient) {
  const N a = at.a, b = at.b, ww = at.ww, c = at.cosine;
  const InPlane<N>&h = at.h, &z = at.z, &y = at.y, &e = at.e;
  // The sum of h.Qz and y.Qe, where Q z = z + (a wz - b ww kz) k - (a kz + b wz) w.
  const N ga = z.w * h.k - z.k * h.w + e.w * y.k - e.k * y.w;
  const N gb = -(ww * (z.k * h.k + e.k * y.k) + z.w * h.w + e.w * y.w);
  const N gs = at.beta * (ga * at.coef.linear_slope + gb * at.beta * at.coef.quadratic_slope);
  const N gww = gs * at.beta * at.beta - b * (z.k * h.k + e.k * y.k);
  const N own_gradient = ga * at.coef.linear + 2 * at.beta * (gb * at.coef.quadratic + gs * ww);
  beta_gradient += own_gradient * at.shortening;
  const N along_k = own_gradient * at.beta * at.key_excess, along_v = own_gradient * at.beta * at.value_excess;
  length_gradient -= along_k + along_v;
  const N k_h = a * z.w - b * ww * z.k, w_h = -a * z.k - b * z.w, k_z = -a * h.w - b * ww * h.k,
          w_z = a * h.k - b * h.w;
  const N k_y = a * e.w - b * ww * e.k, w_y = -a * e.k - b * e.w, k_e = -a * y.w - b * ww * y.k,
          w_e = a * y.k - b * y.w;
  const N k_gk = k_h * h.k + k_z * z.k + k_y * y.k + k_e * e.k, k_gw = w_h * h.k + w_z * z.k + w_y * y.k + w_e * e.k;
  const N w_gw = w_h * h.w + w_z * z.w + w_y * y.w + w_e * e.w + 2 * gww * ww;
  auto on_p = [&](N on_k, N on_w) { return at.on_p * (on_k + at.on_k * on_w); };
  auto on_q = [&](N on_w) { return at.on_q * on_w; };
  PlaneGradients<N> out = {};
  out.key_h = k_h - c * w_h;
  out.key_z = k_z - c * w_z;
  out.key_y = k_y - c * w_y;
  out.key_e = k_e - c * w_e;
  out.key_p = on_p(c * k_gw - k_gk + along_k, -2 * c * gww - k_gw);
  out.key_q = on_q(-2 * c * gww - k_gw);
  out.value_h = w_h;
  out.value_z = w_z;
  out.value_y = w_y;
  out.value_e = w_e;
  out.value_p = on_p(c * along_v - (k_gw + c * w_gw), 2 * gww - w_gw + along_v);  // v = w + c k
  out.value_q = on_q(2 * gww - w_gw + along_v);
  out.key_scale = at.key_scale;
  out.value_scale = at.value_scale;
  return out;
}

// With softness: the gradient of a key of zero, from h.Qz + y.Qe with Q = 1 + beta (dk v' - v dk'), where v is the unit
// value; or minus that of a value of zero.
inline void backward_zero_direction(const T* v, const T* h, const T* z, const T* y, const T* e, int64_t pad, T scale,
                                    T* to) {
  set_scaled(scale * dot(v, z, pad), h, to, pad);
  add_scaled(-scale * dot(v, h, pad), z, to, pad);
  add_scaled(scale * dot(v, e, pad), y, to, pad);
  add_scaled(-scale * dot(v, y, pad), e, to, pad);
}

// The backward of `count` rows from `first` on, without K'gp + V'gq: gp and gq of all planes to `gradients`, the
// gradient of the state before the step to task.previous_g, that of a rotated drive to task.u, and that of beta to
// `beta_gradients`. `x` and `gradients` are the first rows of the tile; `g` is the gradient with respect to Q L Q'x.
template <class N, bool Pairs>
void rotate_states_backward(const Task& task, const T* directions, const T* x, const T* g, T* gradients, int64_t first,
                            int count, int64_t t, T* beta_gradients) {
  const int64_t planes = task.s.sizes.planes, pad = task.pad(), x_stride = task.x_stride();
  PlaneRows<N>* const plane = reinterpret_cast<PlaneRows<N>*>(task.plane_rows);
  find_planes<N>(task, directions, first, count, t, [&](int l) { return task.has_ended(first + l, t); }, plane);

  // y_j and so on, for j < planes; y_planes is x, h_planes is g, and e_planes is previous_g.
  enum Vectors { y, z, h, e };
  auto own = [&](Vectors which, int64_t j) {
    return Rows<T>{task.rotated + (which * planes + j) * lanes<T> * pad, pad};
  };
  auto read = [&](Vectors which, int64_t j) -> Rows<const T> {
    if (j == planes) return which == y ? Rows<const T>{x + first * x_stride, x_stride} : Rows<const T>{g + first * pad, pad};
    return {own(which, j).data, pad};
  };
  auto apply_spectrum = [&](int l) {
    const Spectrum<T> spectrum = task.spectrum();
    T* const y_0 = own(y, 0).data + l * pad;
    const T* u = task.s.options.rotation_aware ? task.u + (first + l) * pad : nullptr;
    return [=](int64_t i, Vec<T> y_i) {
      store<T>(y_0 + i, y_i);
      const Vec<T> z_i = apply_lambda<T, Pairs>(spectrum, i, y_i);
      return u ? z_i + load<T>(u + i) : z_i;
    };
  };
  auto apply_spectrum_transposed = [&](int l) {
    const Spectrum<T> spectrum = task.spectrum();
    T *const h_0 = own(h, 0).data + l * pad, *const sums = task.sums.vector(real_sum);
    const T* y_0 = own(y, 0).data + l * pad;
    T* u = task.s.options.rotation_aware ? task.u + (first + l) * pad : nullptr;
    return [=](int64_t i, Vec<T> h_i) {
      store<T>(h_0 + i, h_i);
      if (u) store<T>(u + i, h_i);
      add_spectrum_gradient<Pairs>(sums, pad, i, h_i, load<T>(y_0 + i));
      return apply_lambda_transposed<T, Pairs>(spectrum, i, h_i);
    };
  };

  plane[planes - 1].y = dots_in_plane<N>(plane[planes - 1], count, pad, read(y, planes));
  for (int64_t j = planes - 1; j > 0; --j)
    plane[j - 1].y = rotate_rows<N>(plane[j], backwards, plane[j].y, plane + j - 1, count, pad, read(y, j + 1),
                                    own(y, j), unchanged);
  plane[0].z = rotate_rows<N>(plane[0], backwards, plane[0].y, plane, count, pad, read(y, 1), own(z, 0),
                              apply_spectrum);
  for (int64_t j = 0; j + 1 < planes; ++j)
    plane[j + 1].z = rotate_rows<N>(plane[j], forwards, plane[j].z, plane + j + 1, count, pad, read(z, j),
                                    own(z, j + 1), unchanged);
  plane[planes - 1].h = dots_in_plane<N>(plane[planes - 1], count, pad, read(h, planes));
  for (int64_t j = planes - 1; j > 0; --j)
    plane[j - 1].h = rotate_rows<N>(plane[j], backwards, plane[j].h, plane + j - 1, count, pad, read(h, j + 1),
                                    own(h, j), unchanged);
  plane[0].e = rotate_rows<N>(plane[0], backwards, plane[0].h, plane, count, pad, read(h, 1), own(e, 0),
                              apply_spectrum_transposed);
  for (int64_t j = 0; j < planes; ++j) {
    const bool ends = j + 1 == planes;
    const Rows<T> to = ends ? Rows<T>{task.previous_g + first * pad, pad} : own(e, j + 1);
    PlaneRows<N>* const next = ends ? nullptr : plane + j + 1;
    const InPlane<N> dots = rotate_rows<N>(plane[j], forwards, plane[j].e, next, count, pad, read(e, j), to, unchanged);
    if (next) next->e = dots;
  }

  N beta_gradient = {}, length_gradient = {};
  const N betas = load_betas<N>(task, first, count, t), soft_length = soft_lengths<N>(task, first, count);
  for (int64_t j = 0; j < planes; ++j) {
    PlaneGradients<T> by[rows_per<N>];
    split_lanes<T>(plane_gradients<N>(plane[j], beta_gradient, length_gradient), by);
    const Rows<const T> h_rows = read(h, j + 1), z_rows = read(z, j), y_rows = read(y, j + 1), e_rows = read(e, j);
    for (int l = 0; l < count; ++l) {
      const PlaneGradients<T> c = by[l];
      const T *p = plane[j].p[l], *q = plane[j].q[l], *h_l = h_rows.data + l * h_rows.stride,
              *z_l = z_rows.data + l * z_rows.stride, *y_l = y_rows.data + l * y_rows.stride,
              *e_l = e_rows.data + l * e_rows.stride;
      T* to = gradients + (first + l) * task.gradient_stride() + j * 2 * pad;
      for (int64_t i = 0; i < pad; i += lanes<T>) {
        const Vec<T> h_i = load<T>(h_l + i), z_i = load<T>(z_l + i), y_i = load<T>(y_l + i), e_i = load<T>(e_l + i);
        const Vec<T> p_i = load<T>(p + i), q_i = load<T>(q + i);
        // Multiply by 1/|p| and 1/|q| last: terms multiplied by both could overflow or underflow.
        store<T>(to + i, c.key_scale * (c.key_h * h_i + c.key_z * z_i + c.key_y * y_i + c.key_e * e_i +
                                        c.key_p * p_i + c.key_q * q_i));
        store<T>(to + pad + i, c.value_scale * (c.value_h * h_i + c.value_z * z_i + c.value_y * y_i +
                                                c.value_e * e_i + c.value_p * p_i + c.value_q * q_i));
      }
      const T soft = lane(soft_length, l);
      if (plane[j].partner[l] && soft > 0) {
        const T across = soft * plane[j].partner_scale[l], by_beta = lane(betas, l) / std::sqrt(1 + across * across);
        if (plane[j].zero_key[l])
          backward_zero_direction(plane[j].partner[l], h_l, z_l, y_l, e_l, pad, by_beta / soft, to);
        else
          backward_zero_direction(plane[j].partner[l], h_l, z_l, y_l, e_l, pad, -by_beta / soft, to + pad);
      }
    }
  }
  for (int l = 0; l < count; ++l) {
    beta_gradients[l] = lane(beta_gradient, l);
    if (task.whole) task.whole->length_gradient[first + l] += lane(length_gradient, l);
  }
}

}  // namespace
