// y = x + p k + q o with p = a (k·x) + t (o·x), q = b (o·x) - t (k·x), and its backward, for float and double.
//
// Rows do not meet, so the numbers are the same however they are shared among threads.

#include "../vectors.h"

// Mirrored field by field in cpu.py. Pointers are to NUMBER: float or double, chosen when it is compiled.
struct Turn {
  int64_t rows, size, threads;
  const void *x, *key, *offset;                       // (rows, size)
  const void *turn, *shrink_key, *shrink_offset;      // (rows): t, a and b
  void* turned;                                       // (rows, size)
  const void* gradients;                              // at what was turned
  void *x_gradients, *key_gradients, *offset_gradients;
  void *turn_gradients, *shrink_key_gradients, *shrink_offset_gradients;
};

namespace {

constexpr int together = 2;  // vectors summed side by side, to hide the latency of each

template <class T> struct Pair {
  T first, second;
};

// k·x and o·x.
template <class T> INLINE Pair<T> dots(const T* k, const T* o, const T* x, int64_t size) {
  Vec<T> along[together] = {}, across[together] = {};
  int64_t i = 0;
  for (; i + together * lanes<T> <= size; i += together * lanes<T>)
#pragma GCC unroll 2
    for (int v = 0; v < together; ++v) {
      const int64_t at = i + v * lanes<T>;
      const Vec<T> here = load<T>(x + at);
      along[v] += load<T>(k + at) * here;
      across[v] += load<T>(o + at) * here;
    }
  const Vec<T> first = along[0] + along[1], second = across[0] + across[1];
  Pair<T> sums = {0, 0};
  for (int l = 0; l < lanes<T>; ++l) {
    sums.first += first[l];
    sums.second += second[l];
  }
  for (; i < size; ++i) {
    sums.first += k[i] * x[i];
    sums.second += o[i] * x[i];
  }
  return sums;
}

template <class T> void forward(const Turn& s, int64_t row) {
  const int64_t begin = row * s.size;
  const T *x = static_cast<const T*>(s.x) + begin, *k = static_cast<const T*>(s.key) + begin;
  const T* o = static_cast<const T*>(s.offset) + begin;
  T* y = static_cast<T*>(s.turned) + begin;
  const T t = static_cast<const T*>(s.turn)[row], a = static_cast<const T*>(s.shrink_key)[row];
  const T b = static_cast<const T*>(s.shrink_offset)[row];
  const Pair<T> d = dots<T>(k, o, x, s.size);
  const T p = a * d.first + t * d.second, q = b * d.second - t * d.first;
  int64_t i = 0;
  for (; i + lanes<T> <= s.size; i += lanes<T>)
    store<T>(y + i, load<T>(x + i) + p * load<T>(k + i) + q * load<T>(o + i));
  for (; i < s.size; ++i) y[i] = x[i] + p * k[i] + q * o[i];
}

template <class T> void backward(const Turn& s, int64_t row) {
  const int64_t begin = row * s.size;
  const T *x = static_cast<const T*>(s.x) + begin, *k = static_cast<const T*>(s.key) + begin;
  const T *o = static_cast<const T*>(s.offset) + begin, *g = static_cast<const T*>(s.gradients) + begin;
  T *gx = static_cast<T*>(s.x_gradients) + begin, *gk = static_cast<T*>(s.key_gradients) + begin;
  T* go = static_cast<T*>(s.offset_gradients) + begin;
  const T t = static_cast<const T*>(s.turn)[row], a = static_cast<const T*>(s.shrink_key)[row];
  const T b = static_cast<const T*>(s.shrink_offset)[row];
  const Pair<T> d = dots<T>(k, o, x, s.size), e = dots<T>(k, o, g, s.size);
  const T p = a * d.first + t * d.second, q = b * d.second - t * d.first;
  const T along = a * e.first - t * e.second, across = t * e.first + b * e.second;  // derivatives at k·x and o·x
  static_cast<T*>(s.turn_gradients)[row] = e.first * d.second - e.second * d.first;
  static_cast<T*>(s.shrink_key_gradients)[row] = e.first * d.first;
  static_cast<T*>(s.shrink_offset_gradients)[row] = e.second * d.second;
  int64_t i = 0;
  for (; i + lanes<T> <= s.size; i += lanes<T>) {
    const Vec<T> here = load<T>(x + i), pull = load<T>(g + i);
    store<T>(gx + i, pull + along * load<T>(k + i) + across * load<T>(o + i));
    store<T>(gk + i, p * pull + along * here);
    store<T>(go + i, q * pull + across * here);
  }
  for (; i < s.size; ++i) {
    gx[i] = g[i] + along * k[i] + across * o[i];
    gk[i] = p * g[i] + along * x[i];
    go[i] = q * g[i] + across * x[i];
  }
}

// Each thread has a stretch of rows.
template <class Row> void each(const Turn& s, Row row) {
  in_threads(s.threads, [&](int64_t thread) {
    for (int64_t i = s.rows * thread / s.threads; i < s.rows * (thread + 1) / s.threads; ++i) row(s, i);
  });
}

}  // namespace

extern "C" {
int64_t plane_rotation_layout() { return sizeof(Turn); }
void plane_rotation_forward(const Turn* s) { each(*s, forward<NUMBER>); }
void plane_rotation_backward(const Turn* s) { each(*s, backward<NUMBER>); }
}
