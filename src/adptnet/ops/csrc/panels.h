// Small matrix products: rows times a matrix that is packed in panels.
//
// panel    two SIMD vectors of columns of a matrix, stored row after row: the unit in which matrices are packed
// depth    the number of terms in each dot product, i.e. the rows of a packed matrix
// Count, Vectors   the register tile of a product: Count rows of x by Vectors vectors of the result
// x, w, out        rows, packed matrix and result of out[r, :] (+)= sum_i x[r, i] w[i, :]

#pragma once

#include <algorithm>

#include "prefetch.h"
#include "rows.h"

namespace {

template <class T> constexpr int64_t panel_width = 2 * lanes<T>;

// A packed matrix of `count` panels.
template <class T> struct Panels {
  const T* data;
  int64_t count;
};

// ---- Products with several rows -------------------------------------------------------------------------------------

// The entries of a row of x that are summed over: two ranges, so that the padding between gp and gq is skipped.
struct Ranges {
  int64_t first, gap, second;

  int64_t depth() const { return first + second; }
};

// Keep `vector` in a register. GCC otherwise folds the load into both FMAs, and the two-row product is already
// load-bound.
template <class V> INLINE void keep_in_register(V& vector) {
#if defined(__x86_64__)
  asm("" : "+x"(vector));
#elif defined(__aarch64__)
  asm("" : "+w"(vector));
#endif
}

// One register tile of the result, starting at the first vector of a panel, or at its second if `Odd`.
template <class T, int Count, int Vectors, bool Odd, bool Add>
INLINE void multiply_tile(Rows<const T> x, const Ranges& ranges, const T* weights, Rows<T> out) {
  const int64_t depth = ranges.depth();
  Vec<T> sum[Count][Vectors] = {};
  const T* w = weights;
  auto add_range = [&](const T* row, int64_t count) {
    for (int64_t i = 0; i < count; ++i, w += panel_width<T>) {
      auto column = [&](int j) {
        return load<T>(w + ((Odd + j) / 2) * depth * panel_width<T> + ((Odd + j) % 2) * lanes<T>);
      };
      if constexpr (Count == 2) {
        const T first = row[i], second = row[x.stride + i];
#pragma GCC unroll 8
        for (int j = 0; j < Vectors; ++j) {
          Vec<T> by = column(j);
          keep_in_register(by);
          sum[0][j] += first * by;
          sum[1][j] += second * by;
        }
      } else {
        Vec<T> by[Vectors];
#pragma GCC unroll 8
        for (int j = 0; j < Vectors; ++j) by[j] = column(j);
#pragma GCC unroll 8
        for (int r = 0; r < Count; ++r) {
          T value = row[r * x.stride + i];
#pragma GCC unroll 8
          for (int j = 0; j < Vectors; ++j) sum[r][j] += value * by[j];
        }
      }
    }
  };
  add_range(x.data, ranges.first);
  if (ranges.second) add_range(x.data + ranges.first + ranges.gap, ranges.second);
#pragma GCC unroll 8
  for (int r = 0; r < Count; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) {
      T* to = out.data + r * out.stride + (Odd + j) * lanes<T>;
      // Add last: accumulating onto the old value, which is larger, would round at its magnitude once per term.
      store<T>(to, Add ? load<T>(to) + sum[r][j] : sum[r][j]);
    }
}

// Panels per register tile: as many as fill the registers with accumulators.
constexpr int64_t max_panels(int64_t rows) { return rows == 1 ? 4 : rows == 2 ? 3 : rows == 3 ? 2 : 1; }
// Panels of the next register tile, of those that are left. A single panel would be bound by FMA latency, so five are
// split as three and two, not as four and one.
constexpr int64_t panels_per_pass(int64_t left, int64_t most) {
  return left == most + 1 ? (left + 1) / 2 : std::min(left, most);
}
// The number of register tiles of so many panels.
constexpr int64_t pass_count(int64_t panels, int64_t rows) {
  return (panels + max_panels(rows) - 1) / max_panels(rows);
}

// A register tile of `count` panels, Most or fewer.
template <class T, int Count, int Most, bool Add>
INLINE void multiply_panels(int64_t count, Rows<const T> x, const Ranges& ranges, const T* weights, Rows<T> out) {
  if (count == Most)
    multiply_tile<T, Count, 2 * Most, false, Add>(x, ranges, weights, out);
  else if constexpr (Most > 1)
    multiply_panels<T, Count, Most - 1, Add>(count, x, ranges, weights, out);
}

template <class T, int Count, bool Add>
void multiply_rows(Rows<const T> x, const Ranges& ranges, Panels<T> weights, Rows<T> out, Prefetcher* prefetcher) {
  for (int64_t j = 0, some; j < weights.count; j += some) {
    some = panels_per_pass(weights.count - j, max_panels(Count));
    multiply_panels<T, Count, max_panels(Count), Add>(some, x, ranges,
                                                      weights.data + j * ranges.depth() * panel_width<T>,
                                                      {out.data + j * panel_width<T>, out.stride});
    if (prefetcher) prefetcher->issue_share();
  }
}

// Groups of four rows: a register tile has three vectors, one and a half panels. The last tile, or the last two, have
// two vectors.
template <class T, bool Add>
void multiply_four_rows(int64_t fours, Rows<const T> x, const Ranges& ranges, Panels<T> weights, Rows<T> out,
                        Prefetcher* prefetcher) {
  if (prefetcher) prefetcher->split(fours * ((2 * weights.count + 2) / 3));
  for (int64_t left = 2 * weights.count, v = 0; left > 0;) {
    const int64_t some = left == 2 || left == 4 ? 2 : 3;
    const T* from = weights.data + v / 2 * ranges.depth() * panel_width<T>;
    for (int64_t g = 0; g < fours; ++g) {
      const Rows<const T> in = {x.data + 4 * g * x.stride, x.stride};
      const Rows<T> to = {out.data + 4 * g * out.stride + v / 2 * panel_width<T>, out.stride};
      if (some == 2)
        multiply_tile<T, 4, 2, false, Add>(in, ranges, from, to);
      else if (v % 2)
        multiply_tile<T, 4, 3, true, Add>(in, ranges, from, to);
      else
        multiply_tile<T, 4, 3, false, Add>(in, ranges, from, to);
      if (prefetcher) prefetcher->issue_share();
    }
    v += some;
    left -= some;
  }
}

// out[r, :] (+)= x[r, :] w for `rows` rows. With more than six rows it runs panel by panel, so that a panel stays in L1
// for all groups of rows.
template <class T, bool Add>
__attribute__((noinline)) void matmul(int64_t rows, Rows<const T> x, const Ranges& ranges, Panels<T> weights,
                                      Rows<T> out, Prefetcher* prefetcher = nullptr) {
  const int64_t groups = (rows + 5) / 6, block = rows > 6 ? 1 : weights.count;
  if (rows == 1) {
    if (prefetcher) prefetcher->split(pass_count(weights.count, 1));
    return multiply_rows<T, 1, Add>(x, ranges, weights, out, prefetcher);
  }
  if (rows == 4 || rows == 8) return multiply_four_rows<T, Add>(rows / 4, x, ranges, weights, out, prefetcher);
  if (prefetcher) prefetcher->split(groups * pass_count(weights.count, rows));
  for (int64_t j = 0; j < weights.count; j += block) {
    const Panels<T> from = {weights.data + j * ranges.depth() * panel_width<T>, block};
    for (int64_t g = 0, r = 0; g < groups; ++g) {
      const int64_t count = (rows - r) / (groups - g);  // groups differ by one row at most
      const Rows<const T> in = {x.data + r * x.stride, x.stride};
      const Rows<T> to = {out.data + j * panel_width<T> + r * out.stride, out.stride};
      switch (count) {
        case 1: multiply_rows<T, 1, Add>(in, ranges, from, to, prefetcher); break;
        case 2: multiply_rows<T, 2, Add>(in, ranges, from, to, prefetcher); break;
        case 3: multiply_rows<T, 3, Add>(in, ranges, from, to, prefetcher); break;
        case 4: multiply_rows<T, 4, Add>(in, ranges, from, to, prefetcher); break;
        case 5: multiply_rows<T, 5, Add>(in, ranges, from, to, prefetcher); break;
        case 6: multiply_rows<T, 6, Add>(in, ranges, from, to, prefetcher); break;
      }
      r += count;
    }
  }
}

// ---- Sums of outer products: out[i, :] += sum_r left[r, i] right[r, :] ----------------------------------------------

// `Count` rows of `out` by one panel, accumulated in registers.
template <class T, int Count>
INLINE void add_outer_tile(int64_t rows, Rows<const T> left, Rows<const T> right, Rows<T> out) {
  Vec<T> sum[Count][2] = {};
  for (int64_t r = 0; r < rows; ++r, left.data += left.stride, right.data += right.stride) {
    Vec<T> lower = load<T>(right.data), upper = load<T>(right.data + lanes<T>);
#pragma GCC unroll 8
    for (int i = 0; i < Count; ++i) {
      sum[i][0] += left.data[i] * lower;
      sum[i][1] += left.data[i] * upper;
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < Count; ++i)
    for (int half = 0; half < 2; ++half) {
      T* to = out.data + i * out.stride + half * lanes<T>;
      store<T>(to, load<T>(to) + sum[i][half]);
    }
}

// Over `rows` rows, for `size` rows and `panels` panels of `out`.
template <class T>
__attribute__((noinline)) void add_outer_products(int64_t rows, Rows<const T> left, int64_t size, Rows<const T> right,
                                                  int64_t panels, Rows<T> out) {
  int64_t groups = (size + 5) / 6;
  for (int64_t g = 0, i = 0; g < groups; ++g) {
    int64_t count = (size - i) / (groups - g);  // groups differ by one row at most
    for (int64_t j = 0; j < panels; ++j) {
      const Rows<const T> from = {left.data + i, left.stride}, with = {right.data + j * panel_width<T>, right.stride};
      const Rows<T> to = {out.data + i * out.stride + j * panel_width<T>, out.stride};
      switch (count) {
        case 1: add_outer_tile<T, 1>(rows, from, with, to); break;
        case 2: add_outer_tile<T, 2>(rows, from, with, to); break;
        case 3: add_outer_tile<T, 3>(rows, from, with, to); break;
        case 4: add_outer_tile<T, 4>(rows, from, with, to); break;
        case 5: add_outer_tile<T, 5>(rows, from, with, to); break;
        case 6: add_outer_tile<T, 6>(rows, from, with, to); break;
      }
    }
    i += count;
  }
}

// ---- Products with one row ------------------------------------------------------------------------------------------

// A product with one row reads every weight once. Its weights are packed in the order in which they are read: the
// panels of one register tile are interleaved.

// One register tile; return the address of the next weights.
template <class T, int Vectors> INLINE const T* matvec_panels(const T* x, int64_t depth, const T* w, T* out) {
  Vec<T> sum[Vectors] = {};
  for (int64_t i = 0; i < depth; ++i, w += Vectors * lanes<T>) {
    const T value = x[i];
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) sum[j] += value * load<T>(w + j * lanes<T>);
  }
#pragma GCC unroll 8
  for (int j = 0; j < Vectors; ++j) store<T>(out + j * lanes<T>, sum[j]);
  return w;
}

template <class T>
__attribute__((noinline)) void matvec(const T* x, int64_t depth, const T* weights, int64_t panels, T* out) {
  for (int64_t left = panels, some; left > 0; left -= some, out += some * panel_width<T>) {
    some = panels_per_pass(left, max_panels(1));
    if (some == 4)
      weights = matvec_panels<T, 8>(x, depth, weights, out);
    else if (some == 3)
      weights = matvec_panels<T, 6>(x, depth, weights, out);
    else if (some == 2)
      weights = matvec_panels<T, 4>(x, depth, weights, out);
    else
      weights = matvec_panels<T, 2>(x, depth, weights, out);
  }
}

// ---- Packing --------------------------------------------------------------------------------------------------------

// Pack a matrix of `depth` rows and `width` columns for `matmul`; the columns are padded with zeros. Return the end of
// the panels.
template <class T, class Entry> T* pack(int64_t depth, int64_t width, T* out, Entry entry) {
  for (int64_t first = 0; first < padded_size<T>(width); first += panel_width<T>)
    for (int64_t i = 0; i < depth; ++i)
      for (int64_t l = first; l < first + panel_width<T>; ++l, ++out) *out = l < width ? entry(i, l) : T(0);
  return out;
}

// Pack the weights of one head, (2 size, depth) in row-major order, for [K; V] x by `matmul` or by `matvec`. The outputs
// are padded, the reduction is not.
template <class T>
void pack_forward(const T* weight, int64_t size, int64_t depth, T* out, bool for_matvec = false) {
  const int64_t pad = padded_size<T>(size), panels = 2 * pad / panel_width<T>, whole = depth / lanes<T> * lanes<T>;
  for (int64_t j = 0, some; j < panels; j += some) {
    some = for_matvec ? panels_per_pass(panels - j, max_panels(1)) : 1;
    const int64_t stride = some * panel_width<T>;
    for (int64_t first = 0; first < stride; first += lanes<T>) {
      const int64_t output = j * panel_width<T> + first, row = output % pad;
      const int64_t count = std::max<int64_t>(0, std::min<int64_t>(lanes<T>, size - row));
      const T* const from = weight + (output / pad * size + row) * depth;
      T* const to = out + first;
      for (int64_t i = 0; i < whole; i += lanes<T>) {
        Vec<T> block[lanes<T>];
        for (int l = 0; l < lanes<T>; ++l) block[l] = l < count ? load<T>(from + l * depth + i) : Vec<T>{};
        transpose<T, lanes<T> / 2>(block);
        for (int l = 0; l < lanes<T>; ++l) store<T>(to + (i + l) * stride, block[l]);
      }
      for (int64_t i = whole; i < depth; ++i)
        for (int64_t l = 0; l < lanes<T>; ++l) to[i * stride + l] = l < count ? from[l * depth + i] : T(0);
    }
    out += depth * stride;
  }
}

// Pack them for [K' V'] [gp; gq]: the reduction runs over the 2 size rows.
template <class T> void pack_backward(const T* weight, int64_t size, int64_t depth, T* out) {
  for (int64_t first = 0; first < padded_size<T>(depth); first += panel_width<T>)
    for (int64_t i = 0; i < 2 * size; ++i)
      for (int64_t l = first; l < first + panel_width<T>; l += lanes<T>, out += lanes<T>)
        store<T>(out, load_first<T>(weight + i * depth + l, depth - l));
}

}  // namespace
