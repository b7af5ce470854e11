// The input gate softplus(a) with a = U D' u + bias, and its gradients.
//
//   n, rank      the state dimension, and the number of rows of D' and of columns of U
//   u            the projected input B x + b
//   hidden       D' u
//   logits       a

#pragma once

#include "products.h"

// Arguments of the gradients of a drive gain softplus(a) u; training.py reads the layout from here. A `void*` points to
// SCALAR, which is float or double.
struct GateGradients {
  int64_t rows, size, rank;
  const void *to_drive, *u, *hidden, *logits;        // (rows, n) each, `hidden` (rows, rank)
  const void *gain, *down, *up;                      // (n), (rank, n), (n, rank)
  void *to_u, *to_gain, *to_down, *to_up, *to_bias;  // (rows, n), (n), (rank, n), (n, rank), (n)
  void* workspace;
};

namespace {

template <class T> struct Softplus;
template <> struct Softplus<float> {
  static constexpr int exp_terms = 8, log_terms = 8;
  static constexpr float least = -87.0f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
  static constexpr int mantissa = 23, bias = 127;
};
template <> struct Softplus<double> {
  static constexpr int exp_terms = 14, log_terms = 17;
  static constexpr double least = -708.0, ln2_high = 0.693145751953125, ln2_low = 1.42860682030941723212e-6;
  static constexpr int mantissa = 52, bias = 1023;
};
constexpr int largest_smooth = 20;  // above it softplus(x) is x itself, as in torch

// exp(-|x|), at least exp(`least`).
template <class T> INLINE Vec<T> exp_of_negative(Vec<T> x) {
  using Constant = Softplus<T>;
  typedef typename Types<T>::index Bits __attribute__((vector_size(VECTOR_BYTES)));
  Vec<T> y = x > 0 ? -x : x;
  y = y < Constant::least ? Vec<T>{} + Constant::least : y;
  const Vec<T> scaled = y * T(1.44269504088896340736) - T(0.5);
  const Bits power = __builtin_convertvector(scaled, Bits);  // rounds toward zero, hence to the nearest integer
  const Vec<T> whole = __builtin_convertvector(power, Vec<T>);
  const Vec<T> r = (y - whole * Constant::ln2_high) - whole * Constant::ln2_low;
  Vec<T> e = Vec<T>{} + 1;
  for (int i = Constant::exp_terms; i > 0; --i) e = 1 + e * r * (T(1) / T(i));  // Taylor's series of exp(r)
  const Bits shifted = (power + Constant::bias) << Constant::mantissa;
  Vec<T> two_to_power;
  std::memcpy(&two_to_power, &shifted, sizeof shifted);
  return e * two_to_power;
}

// log(1 + exp(x)). With e = exp(-|x|) it is max(x, 0) + 2 artanh(e / (2 + e)), whose argument is at most 1/3, so that
// the series of artanh needs few terms and no logarithm.
template <class T> INLINE Vec<T> softplus(Vec<T> x) {
  const Vec<T> e = exp_of_negative<T>(x), z = e / (e + 2), square = z * z;
  Vec<T> sum = {};
  for (int i = Softplus<T>::log_terms - 1; i >= 0; --i) sum = sum * square + T(2) / T(2 * i + 1);
  const Vec<T> smooth = (x > 0 ? x : Vec<T>{}) + z * sum;
  return x <= largest_smooth ? smooth : x;  // NaN passes
}

// The derivative of softplus.
template <class T> INLINE Vec<T> softplus_slope(Vec<T> x) {
  const Vec<T> e = exp_of_negative<T>(x), larger = 1 / (1 + e);
  return x > largest_smooth ? Vec<T>{} + 1 : (x > 0 ? larger : e * larger);  // NaN passes
}

// The first `count` entries at an address, or a whole vector if there are more; the other lanes are zero.
template <class T> INLINE Vec<T> load_first(const T* from, int64_t count) {
  if (count >= lanes<T>) return load<T>(from);
  Vec<T> v = {};
  std::memcpy(&v, from, count * sizeof(T));
  return v;
}
template <class T> INLINE void store_first(T* to, int64_t count, Vec<T> v) {
  std::memcpy(to, &v, std::min<int64_t>(count, lanes<T>) * sizeof(T));
}

template <class T> struct Gate {
  const T *down, *up, *bias;
  int64_t rank, size;
};

// Multiply the projected inputs u of `rows` rows by the gate. `hidden` and `logits` have room for `block_rows` rows.
template <class T> void apply_gate(const Gate<T>& by, int64_t rows, T* u, T* hidden, T* logits) {
  const int64_t n = by.size;
  for (int64_t first = 0; first < rows; first += block_rows) {
    const int64_t count = std::min(block_rows, rows - first), entries = count * n;
    T* const block = u + first * n;
    multiply_unpacked<T>(count, {block, n}, {by.down, nullptr, n, by.rank}, {hidden, by.rank});
    multiply_unpacked<T>(count, {hidden, by.rank}, {by.up, by.bias, by.rank, n}, {logits, n});
    for (int64_t i = 0; i < entries; i += lanes<T>)
      store_first<T>(block + i, entries - i,
                     load_first<T>(block + i, entries - i) * softplus<T>(load_first<T>(logits + i, entries - i)));
  }
}

// Memory of the gradients of a block of rows.
template <class T> struct GradientMemory {
  T *transposed_up, *to_transposed_up;  // U' and its gradient, (rank, n)
  T *to_logits, *to_hidden;             // (block_rows, n) and (block_rows, rank)
  T* sums;                              // those of one block: to_gain and to_bias (n), to_down and to U' (rank, n)

  void allocate(const GateGradients& s, Arena<T>& memory) {
    transposed_up = memory.allocate(s.rank * s.size);
    to_transposed_up = memory.allocate(s.rank * s.size);
    to_logits = memory.allocate(block_rows * s.size);
    to_hidden = memory.allocate(block_rows * s.rank);
    sums = memory.allocate(2 * (1 + s.rank) * s.size);
  }
};

template <class T> INLINE void add_scaled(int64_t size, T by, const T* x, T* to) {
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) to[i] += by * x[i];
}

// Gradients of the drive gain softplus(a) u with respect to u, gain, D', U and the bias, from that of the drive, g:
//   a: t = gain g u softplus'(a)    D' u: h = U' t    u: gain g softplus(a) + D h
//   gain: sum g softplus(a) u       bias: sum t       U: sum t (D' u)'    D': sum h u'
// Sums are taken over blocks of rows, so that their rounding errors grow with the number of blocks only.
template <class T> void compute_gate_gradients(const GateGradients& s, const GradientMemory<T>& at) {
  const int64_t n = s.size, rank = s.rank;
  auto input = [](const void* from) { return static_cast<const T*>(from); };
  auto output = [](void* to) { return static_cast<T*>(to); };
  T *const gain_sum = at.sums, *const bias_sum = gain_sum + n, *const down_sum = bias_sum + n,
          *const up_sum = down_sum + rank * n;
  T* const totals[] = {output(s.to_gain), output(s.to_bias), output(s.to_down), at.to_transposed_up};
  const int64_t sizes[] = {n, n, rank * n, rank * n};
  for (int k = 0; k < 4; ++k) std::memset(totals[k], 0, sizes[k] * sizeof(T));
  for (int64_t i = 0; i < n; ++i)
    for (int64_t k = 0; k < rank; ++k) at.transposed_up[k * n + i] = input(s.up)[i * rank + k];
  for (int64_t first = 0; first < s.rows; first += block_rows) {
    const int64_t count = std::min(block_rows, s.rows - first);
    const T *const u = input(s.u) + first * n, *const hidden = input(s.hidden) + first * rank;
    T* const to_u = output(s.to_u) + first * n;
    std::memset(at.sums, 0, 2 * (1 + rank) * n * sizeof(T));
    for (int64_t r = 0; r < count; ++r) {
      for (int64_t i = 0; i < n; i += lanes<T>) {
        const int64_t at_row = r * n + i, rest = n - i;
        const Vec<T> a = load_first<T>(input(s.logits) + first * n + at_row, rest);
        const Vec<T> g = load_first<T>(input(s.to_drive) + first * n + at_row, rest);
        const Vec<T> u_i = load_first<T>(u + at_row, rest), gate = softplus<T>(a);
        const Vec<T> scaled = g * load_first<T>(input(s.gain) + i, rest), t = scaled * u_i * softplus_slope<T>(a);
        store_first<T>(at.to_logits + at_row, rest, t);
        store_first<T>(to_u + at_row, rest, scaled * gate);
        store_first<T>(gain_sum + i, rest, load_first<T>(gain_sum + i, rest) + g * gate * u_i);
        store_first<T>(bias_sum + i, rest, load_first<T>(bias_sum + i, rest) + t);
      }
    }
    multiply_unpacked<T>(count, {at.to_logits, n}, {at.transposed_up, nullptr, n, rank}, {at.to_hidden, rank});
    for (int64_t r = 0; r < count; ++r) {
      for (int64_t k = 0; k < rank; ++k) {
        const T h = at.to_hidden[r * rank + k];
        add_scaled<T>(n, h, input(s.down) + k * n, to_u + r * n);
        add_scaled<T>(n, h, u + r * n, down_sum + k * n);
        add_scaled<T>(n, hidden[r * rank + k], at.to_logits + r * n, up_sum + k * n);
      }
    }
    const T* sum = at.sums;
    for (int k = 0; k < 4; sum += sizes[k++]) add_scaled<T>(sizes[k], T(1), sum, totals[k]);
  }
  for (int64_t i = 0; i < n; ++i)
    for (int64_t k = 0; k < rank; ++k) output(s.to_up)[i * rank + k] = at.to_transposed_up[k * n + i];
}

}  // namespace
