// Rows in padded memory, software prefetch, and products of rows with matrices packed in panels.
//
// pad      a row length rounded up to whole cache lines; the padding is zero
// stride   the distance from one row to the next, in entries
// panel    two SIMD vectors of columns of a matrix, stored row after row: the unit in which weights are packed
// depth    the number of terms in each dot product, i.e. the rows of a packed matrix
// Rows, Vectors   the register tile of a product: Rows rows of x by Vectors vectors of the result

#pragma once

#include <algorithm>

#include "simd.h"

namespace {

template <class T> constexpr int64_t panel_width = 2 * lanes<T>;

// Return `size` rounded up to whole cache lines, which are whole panels.
template <class T> int64_t padded_size(int64_t size) {
  constexpr int64_t line = 64 / sizeof(T);
  return (size + line - 1) / line * line;
}

// Return the stride of rows that a product reads column by column: one cache line more than a row, because a stride
// that is a power of two would map all rows to a few sets of the L1 cache.
template <class T> int64_t row_stride(int64_t entries) { return entries + 64 / sizeof(T); }

// Copy a row of `size` entries from a tensor into padded memory, copy it back, or add it to a row.
template <class T> INLINE void load_row(const T* from, int64_t size, T* to, int64_t pad) {
  const int64_t whole = size / lanes<T> * lanes<T>;
  for (int64_t i = 0; i < whole; i += lanes<T>) store<T>(to + i, load<T>(from + i));
  for (int64_t i = whole; i < pad; ++i) to[i] = i < size ? from[i] : T(0);
}
template <class T> INLINE void store_row(const T* from, int64_t size, T* to) {
  const int64_t whole = size / lanes<T> * lanes<T>;
  for (int64_t i = 0; i < whole; i += lanes<T>) store<T>(to + i, load<T>(from + i));
  for (int64_t i = whole; i < size; ++i) to[i] = from[i];
}
template <class T> INLINE void add_row(const T* from, int64_t size, T* to) {
  const int64_t whole = size / lanes<T> * lanes<T>;
  for (int64_t i = 0; i < whole; i += lanes<T>) store<T>(to + i, load<T>(to + i) + load<T>(from + i));
  for (int64_t i = whole; i < size; ++i) to[i] += from[i];
}

// Bump allocator for the memory of a task. With a null `base` it only counts, which gives the size of the workspace.
template <class T> struct Arena {
  T* base;
  int64_t used;
  T* allocate(int64_t count) {
    T* out = base ? base + used : nullptr;
    used += (count + 15) / 16 * 16;
    return out;
  }
};

// Queue of memory regions that the next steps need. A product issues the prefetches between its register tiles, a few
// cache lines at a time: issued all at once they would wait for each other. They go to L2, so that L1 keeps the
// operands of the product.
class Prefetcher {
 public:
  void clear() { regions = lines = region = row = line = 0; }
  // Queue `count` entries of each of `rows` rows.
  template <class T> INLINE void add(const T* from, int64_t count, int64_t rows = 1, int64_t stride = 0) {
    const int64_t lines_per_row = (count * int64_t(sizeof(T)) + 63) / 64;
    if (!lines_per_row) return;
    queue[regions++] = {reinterpret_cast<const char*>(from), lines_per_row, rows, stride * int64_t(sizeof(T))};
    lines += rows * lines_per_row;
  }
  // Divide the queue into `parts` shares, one for each call of `issue_share`.
  void split(int64_t parts) { share = (lines + parts - 1) / parts; }
  void issue_share() { issue(share); }
  void issue_rest() { issue(lines); }

 private:
  void issue(int64_t count) {
    while (count > 0 && region < regions) {
      const Region& from = queue[region];
      const char* const begin = from.begin + row * from.stride;
      const int64_t end = std::min(line + count, from.lines);
      count -= end - line;
      for (; line < end; ++line) __builtin_prefetch(begin + 64 * line, 0, 2);
      if (line < from.lines) return;
      line = 0;
      if (++row == from.rows) {
        row = 0;
        ++region;
      }
    }
  }

  struct Region {
    const char* begin;
    int64_t lines, rows, stride;  // cache lines per row, number of rows, bytes from one row to the next
  };
  Region queue[8];  // no step adds more
  int64_t regions = 0, lines = 0;
  int64_t region = 0, row = 0, line = 0;  // position of the next prefetch
  int64_t share = 0;                      // lines per call of `issue_share`
};

// ---- Products: out[r, :] (+)= sum_i x[r, i] W[i, :] -----------------------------------------------------------------

// The entries of a row of x that are summed over: two ranges, so that the padding between gp and gq is skipped.
struct Ranges {
  int64_t first, gap, second;
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
template <class T, int Rows, int Vectors, bool Odd, bool Add>
INLINE void multiply_tile(const T* x, int64_t x_stride, const Ranges& ranges, const T* weights, int64_t depth, T* out,
                          int64_t out_stride) {
  Vec<T> sum[Rows][Vectors] = {};
  const T* w = weights;
  auto range = [&](const T* row, int64_t count) {
    for (int64_t i = 0; i < count; ++i, w += panel_width<T>) {
      auto column = [&](int j) {
        return load<T>(w + ((Odd + j) / 2) * depth * panel_width<T> + ((Odd + j) % 2) * lanes<T>);
      };
      if constexpr (Rows == 2) {
        const T first = row[i], second = row[x_stride + i];
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
        for (int r = 0; r < Rows; ++r) {
          T value = row[r * x_stride + i];
#pragma GCC unroll 8
          for (int j = 0; j < Vectors; ++j) sum[r][j] += value * by[j];
        }
      }
    }
  };
  range(x, ranges.first);
  if (ranges.second) range(x + ranges.first + ranges.gap, ranges.second);
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) {
      T* to = out + r * out_stride + (Odd + j) * lanes<T>;
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

template <class T, int Rows, int Panels, bool Add>
INLINE void multiply_panels(int64_t count, const T* x, int64_t x_stride, const Ranges& ranges, const T* weights,
                            int64_t depth, T* out, int64_t out_stride) {
  if (count == Panels)
    multiply_tile<T, Rows, 2 * Panels, false, Add>(x, x_stride, ranges, weights, depth, out, out_stride);
  else if constexpr (Panels > 1)
    multiply_panels<T, Rows, Panels - 1, Add>(count, x, x_stride, ranges, weights, depth, out, out_stride);
}

template <class T, int Rows, bool Add>
void multiply_rows(const T* x, int64_t x_stride, const Ranges& ranges, const T* weights, int64_t panels, T* out,
                   int64_t out_stride, Prefetcher* prefetcher) {
  const int64_t depth = ranges.first + ranges.second;
  for (int64_t j = 0, some; j < panels; j += some) {
    some = panels_per_pass(panels - j, max_panels(Rows));
    multiply_panels<T, Rows, max_panels(Rows), Add>(some, x, x_stride, ranges, weights + j * depth * panel_width<T>,
                                                    depth, out + j * panel_width<T>, out_stride);
    if (prefetcher) prefetcher->issue_share();
  }
}

// Groups of four rows: a register tile has three vectors, one and a half panels. The last tile, or the last two, have
// two vectors.
template <class T, bool Add>
void multiply_four_rows(int64_t fours, const T* x, int64_t x_stride, const Ranges& ranges, const T* weights,
                        int64_t panels, T* out, int64_t out_stride, Prefetcher* prefetcher) {
  const int64_t depth = ranges.first + ranges.second;
  if (prefetcher) prefetcher->split(fours * ((2 * panels + 2) / 3));
  for (int64_t left = 2 * panels, v = 0; left > 0;) {
    const int64_t some = left == 2 || left == 4 ? 2 : 3;
    const T* from = weights + v / 2 * depth * panel_width<T>;
    for (int64_t g = 0; g < fours; ++g) {
      const T* in = x + 4 * g * x_stride;
      T* to = out + 4 * g * out_stride + v / 2 * panel_width<T>;
      if (some == 2)
        multiply_tile<T, 4, 2, false, Add>(in, x_stride, ranges, from, depth, to, out_stride);
      else if (v % 2)
        multiply_tile<T, 4, 3, true, Add>(in, x_stride, ranges, from, depth, to, out_stride);
      else
        multiply_tile<T, 4, 3, false, Add>(in, x_stride, ranges, from, depth, to, out_stride);
      if (prefetcher) prefetcher->issue_share();
    }
    v += some;
    left -= some;
  }
}

// The whole product. With more than six rows it runs panel by panel, so that a panel stays in L1 for all groups of
// rows.
template <class T, bool Add>
__attribute__((noinline)) void matmul(int64_t rows, const T* x, int64_t x_stride, const Ranges& ranges,
                                      const T* weights, int64_t panels, T* out, int64_t out_stride,
                                      Prefetcher* prefetcher = nullptr) {
  int64_t depth = ranges.first + ranges.second;
  int64_t groups = (rows + 5) / 6, block = rows > 6 ? 1 : panels;
  if (rows == 1) {
    if (prefetcher) prefetcher->split(std::max(int64_t(1), (panels + max_panels(1) - 1) / max_panels(1)));
    return multiply_rows<T, 1, Add>(x, x_stride, ranges, weights, panels, out, out_stride, prefetcher);
  }
  if (rows == 4 || rows == 8)
    return multiply_four_rows<T, Add>(rows / 4, x, x_stride, ranges, weights, panels, out, out_stride, prefetcher);
  if (prefetcher)
    prefetcher->split(std::max(int64_t(1), groups * ((panels + max_panels(rows) - 1) / max_panels(rows))));
  for (int64_t j = 0; j < panels; j += block) {
    const T* from = weights + j * depth * panel_width<T>;
    T* to = out + j * panel_width<T>;
    for (int64_t g = 0, r = 0; g < groups; ++g) {
      int64_t count = (rows - r) / (groups - g);  // groups differ by one row at most
      const T* in = x + r * x_stride;
      T* result = to + r * out_stride;
      switch (count) {
        case 1: multiply_rows<T, 1, Add>(in, x_stride, ranges, from, block, result, out_stride, prefetcher); break;
        case 2: multiply_rows<T, 2, Add>(in, x_stride, ranges, from, block, result, out_stride, prefetcher); break;
        case 3: multiply_rows<T, 3, Add>(in, x_stride, ranges, from, block, result, out_stride, prefetcher); break;
        case 4: multiply_rows<T, 4, Add>(in, x_stride, ranges, from, block, result, out_stride, prefetcher); break;
        case 5: multiply_rows<T, 5, Add>(in, x_stride, ranges, from, block, result, out_stride, prefetcher); break;
        case 6: multiply_rows<T, 6, Add>(in, x_stride, ranges, from, block, result, out_stride, prefetcher); break;
      }
      r += count;
    }
  }
}

// out[i, :] += sum_r left[r, i] right[r, :] over `count` rows, accumulated in registers: up to six rows of `out` by one
// panel at a time.
template <class T, int Rows>
INLINE void add_outer_tile(int64_t count, const T* left, int64_t left_stride, const T* right, int64_t right_stride,
                           T* out, int64_t out_stride) {
  Vec<T> sum[Rows][2] = {};
  for (int64_t r = 0; r < count; ++r, left += left_stride, right += right_stride) {
    Vec<T> lower = load<T>(right), upper = load<T>(right + lanes<T>);
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) {
      sum[i][0] += left[i] * lower;
      sum[i][1] += left[i] * upper;
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i)
    for (int half = 0; half < 2; ++half) {
      T* to = out + i * out_stride + half * lanes<T>;
      store<T>(to, load<T>(to) + sum[i][half]);
    }
}

template <class T>
__attribute__((noinline)) void add_outer_products(int64_t count, const T* left, int64_t left_stride, int64_t size,
                                                  const T* right, int64_t right_stride, int64_t panels, T* out,
                                                  int64_t out_stride) {
  int64_t groups = (size + 5) / 6;
  for (int64_t g = 0, i = 0; g < groups; ++g) {
    int64_t rows = (size - i) / (groups - g);  // groups differ by one row at most
    for (int64_t j = 0; j < panels; ++j) {
      const T *from = left + i, *with = right + j * panel_width<T>;
      T* to = out + i * out_stride + j * panel_width<T>;
      switch (rows) {
        case 1: add_outer_tile<T, 1>(count, from, left_stride, with, right_stride, to, out_stride); break;
        case 2: add_outer_tile<T, 2>(count, from, left_stride, with, right_stride, to, out_stride); break;
        case 3: add_outer_tile<T, 3>(count, from, left_stride, with, right_stride, to, out_stride); break;
        case 4: add_outer_tile<T, 4>(count, from, left_stride, with, right_stride, to, out_stride); break;
        case 5: add_outer_tile<T, 5>(count, from, left_stride, with, right_stride, to, out_stride); break;
        case 6: add_outer_tile<T, 6>(count, from, left_stride, with, right_stride, to, out_stride); break;
      }
    }
    i += rows;
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

// Pack a matrix of `depth` rows and `width` columns for `matmul`, or for `matvec`; the columns are padded with zeros.
// Return the end of the panels.
template <class T, class Entry> T* pack(int64_t depth, int64_t width, T* out, Entry entry, bool for_matvec = false) {
  for (int64_t panels = padded_size<T>(width) / panel_width<T>, j = 0, some; j < panels; j += some) {
    some = for_matvec ? panels_per_pass(panels - j, max_panels(1)) : 1;
    for (int64_t i = 0; i < depth; ++i)
      for (int64_t l = j * panel_width<T>; l < (j + some) * panel_width<T>; ++l, ++out)
        *out = l < width ? entry(i, l) : T(0);
  }
  return out;
}

// Pack the weights of one head, (2 size, size) in row-major order, for [K; V] x. The outputs are padded, the reduction
// is not.
template <class T> void pack_forward(const T* weight, int64_t size, T* out, bool for_matvec = false) {
  const int64_t pad = padded_size<T>(size);
  auto entry = [&](int64_t i, int64_t j) {
    const int64_t column = j < pad ? j : j - pad, row = j < pad ? j : column + size;
    return column < size ? weight[row * size + i] : T(0);
  };
  pack<T>(size, 2 * pad, out, entry, for_matvec);
}

// Pack them for [K' V'] [gp; gq]: the reduction runs over the 2 size rows.
template <class T> void pack_backward(const T* weight, int64_t size, T* out) {
  pack<T>(2 * size, size, out, [&](int64_t i, int64_t j) { return weight[i * size + j]; });
}

}  // namespace
