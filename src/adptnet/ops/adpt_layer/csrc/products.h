// Products of matrices as torch stores them: with packing they would take longer, for a few rows.

#pragma once

#include <algorithm>
#include <type_traits>

#include "../../csrc/rows.h"

namespace {

constexpr int64_t block_rows = 32;  // rows of a product whose inputs stay in the L1 cache

// ---- out[r, j] = sum_i x[r, i] W[j, i] + bias[j] --------------------------------------------------------------------

// A matrix, (width, depth) in row-major order, and a bias, which may be null.
template <class T> struct Linear {
  const T *weights, *bias;
  int64_t depth, width;
};

// A tile of eight results. The order of the sum is the same for every tile, so a row does not depend on the others.
template <class T, int Count>
INLINE void multiply_tile_unpacked(Rows<const T> x, const Linear<T>& by, Rows<T> out) {
  constexpr int Outputs = 8 / Count;
  const int64_t depth = by.depth, whole = depth / lanes<T> * lanes<T>;
  const T* w[Outputs];
  for (int j = 0; j < Outputs; ++j) w[j] = by.weights + (j < by.width ? j : 0) * depth;
  Vec<T> sum[8] = {};
  for (int64_t i = 0; i < whole; i += lanes<T>) {
    Vec<T> x_i[Count];
#pragma GCC unroll 8
    for (int r = 0; r < Count; ++r) x_i[r] = load<T>(x.data + r * x.stride + i);
#pragma GCC unroll 8
    for (int j = 0; j < Outputs; ++j) {
      const Vec<T> w_i = load<T>(w[j] + i);
#pragma GCC unroll 8
      for (int r = 0; r < Count; ++r) sum[r * Outputs + j] += x_i[r] * w_i;
    }
  }
  T total[8];
  horizontal_sums<T, 8>(sum, total);
  for (int64_t i = whole; i < depth; ++i)
    for (int r = 0; r < Count; ++r)
      for (int j = 0; j < Outputs; ++j) total[r * Outputs + j] += x.data[r * x.stride + i] * w[j][i];
  for (int r = 0; r < Count; ++r)
    for (int j = 0; j < Outputs && j < by.width; ++j)
      out.data[r * out.stride + j] = total[r * Outputs + j] + (by.bias ? by.bias[j] : T(0));
}

template <class T>
__attribute__((noinline)) void multiply_unpacked(int64_t rows, Rows<const T> x, const Linear<T>& by, Rows<T> out) {
  // The results from column j on.
  auto multiply_from = [&](auto count, int64_t r, int64_t j) {
    const Linear<T> rest = {by.weights + j * by.depth, by.bias ? by.bias + j : nullptr, by.depth, by.width - j};
    multiply_tile_unpacked<T, count>({x.data + r * x.stride, x.stride}, rest,
                                     {out.data + r * out.stride + j, out.stride});
  };
  constexpr std::integral_constant<int, 1> one_row;
  constexpr std::integral_constant<int, 2> two_rows;
  for (int64_t first = 0; first < rows; first += block_rows) {
    const int64_t end = std::min(first + block_rows, rows);
    if (end - first == 1) {
      for (int64_t j = 0; j < by.width; j += 8) multiply_from(one_row, first, j);
      continue;
    }
    for (int64_t j = 0; j < by.width; j += 4)
      for (int64_t r = first; r < end; r += 2)
        multiply_from(two_rows, std::min(r, end - 2), j);  // the last pair may overlap the one before
  }
}

// ---- out[p, j] = sum_k a[p, k] b[k, j] ------------------------------------------------------------------------------

// A matrix with entries a[p, k] at data[p * row + k * column]: transposed if `row` is 1.
template <class T> struct Strided {
  const T* data;
  int64_t row, column;
};

// A tile of `Count` rows and at most `Vectors` vectors of columns, of which there are `columns`.
template <class T, int Count, int Vectors>
INLINE void multiply_tile_strided(int64_t depth, Strided<T> a, Rows<const T> b, int64_t columns, Rows<T> out,
                                  bool add) {
  Vec<T> sum[Count][Vectors] = {};
  if (add)
    for (int p = 0; p < Count; ++p)
      for (int v = 0; v < Vectors; ++v)
        sum[p][v] = load_first<T>(out.data + p * out.stride + v * lanes<T>, columns - v * lanes<T>);
  for (int64_t k = 0; k < depth; ++k) {
    Vec<T> b_k[Vectors];
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v)
      b_k[v] = load_first<T>(b.data + k * b.stride + v * lanes<T>, columns - v * lanes<T>);
#pragma GCC unroll 8
    for (int p = 0; p < Count; ++p) {
      const T a_pk = a.data[p * a.row + k * a.column];
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) sum[p][v] += a_pk * b_k[v];
    }
  }
  for (int p = 0; p < Count; ++p)
    for (int v = 0; v < Vectors; ++v)
      store_first<T>(out.data + p * out.stride + v * lanes<T>, columns - v * lanes<T>, sum[p][v]);
}

// Sums over k are taken in blocks that stay in the L1 cache.
template <class T>
__attribute__((noinline)) void multiply_strided(int64_t rows, int64_t depth, int64_t columns, Strided<T> a,
                                                Rows<const T> b, Rows<T> out) {
  constexpr int64_t width = 2 * lanes<T>;
  auto multiply_from = [&](auto count, auto vectors, int64_t p, int64_t j, int64_t first) {
    multiply_tile_strided<T, count, vectors>(
        std::min(block_rows, depth - first), {a.data + p * a.row + first * a.column, a.row, a.column},
        {b.data + first * b.stride + j, b.stride}, vectors == 2 ? width : columns - j,
        {out.data + p * out.stride + j, out.stride}, first > 0);
  };
  constexpr std::integral_constant<int, 1> one;
  constexpr std::integral_constant<int, 2> two;
  constexpr std::integral_constant<int, 4> four;
  for (int64_t first = 0; first < depth; first += block_rows)
    for (int64_t p = 0; p < rows; p += rows - p < 4 ? 1 : 4) {
      int64_t j = 0;
      for (; j + width <= columns; j += width)
        rows - p < 4 ? multiply_from(one, two, p, j, first) : multiply_from(four, two, p, j, first);
      for (; j < columns; j += lanes<T>)
        rows - p < 4 ? multiply_from(one, one, p, j, first) : multiply_from(four, one, p, j, first);
    }
}

}  // namespace
