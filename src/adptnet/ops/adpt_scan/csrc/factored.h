// Products with K and V in factored form, each A B' + C (x) D, where that is cheaper than with the dense matrices.
//
// A, B    `left` and `right`, (size, rank): the low-rank part
// C, D    `outer`, (outer, outer), and `inner`, (inner, inner): the Kronecker part, outer * inner = size
// p, q    the projections K x and V x; gp and gq are the gradients with respect to them
// g       rows of [gp, gq]
// half    0 for K, 1 for V
// pad     a size padded to whole cache lines

#pragma once

#include "../../csrc/panels.h"

namespace {

// Sizes of one head. A part that is missing has size zero: `rank`, or `outer` and `inner`.
struct FactorShape {
  int64_t size, rank, outer, inner;
};

// Packed factors for one direction: forward, x to [K x, V x], or backward, [gp, gq] to K' gp + V' gq.
template <class T> struct Factors {
  T *down, *up;  // low-rank part: from `size` to `rank` entries, and back
  T *inner, *outer;

  void allocate(const FactorShape& s, Arena<T>& memory) {
    down = memory.allocate(2 * padded_size<T>(s.rank) * s.size);
    up = memory.allocate(2 * padded_size<T>(s.size) * s.rank);
    inner = memory.allocate(2 * padded_size<T>(s.inner) * s.inner);
    outer = memory.allocate(2 * s.outer * s.outer);
  }
};

// Intermediate results of a tile, between the first and the second factor.
template <class T> struct FactorScratch {
  T *reduced, *after_inner, *after_outer;

  void allocate(const FactorShape& s, int64_t tile, Arena<T>& memory) {
    reduced = memory.allocate(tile * 2 * padded_size<T>(s.rank));
    after_inner = memory.allocate(2 * s.outer * padded_size<T>(s.inner));
    after_outer = memory.allocate(s.outer * padded_size<T>(s.inner));
  }
};

// A, B, C and D of one head as passed by the caller: that of K, followed by that of V.
template <class T> struct FactorInputs {
  const T *left, *right, *outer, *inner;
};

template <class T> void pack_factors(const FactorShape& s, const FactorInputs<T>& from, Factors<T>& to) {
  T *up = to.up, *inner = to.inner, *down = to.down;
  for (int64_t half = 0; half < 2; ++half) {
    const T *left = from.left + half * s.size * s.rank, *right = from.right + half * s.size * s.rank;
    const T* d = from.inner + half * s.inner * s.inner;
    down = pack<T>(s.size, s.rank, down, [&](int64_t i, int64_t j) { return right[i * s.rank + j]; });
    up = pack<T>(s.rank, s.size, up, [&](int64_t i, int64_t j) { return left[j * s.rank + i]; });
    inner = pack<T>(s.inner, s.inner, inner, [&](int64_t i, int64_t j) { return d[j * s.inner + i]; });
  }
  for (int64_t i = 0; i < 2 * s.outer * s.outer; ++i) to.outer[i] = from.outer[i];
}

template <class T> void pack_factors_backward(const FactorShape& s, const FactorInputs<T>& from, Factors<T>& to) {
  T *inner = to.inner, *down = to.down;
  for (int64_t half = 0; half < 2; ++half) {
    const T* left = from.left + half * s.size * s.rank;
    const T *c = from.outer + half * s.outer * s.outer, *d = from.inner + half * s.inner * s.inner;
    down = pack<T>(s.size, s.rank, down, [&](int64_t i, int64_t j) { return left[i * s.rank + j]; });
    inner = pack<T>(s.inner, s.inner, inner, [&](int64_t i, int64_t j) { return d[i * s.inner + j]; });
    for (int64_t i = 0; i < s.outer; ++i)
      for (int64_t j = 0; j < s.outer; ++j) to.outer[(2 * i + half) * s.outer + j] = c[j * s.outer + i];
  }
  pack<T>(2 * s.rank, s.size, to.up,
          [&](int64_t i, int64_t j) { return from.right[(i / s.rank * s.size + j) * s.rank + i % s.rank]; });
}

// The product with D: x, read as (outer, inner), times D', or g times D. The result is written in panels of `depth`
// rows, which are the packed weights of the product with C.
template <class T>
void multiply_inner(const FactorShape& s, const T* x, const T* inner, int64_t depth, T* out) {
  for (int64_t j = 0; j < padded_size<T>(s.inner); j += panel_width<T>)
    matmul<T, false>(s.outer, {x, s.inner}, {s.inner, 0, 0}, {inner + j * s.inner, 1},
                     {out + j * depth, panel_width<T>});
}
// The product with C, added to `out`.
template <class T>
void add_outer_product(const FactorShape& s, const T* outer, int64_t depth, const FactorScratch<T>& scratch, T* out) {
  const int64_t inner_pad = padded_size<T>(s.inner);
  matmul<T, false>(s.outer, {outer, depth}, {depth, 0, 0}, {scratch.after_inner, inner_pad / panel_width<T>},
                   {scratch.after_outer, inner_pad});
  for (int64_t i = 0; i < s.outer; ++i) add_row<T>(scratch.after_outer + i * inner_pad, s.inner, out + i * s.inner);
}

// Rows of x to rows of [K x, V x].
template <class T>
void factored_forward(const FactorShape& s, const Factors<T>& by, int64_t rows, Rows<const T> x,
                      const FactorScratch<T>& scratch, T* out) {
  const int64_t pad = padded_size<T>(s.size), rank_pad = padded_size<T>(s.rank), inner_pad = padded_size<T>(s.inner);
  matmul<T, false>(rows, x, {s.size, 0, 0}, {by.down, 2 * rank_pad / panel_width<T>}, {scratch.reduced, 2 * rank_pad});
  for (int64_t half = 0; half < 2; ++half)
    matmul<T, false>(rows, {scratch.reduced + half * rank_pad, 2 * rank_pad}, {s.rank, 0, 0},
                     {by.up + half * pad * s.rank, pad / panel_width<T>}, {out + half * pad, 2 * pad});
  for (int64_t i = 0; s.outer && i < 2 * rows; ++i) {
    const int64_t half = i % 2;
    multiply_inner<T>(s, x.data + i / 2 * x.stride, by.inner + half * inner_pad * s.inner, s.outer,
                      scratch.after_inner);
    add_outer_product<T>(s, by.outer + half * s.outer * s.outer, s.outer, scratch, out + i * pad);
  }
}

// Rows of [gp, gq] to rows of K' gp + V' gq.
template <class T>
void factored_backward(const FactorShape& s, const Factors<T>& by, int64_t rows, Rows<const T> g,
                       const FactorScratch<T>& scratch, T* out) {
  const int64_t pad = padded_size<T>(s.size), rank_pad = padded_size<T>(s.rank), inner_pad = padded_size<T>(s.inner);
  for (int64_t half = 0; half < 2; ++half)
    matmul<T, false>(rows, {g.data + half * pad, g.stride}, {s.size, 0, 0},
                     {by.down + half * rank_pad * s.size, rank_pad / panel_width<T>},
                     {scratch.reduced + half * rank_pad, 2 * rank_pad});
  matmul<T, false>(rows, {scratch.reduced, 2 * rank_pad}, {s.rank, rank_pad - s.rank, s.rank},
                   {by.up, pad / panel_width<T>}, {out, pad});
  for (int64_t r = 0; s.outer && r < rows; ++r) {
    for (int64_t half = 0; half < 2; ++half)
      multiply_inner<T>(s, g.data + r * g.stride + half * pad, by.inner + half * inner_pad * s.inner, 2 * s.outer,
                        scratch.after_inner + half * s.outer * panel_width<T>);
    add_outer_product<T>(s, by.outer, 2 * s.outer, scratch, out + r * pad);
  }
}

}  // namespace
