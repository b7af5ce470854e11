// K and V as A B' + C (x) D each: products by the factors, where those are cheaper than with the matrices they make.

#pragma once

#include "products.h"

namespace {

// Of one head: A and B are (size, rank), C is (outer, outer), D is (inner, inner), outer * inner the size. Either part may be
// missing: its numbers are zero.
struct Shape {
  int64_t size, rank, outer, inner;
};

// Packed for products one way: from the state to K x and V x, or from their derivatives to that of the state.
template <class T> struct Factors {
  T *narrow, *wide;  // from the size to the ranks, and back to the size
  T *inner, *outer;

  void lay_out(const Shape& s, Arena<T>& memory) {
    narrow = memory.take(2 * padded<T>(s.rank) * s.size);
    wide = memory.take(2 * padded<T>(s.size) * s.rank);
    inner = memory.take(2 * padded<T>(s.inner) * s.inner);
    outer = memory.take(2 * s.outer * s.outer);
  }
};

// Where a tile keeps what is between two factors.
template <class T> struct Between {
  T *hidden, *half_way, *turned;

  void lay_out(const Shape& s, int64_t tile, Arena<T>& memory) {
    hidden = memory.take(tile * 2 * padded<T>(s.rank));
    half_way = memory.take(2 * s.outer * padded<T>(s.inner));
    turned = memory.take(s.outer * padded<T>(s.inner));
  }
};

// A, B, C, D as they are given: that of K and that of V, one behind the other.
template <class T> struct Given {
  const T *left, *right, *outer, *inner;
};

template <class T> void pack_factors(const Shape& s, const Given<T>& from, Factors<T>& to) {
  T *wide = to.wide, *inner = to.inner, *narrow = to.narrow;
  for (int64_t half = 0; half < 2; ++half) {
    const T *left = from.left + half * s.size * s.rank, *right = from.right + half * s.size * s.rank;
    const T* d = from.inner + half * s.inner * s.inner;
    narrow = pack<T>(s.size, s.rank, narrow, [&](int64_t i, int64_t j) { return right[i * s.rank + j]; });
    wide = pack<T>(s.rank, s.size, wide, [&](int64_t i, int64_t j) { return left[j * s.rank + i]; });
    inner = pack<T>(s.inner, s.inner, inner, [&](int64_t i, int64_t j) { return d[j * s.inner + i]; });
  }
  for (int64_t i = 0; i < 2 * s.outer * s.outer; ++i) to.outer[i] = from.outer[i];
}

template <class T> void pack_factors_back(const Shape& s, const Given<T>& from, Factors<T>& to) {
  T *inner = to.inner, *narrow = to.narrow;
  for (int64_t half = 0; half < 2; ++half) {
    const T* left = from.left + half * s.size * s.rank;
    const T *c = from.outer + half * s.outer * s.outer, *d = from.inner + half * s.inner * s.inner;
    narrow = pack<T>(s.size, s.rank, narrow, [&](int64_t i, int64_t j) { return left[i * s.rank + j]; });
    inner = pack<T>(s.inner, s.inner, inner, [&](int64_t i, int64_t j) { return d[i * s.inner + j]; });
    for (int64_t i = 0; i < s.outer; ++i)
      for (int64_t j = 0; j < s.outer; ++j) to.outer[(2 * i + half) * s.outer + j] = c[j * s.outer + i];
  }
  pack<T>(2 * s.rank, s.size, to.wide,
          [&](int64_t i, int64_t j) { return from.right[(i / s.rank * s.size + j) * s.rank + i % s.rank]; });
}

// x (as rows of `inner`) times D', or g times D, in panels of `depth` rows: the weights of the product with C.
template <class T>
void times_inner(const Shape& s, const T* x, const T* inner, int64_t depth, T* out) {
  for (int64_t j = 0; j < padded<T>(s.inner); j += panel<T>)
    product<T, false>(s.outer, x, s.inner, {s.inner, 0, 0}, inner + j * s.inner, 1, out + j * depth, panel<T>);
}
template <class T> void add_outer_times(const Shape& s, const T* outer, int64_t depth, const Between<T>& between, T* out) {
  const int64_t inner_pad = padded<T>(s.inner);
  product<T, false>(s.outer, outer, depth, {depth, 0, 0}, between.half_way, inner_pad / panel<T>, between.turned, inner_pad);
  for (int64_t i = 0; i < s.outer; ++i) add<T>(between.turned + i * inner_pad, s.inner, out + i * s.inner);
}

// Rows of x, `apart` from each other, to rows of [K x, V x].
template <class T>
void factored(const Shape& s, const Factors<T>& by, int64_t rows, const T* x, int64_t apart, const Between<T>& between,
              T* out) {
  const int64_t pad = padded<T>(s.size), rank_pad = padded<T>(s.rank), inner_pad = padded<T>(s.inner);
  product<T, false>(rows, x, apart, {s.size, 0, 0}, by.narrow, 2 * rank_pad / panel<T>, between.hidden, 2 * rank_pad);
  for (int64_t half = 0; half < 2; ++half)
    product<T, false>(rows, between.hidden + half * rank_pad, 2 * rank_pad, {s.rank, 0, 0}, by.wide + half * pad * s.rank,
                      pad / panel<T>, out + half * pad, 2 * pad);
  for (int64_t i = 0; s.outer && i < 2 * rows; ++i) {
    const int64_t half = i % 2;
    times_inner<T>(s, x + i / 2 * apart, by.inner + half * inner_pad * s.inner, s.outer, between.half_way);
    add_outer_times<T>(s, by.outer + half * s.outer * s.outer, s.outer, between, out + i * pad);
  }
}

// Rows of the derivatives of [K x, V x] to rows of K' gp + V' gq.
template <class T>
void factored_back(const Shape& s, const Factors<T>& by, int64_t rows, const T* g, int64_t apart, const Between<T>& between,
                   T* out) {
  const int64_t pad = padded<T>(s.size), rank_pad = padded<T>(s.rank), inner_pad = padded<T>(s.inner);
  for (int64_t half = 0; half < 2; ++half)
    product<T, false>(rows, g + half * pad, apart, {s.size, 0, 0}, by.narrow + half * rank_pad * s.size,
                      rank_pad / panel<T>, between.hidden + half * rank_pad, 2 * rank_pad);
  product<T, false>(rows, between.hidden, 2 * rank_pad, {s.rank, rank_pad - s.rank, s.rank}, by.wide, pad / panel<T>, out,
                    pad);
  for (int64_t r = 0; s.outer && r < rows; ++r) {
    for (int64_t half = 0; half < 2; ++half)
      times_inner<T>(s, g + r * apart + half * pad, by.inner + half * inner_pad * s.inner, 2 * s.outer,
                     between.half_way + half * s.outer * panel<T>);
    add_outer_times<T>(s, by.outer, 2 * s.outer, between, out + r * pad);
  }
}

}  // namespace
