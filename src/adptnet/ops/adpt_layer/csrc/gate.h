// The input gate softplus(a) with a = U D' u + bias.
//
//   n, rank      the state dimension, and the number of rows of D' and of columns of U
//   u            the projected input B x + b
//   hidden       D' u
//   logits       a

#pragma once

#include "products.h"

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

}  // namespace
