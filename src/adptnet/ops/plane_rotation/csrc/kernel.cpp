// Apply a plane rotation, y = Q x, and its backward, for float and double. The derivation is in the README beside this
// file. Rows are independent, so results do not depend on the number of threads.
//
//   x, y         the vector before and after the rotation
//   k, o         `key` and `offset`, orthogonal vectors that span the plane
//   sigma        `skew_coefficient`, the coefficient of k o' - o k'
//   kappa, rho   `key_coefficient` and `offset_coefficient`, the coefficients of k k' and o o'
//   mu, nu       y = x + mu k + nu o with mu = kappa (k.x) + sigma (o.x), nu = rho (o.x) - sigma (k.x)
//   g..          the gradient with respect to ..; g itself is that with respect to y

#include "../../csrc/simd.h"
#include "../../csrc/threads.h"

// Arguments of a call; cpu.py reads the layout from here. A `void*` points to SCALAR, which is float or double.
struct Rotation {
  int64_t rows, size, threads;
  const void *x, *key, *offset;                                         // (rows, size)
  const void *skew_coefficient, *key_coefficient, *offset_coefficient;  // (rows)
  void* rotated;                                                        // (rows, size)
  const void* gradients;                                                // (rows, size), with respect to y
  void *x_gradients, *key_gradients, *offset_gradients;
  void *skew_coefficient_gradients, *key_coefficient_gradients, *offset_coefficient_gradients;
};

namespace {

constexpr int unrolled = 2;  // independent accumulators, to hide the FMA latency

template <class T> struct KeyOffset {
  T key, offset;
};

// k.x and o.x.
template <class T> INLINE KeyOffset<T> dots(const T* k, const T* o, const T* x, int64_t size) {
  Vec<T> key_sum[unrolled] = {}, offset_sum[unrolled] = {};
  int64_t i = 0;
  for (; i + unrolled * lanes<T> <= size; i += unrolled * lanes<T>)
#pragma GCC unroll 2
    for (int v = 0; v < unrolled; ++v) {
      const int64_t at = i + v * lanes<T>;
      const Vec<T> x_i = load<T>(x + at);
      key_sum[v] += load<T>(k + at) * x_i;
      offset_sum[v] += load<T>(o + at) * x_i;
    }
  const Vec<T> key = key_sum[0] + key_sum[1], offset = offset_sum[0] + offset_sum[1];
  KeyOffset<T> sums = {0, 0};
  for (int l = 0; l < lanes<T>; ++l) {
    sums.key += key[l];
    sums.offset += offset[l];
  }
  for (; i < size; ++i) {
    sums.key += k[i] * x[i];
    sums.offset += o[i] * x[i];
  }
  return sums;
}

template <class T> void forward(const Rotation& s, int64_t row) {
  const int64_t begin = row * s.size;
  const T *x = static_cast<const T*>(s.x) + begin, *k = static_cast<const T*>(s.key) + begin;
  const T* o = static_cast<const T*>(s.offset) + begin;
  T* y = static_cast<T*>(s.rotated) + begin;
  const T sigma = static_cast<const T*>(s.skew_coefficient)[row], kappa = static_cast<const T*>(s.key_coefficient)[row];
  const T rho = static_cast<const T*>(s.offset_coefficient)[row];
  const KeyOffset<T> x_dots = dots<T>(k, o, x, s.size);
  const T mu = kappa * x_dots.key + sigma * x_dots.offset, nu = rho * x_dots.offset - sigma * x_dots.key;
  int64_t i = 0;
  for (; i + lanes<T> <= s.size; i += lanes<T>)
    store<T>(y + i, load<T>(x + i) + mu * load<T>(k + i) + nu * load<T>(o + i));
  for (; i < s.size; ++i) y[i] = x[i] + mu * k[i] + nu * o[i];
}

template <class T> void backward(const Rotation& s, int64_t row) {
  const int64_t begin = row * s.size;
  const T *x = static_cast<const T*>(s.x) + begin, *k = static_cast<const T*>(s.key) + begin;
  const T *o = static_cast<const T*>(s.offset) + begin, *g = static_cast<const T*>(s.gradients) + begin;
  T *gx = static_cast<T*>(s.x_gradients) + begin, *gk = static_cast<T*>(s.key_gradients) + begin;
  T* go = static_cast<T*>(s.offset_gradients) + begin;
  const T sigma = static_cast<const T*>(s.skew_coefficient)[row], kappa = static_cast<const T*>(s.key_coefficient)[row];
  const T rho = static_cast<const T*>(s.offset_coefficient)[row];
  const KeyOffset<T> x_dots = dots<T>(k, o, x, s.size), g_dots = dots<T>(k, o, g, s.size);
  const T mu = kappa * x_dots.key + sigma * x_dots.offset, nu = rho * x_dots.offset - sigma * x_dots.key;
  const T g_kx = kappa * g_dots.key - sigma * g_dots.offset,
          g_ox = sigma * g_dots.key + rho * g_dots.offset;  // gradients of k.x and o.x
  static_cast<T*>(s.skew_coefficient_gradients)[row] = g_dots.key * x_dots.offset - g_dots.offset * x_dots.key;
  static_cast<T*>(s.key_coefficient_gradients)[row] = g_dots.key * x_dots.key;
  static_cast<T*>(s.offset_coefficient_gradients)[row] = g_dots.offset * x_dots.offset;
  int64_t i = 0;
  for (; i + lanes<T> <= s.size; i += lanes<T>) {
    const Vec<T> x_i = load<T>(x + i), g_i = load<T>(g + i);
    store<T>(gx + i, g_i + g_kx * load<T>(k + i) + g_ox * load<T>(o + i));
    store<T>(gk + i, mu * g_i + g_kx * x_i);
    store<T>(go + i, nu * g_i + g_ox * x_i);
  }
  for (; i < s.size; ++i) {
    gx[i] = g[i] + g_kx * k[i] + g_ox * o[i];
    gk[i] = mu * g[i] + g_kx * x[i];
    go[i] = nu * g[i] + g_ox * x[i];
  }
}

// Each thread takes a contiguous range of rows.
template <class Row> void for_each_row(const Rotation& s, Row row) {
  run_in_threads(s.threads, [&](int64_t thread) {
    for (int64_t i = s.rows * thread / s.threads; i < s.rows * (thread + 1) / s.threads; ++i) row(s, i);
  });
}

}  // namespace

extern "C" {
EXPORT int64_t plane_rotation_layout() { return sizeof(Rotation); }
EXPORT void plane_rotation_forward(const Rotation* s) { for_each_row(*s, forward<SCALAR>); }
EXPORT void plane_rotation_backward(const Rotation* s) { for_each_row(*s, backward<SCALAR>); }
}
