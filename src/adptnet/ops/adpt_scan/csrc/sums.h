// Gradients of the constants, which are summed over batch and time.
//
// Sums of many rows are accumulated twice: `partial` in working precision over up to partial_sum_rows rows, then
// `totals` in double, so that their error does not grow with the number of steps. Letters as in plane.h.

#pragma once

#include <algorithm>

#include "../../csrc/rows.h"
#include "arguments.h"

namespace {

// One vector of `pad` entries each; for beta only entry 0 is used. They are followed by those of the LayerNorm and of the
// bias, which have `half_count` vectors each. Beta and the bias are accumulated in `totals` directly.
enum Sum {
  beta_sum,
  real_sum,
  imag_sum,  // follows real_sum, and feed_imag_sum follows feed_real_sum: see `add_spectrum_gradient`
  feed_real_sum,
  feed_imag_sum,
  decay_sum,
  charge_sum,
  norm_weight_sum
};
inline int64_t norm_bias_sum(const Scan& s) { return norm_weight_sum + half_count(s); }
inline int64_t bias_sum(const Scan& s) { return norm_bias_sum(s) + half_count(s); }
inline int64_t sum_count(const Scan& s) { return bias_sum(s) + half_count(s); }

constexpr int64_t partial_sum_rows = 128;

struct Sums {
  int64_t pad, used;  // used: entries of `partial` that are accumulated at all
  T* partial;         // (sum_count, pad)
  double* totals;     // (sum_count, pad)
  int64_t norm_bias, bias;  // the first vectors of these sums

  void allocate(const Scan& s, Arena<T>& memory) {
    pad = padded_size<T>(s.sizes.size);
    norm_bias = norm_bias_sum(s);
    bias = bias_sum(s);
    used = (s.options.has_norm ? bias : int64_t(norm_weight_sum)) * pad;
    partial = memory.allocate(sum_count(s) * pad);
  }
  T* vector(int64_t which) const { return partial + which * pad; }
  void clear_partial() { std::memset(partial, 0, used * sizeof(T)); }
  void add_partial_to_totals() {
    for (int64_t i = pad; i < used; ++i) totals[i] += partial[i];
    clear_partial();
  }
};

INLINE void add_vector(T* to, Vec<T> change) { store<T>(to, load<T>(to) + change); }

// Add the gradient of a product of eigenvalues, left' L right, to `sums`: of the real parts, and `pad` entries further
// of the imaginary parts.
template <bool Pairs> INLINE void add_spectrum_gradient(T* sums, int64_t pad, int64_t i, Vec<T> left, Vec<T> right) {
  add_vector(sums + i, left * right);
  if constexpr (Pairs) add_vector(sums + pad + i, left * swap_pairs<T>(right));
}

// Sum the totals of all tasks over the tiles; `totals` is (heads, tiles, sum_count, pad). The sums of imaginary parts
// belong to the multipliers of swapped pairs, whose first entry has the sign reversed.
inline void reduce_totals(const Scan& s, const double* totals, int64_t tiles) {
  const int64_t m = s.sizes.size, pad = padded_size<T>(m);
  const int64_t halves = half_count(s), count = sum_count(s);
  auto reduce = [&](T* to, int64_t which, int64_t vectors, int64_t size, bool imaginary = false) {
    for (int64_t at = 0; to && at < s.sizes.heads * vectors * size; ++at) {
      const int64_t i = at % size, vector = at / size % vectors, head = at / size / vectors;
      double total = 0;
      for (int64_t tile = 0; tile < tiles; ++tile)
        total += totals[((head * tiles + tile) * count + which + vector) * pad + i];
      to[at] = T(imaginary && i % 2 == 0 ? -total : total);
    }
  };
  reduce(s.gradients.real, real_sum, 1, m);
  reduce(s.gradients.imag, imag_sum, 1, m, true);
  reduce(s.gradients.bias, bias_sum(s), halves, m);
  reduce(s.gradients.beta, beta_sum, 1, 1);
  reduce(s.gradients.feed_real, feed_real_sum, 1, m);
  reduce(s.gradients.feed_imag, feed_imag_sum, 1, m, true);
  reduce(s.gradients.decay, decay_sum, 1, m);
  reduce(s.gradients.charge, charge_sum, 1, m);
  reduce(s.gradients.norm_weight, norm_weight_sum, halves, m);
  reduce(s.gradients.norm_bias, norm_bias_sum(s), halves, m);
}

}  // namespace
