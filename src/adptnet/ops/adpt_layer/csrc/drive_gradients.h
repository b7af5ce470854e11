// Gradients of the drive gain softplus(a) u with a = U D' u + c and u = B x + b, or gain u without an input gate.
//
// With g the gradient of the drive, that of u is v = gain g without a gate. With a gate it is gain g softplus(a) + h D',
// where t = gain g u softplus'(a) is the gradient of a, and h = t U that of D' u. Then
//   B: sum v x'    b: sum v    x: v B, or v without B    U: sum t (D' u)'    D': sum h u'    c: sum t    gain: sum g softplus(a) u
//   r, i, j, k   row (sequence and step), state dimension, feature of x, row of D'

#pragma once

#include "gate.h"

// Arguments of a call; cpu.py reads the layout from here. A `void*` points to SCALAR, which is float or double.
struct DriveGradients {
  int64_t rows, width, size, rank;             // rank: 0 without a gate
  const void *to_drive, *x;                    // (rows, n), (rows, width)
  const void *gain, *weight, *bias;            // (n), B (n, width) or null, b (n) or null
  const void *u, *hidden, *logits, *down, *up;  // with a gate: (rows, n), D' u (rows, rank), a (rows, n), D', U
  void *to_x, *to_gain, *to_weight, *to_bias;  // to_x: null if it is not needed
  void *to_down, *to_up, *to_gate_bias;
  void* workspace;
};

namespace {

template <class T> struct DriveMemory {
  T* to_u;                                    // (rows, n)
  T *to_logits, *to_hidden;                   // of a block of rows
  T *transposed_up, *to_transposed_up, *sums;  // (rank, n) twice, and sums over a block

  void allocate(const DriveGradients& s, Arena<T>& memory) {
    to_u = memory.allocate(s.rows * s.size);
    if (!s.rank && !s.weight) sums = memory.allocate(s.size);
    if (!s.rank) return;
    to_logits = memory.allocate(block_rows * s.size);
    to_hidden = memory.allocate(block_rows * s.rank);
    transposed_up = memory.allocate(s.rank * s.size);
    to_transposed_up = memory.allocate(s.rank * s.size);
    sums = memory.allocate(2 * (1 + s.rank) * s.size);
  }
};

template <class T> const T* input(const void* from) { return static_cast<const T*>(from); }
template <class T> T* output(void* to) { return static_cast<T*>(to); }

template <class T> INLINE void add_scaled(int64_t size, T by, const T* x, T* to) {
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) to[i] += by * x[i];
}

// v, and the gradients of the gain and of the parameters of the gate. Sums are taken over blocks of rows, so that their
// rounding errors grow with the number of blocks only.
template <class T> void differentiate_gate(const DriveGradients& s, const DriveMemory<T>& at) {
  const int64_t n = s.size, rank = s.rank;
  T *const gain_sum = at.sums, *const bias_sum = gain_sum + n, *const down_sum = bias_sum + n,
          *const up_sum = down_sum + rank * n;
  T* const totals[] = {output<T>(s.to_gain), output<T>(s.to_gate_bias), output<T>(s.to_down), at.to_transposed_up};
  const int64_t sizes[] = {n, n, rank * n, rank * n};
  for (int part = 0; part < 4; ++part) std::memset(totals[part], 0, sizes[part] * sizeof(T));
  for (int64_t i = 0; i < n; ++i)
    for (int64_t k = 0; k < rank; ++k) at.transposed_up[k * n + i] = input<T>(s.up)[i * rank + k];
  for (int64_t first = 0; first < s.rows; first += block_rows) {
    const int64_t count = std::min(block_rows, s.rows - first);
    const T *const u = input<T>(s.u) + first * n, *const a = input<T>(s.logits) + first * n;
    const T *const g = input<T>(s.to_drive) + first * n, *const hidden = input<T>(s.hidden) + first * rank;
    T* const to_u = at.to_u + first * n;
    std::memset(at.sums, 0, 2 * (1 + rank) * n * sizeof(T));
    for (int64_t r = 0; r < count; ++r) {
      for (int64_t i = 0; i < n; i += lanes<T>) {
        const int64_t ri = r * n + i, rest = n - i;
        const Vec<T> a_i = load_first<T>(a + ri, rest), g_i = load_first<T>(g + ri, rest);
        const Vec<T> u_i = load_first<T>(u + ri, rest), gate = softplus<T>(a_i);
        const Vec<T> scaled = g_i * load_first<T>(input<T>(s.gain) + i, rest);
        const Vec<T> t = scaled * u_i * softplus_slope<T>(a_i);
        store_first<T>(at.to_logits + ri, rest, t);
        store_first<T>(to_u + ri, rest, scaled * gate);
        store_first<T>(gain_sum + i, rest, load_first<T>(gain_sum + i, rest) + g_i * gate * u_i);
        store_first<T>(bias_sum + i, rest, load_first<T>(bias_sum + i, rest) + t);
      }
    }
    multiply_unpacked<T>(count, {at.to_logits, n}, {at.transposed_up, nullptr, n, rank}, {at.to_hidden, rank});
    for (int64_t r = 0; r < count; ++r) {
      for (int64_t k = 0; k < rank; ++k) {
        const T h = at.to_hidden[r * rank + k];
        add_scaled<T>(n, h, input<T>(s.down) + k * n, to_u + r * n);
        add_scaled<T>(n, h, u + r * n, down_sum + k * n);
        add_scaled<T>(n, hidden[r * rank + k], at.to_logits + r * n, up_sum + k * n);
      }
    }
    const T* sum = at.sums;
    for (int part = 0; part < 4; sum += sizes[part++]) add_scaled<T>(sizes[part], T(1), sum, totals[part]);
  }
  for (int64_t i = 0; i < n; ++i)
    for (int64_t k = 0; k < rank; ++k) output<T>(s.to_up)[i * rank + k] = at.to_transposed_up[k * n + i];
}

// Without a gate, the gradient of the gain follows from the sums of g x' and of g, which are then scaled by the gain.
template <class T> void differentiate_gain(const DriveGradients& s, const DriveMemory<T>& at) {
  const T *const gain = input<T>(s.gain), *const g = input<T>(s.to_drive);
  for (int64_t i = 0; i < s.size; ++i) {
    T* const row = output<T>(s.to_weight) + i * s.width;
    const T* const weight = input<T>(s.weight) + i * s.width;
    T total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t j = 0; j < s.width; ++j) {
      total += row[j] * weight[j];
      row[j] *= gain[i];
    }
    if (s.bias) {
      T* const to_bias = output<T>(s.to_bias) + i;
      total += *to_bias * input<T>(s.bias)[i];
      *to_bias *= gain[i];
    }
    output<T>(s.to_gain)[i] = total;
  }
  for (int64_t r = 0; r < s.rows; ++r)
#pragma omp simd
    for (int64_t i = 0; i < s.size; ++i) at.to_u[r * s.size + i] = gain[i] * g[r * s.size + i];
}

// Without a gate and without B.
template <class T> void differentiate_gain_alone(const DriveGradients& s, const DriveMemory<T>& at) {
  const int64_t n = s.size;
  T* const total = output<T>(s.to_gain);
  std::memset(total, 0, n * sizeof(T));
  for (int64_t first = 0; first < s.rows; first += block_rows) {
    std::memset(at.sums, 0, n * sizeof(T));
    for (int64_t r = first; r < std::min(first + block_rows, s.rows); ++r) {
      const T *const g = input<T>(s.to_drive) + r * n, *const x = input<T>(s.x) + r * n, *const gain = input<T>(s.gain);
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) {
        at.sums[i] += g[i] * x[i];
        at.to_u[r * n + i] = gain[i] * g[i];
      }
    }
    add_scaled<T>(n, T(1), at.sums, total);
  }
}

template <class T> void differentiate_drive(const DriveGradients& s, const DriveMemory<T>& at) {
  const int64_t n = s.size;
  if (s.rank) differentiate_gate<T>(s, at);
  if (!s.weight) {
    if (!s.rank) differentiate_gain_alone<T>(s, at);
    if (s.to_x) std::memcpy(s.to_x, at.to_u, s.rows * n * sizeof(T));
    return;
  }
  const T* const by_row = s.rank ? at.to_u : input<T>(s.to_drive);
  multiply_strided<T>(n, s.rows, s.width, {by_row, 1, n}, {input<T>(s.x), s.width},
                      {output<T>(s.to_weight), s.width});
  if (s.bias) {
    const T one = 1;
    multiply_strided<T>(1, s.rows, n, {&one, 0, 0}, {by_row, n}, {output<T>(s.to_bias), n});
  }
  if (!s.rank) differentiate_gain<T>(s, at);
  if (s.to_x)
    multiply_strided<T>(s.rows, n, s.width, {at.to_u, n, 1}, {input<T>(s.weight), s.width},
                        {output<T>(s.to_x), s.width});
}

}  // namespace
