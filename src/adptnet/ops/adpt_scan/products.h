// Rows in padded memory, and products of rows with matrices in panels.

#pragma once

#include <algorithm>

#include "../vectors.h"

namespace {

template <class T> constexpr int64_t panel = 2 * lanes<T>;

// Whole cache lines, which are whole panels.
template <class T> int64_t padded(int64_t size) {
  constexpr int64_t line = 64 / sizeof(T);
  return (size + line - 1) / line * line;
}

// From one row to the next, for rows that a product runs down: a line more than a row, since rows at a power of two would share
// a few places in the nearest cache.
template <class T> int64_t spaced(int64_t numbers) { return numbers + 64 / sizeof(T); }

// The entries of a row of the caller, `size` of them, to and from padded memory.
template <class T> INLINE void fetch(const T* from, int64_t size, T* to, int64_t pad) {
  const int64_t whole = size / lanes<T> * lanes<T>;
  for (int64_t i = 0; i < whole; i += lanes<T>) store<T>(to + i, load<T>(from + i));
  for (int64_t i = whole; i < pad; ++i) to[i] = i < size ? from[i] : T(0);
}
template <class T> INLINE void put(const T* from, int64_t size, T* to) {
  const int64_t whole = size / lanes<T> * lanes<T>;
  for (int64_t i = 0; i < whole; i += lanes<T>) store<T>(to + i, load<T>(from + i));
  for (int64_t i = whole; i < size; ++i) to[i] = from[i];
}
template <class T> INLINE void add(const T* from, int64_t size, T* to) {
  const int64_t whole = size / lanes<T> * lanes<T>;
  for (int64_t i = 0; i < whole; i += lanes<T>) store<T>(to + i, load<T>(to + i) + load<T>(from + i));
  for (int64_t i = whole; i < size; ++i) to[i] += from[i];
}

// Memory of a task, handed out piece by piece; the same walk without memory measures it.
template <class T> struct Arena {
  T* base;
  int64_t used;
  T* take(int64_t count) {
    T* out = base ? base + used : nullptr;
    used += (count + 15) / 16 * 16;
    return out;
  }
};

// Memory that is needed soon. A product asks for it between its tiles, some lines at a time: all at once they would wait for
// each other. They come into the second cache, so that the nearest one keeps what the product works on.
class Ahead {
 public:
  void clear() { places = lines = place = row = line = 0; }
  // So many numbers of each of some rows, which are `apart`.
  template <class T> INLINE void add(const T* from, int64_t count, int64_t rows = 1, int64_t apart = 0) {
    const int64_t of_row = (count * int64_t(sizeof(T)) + 63) / 64;
    if (!of_row) return;
    all[places++] = {reinterpret_cast<const char*>(from), of_row, rows, apart * int64_t(sizeof(T))};
    lines += rows * of_row;
  }
  // What was added is asked for by `parts` calls of `next`.
  void divide(int64_t parts) { share = (lines + parts - 1) / parts; }
  void next() { ask(share); }
  void rest() { ask(lines); }

 private:
  void ask(int64_t count) {
    while (count > 0 && place < places) {
      const Place& from = all[place];
      const char* const begin = from.begin + row * from.apart;
      const int64_t end = std::min(line + count, from.lines);
      count -= end - line;
      for (; line < end; ++line) __builtin_prefetch(begin + 64 * line, 0, 2);
      if (line < from.lines) return;
      line = 0;
      if (++row == from.rows) {
        row = 0;
        ++place;
      }
    }
  }

  struct Place {
    const char* begin;
    int64_t lines, rows, apart;  // lines of a row; rows; bytes from one to the next
  };
  Place all[8];  // more than any step adds
  int64_t places = 0, lines = 0;
  int64_t place = 0, row = 0, line = 0;  // the next to ask for
  int64_t share = 0;                     // of one call
};

// Rows of x times a matrix in panels: out[r, :] (+)= sum_i x[r, i] W[i, :]. The reduction runs over two ranges of a row of
// x, so that the padding between p and q is skipped.
struct Ranges {
  int64_t first, gap, second;  // entries, then a gap, then entries
};

// What is used twice GCC would rather load twice, and of loads a product of two rows has too many already.
template <class V> INLINE void keep_loaded(V& vector) {
#if defined(__x86_64__)
  asm("" : "+x"(vector));
#elif defined(__aarch64__)
  asm("" : "+w"(vector));
#endif
}

// Some vectors of the result, from the first of a panel on, or from its second if `Odd`.
template <class T, int Rows, int Vectors, bool Odd, bool Add>
INLINE void multiply(const T* x, int64_t x_stride, const Ranges& over, const T* weights, int64_t depth, T* out,
                     int64_t out_stride) {
  Vec<T> sum[Rows][Vectors] = {};
  const T* w = weights;
  auto range = [&](const T* row, int64_t count) {
    for (int64_t i = 0; i < count; ++i, w += panel<T>) {
      auto column = [&](int j) { return load<T>(w + ((Odd + j) / 2) * depth * panel<T> + ((Odd + j) % 2) * lanes<T>); };
      if constexpr (Rows == 2) {
        const T first = row[i], second = row[x_stride + i];
#pragma GCC unroll 8
        for (int j = 0; j < Vectors; ++j) {
          Vec<T> by = column(j);
          keep_loaded(by);
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
  range(x, over.first);
  if (over.second) range(x + over.first + over.gap, over.second);
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) {
      T* to = out + r * out_stride + (Odd + j) * lanes<T>;
      // Added last: to sum onto what is there would round at its size, which is larger, once for each term.
      store<T>(to, Add ? load<T>(to) + sum[r][j] : sum[r][j]);
    }
}

// That fill the registers with sums.
constexpr int64_t most_panels(int64_t rows) { return rows == 1 ? 4 : rows == 2 ? 3 : rows == 3 ? 2 : 1; }
// How many of those that are left to multiply at once. One alone would wait for its own sums: three and two are better than
// four and one.
constexpr int64_t panels_together(int64_t left, int64_t most) {
  return left == most + 1 ? (left + 1) / 2 : std::min(left, most);
}

template <class T, int Rows, int Panels, bool Add>
INLINE void multiply_panels(int64_t count, const T* x, int64_t x_stride, const Ranges& over, const T* weights, int64_t depth,
                            T* out, int64_t out_stride) {
  if (count == Panels)
    multiply<T, Rows, 2 * Panels, false, Add>(x, x_stride, over, weights, depth, out, out_stride);
  else if constexpr (Panels > 1)
    multiply_panels<T, Rows, Panels - 1, Add>(count, x, x_stride, over, weights, depth, out, out_stride);
}

template <class T, int Rows, bool Add>
void multiply_rows(const T* x, int64_t x_stride, const Ranges& over, const T* weights, int64_t panels, T* out,
                   int64_t out_stride, Ahead* ahead) {
  const int64_t depth = over.first + over.second;
  for (int64_t j = 0, some; j < panels; j += some) {
    some = panels_together(panels - j, most_panels(Rows));
    multiply_panels<T, Rows, most_panels(Rows), Add>(some, x, x_stride, over, weights + j * depth * panel<T>, depth,
                                                     out + j * panel<T>, out_stride);
    if (ahead) ahead->next();
  }
}

// Four rows fill the registers with three vectors, one and a half panels; at the end there may be two, or twice two.
template <class T, bool Add>
void multiply_fours(int64_t fours, const T* x, int64_t x_stride, const Ranges& over, const T* weights, int64_t panels, T* out,
                    int64_t out_stride, Ahead* ahead) {
  const int64_t depth = over.first + over.second;
  if (ahead) ahead->divide(fours * ((2 * panels + 2) / 3));
  for (int64_t left = 2 * panels, v = 0; left > 0;) {
    const int64_t some = left == 2 || left == 4 ? 2 : 3;
    const T* from = weights + v / 2 * depth * panel<T>;
    for (int64_t g = 0; g < fours; ++g) {
      const T* in = x + 4 * g * x_stride;
      T* to = out + 4 * g * out_stride + v / 2 * panel<T>;
      if (some == 2)
        multiply<T, 4, 2, false, Add>(in, x_stride, over, from, depth, to, out_stride);
      else if (v % 2)
        multiply<T, 4, 3, true, Add>(in, x_stride, over, from, depth, to, out_stride);
      else
        multiply<T, 4, 3, false, Add>(in, x_stride, over, from, depth, to, out_stride);
      if (ahead) ahead->next();
    }
    v += some;
    left -= some;
  }
}

// Panel by panel, so that a panel stays in the nearest cache for all groups of rows.
template <class T, bool Add>
__attribute__((noinline)) void product(int64_t rows, const T* x, int64_t x_stride, const Ranges& over, const T* weights,
                                       int64_t panels, T* out, int64_t out_stride, Ahead* ahead = nullptr) {
  int64_t depth = over.first + over.second;
  int64_t groups = (rows + 5) / 6, block = rows > 6 ? 1 : panels;
  if (rows == 1) {
    if (ahead) ahead->divide(std::max(int64_t(1), (panels + most_panels(1) - 1) / most_panels(1)));
    return multiply_rows<T, 1, Add>(x, x_stride, over, weights, panels, out, out_stride, ahead);
  }
  if (rows == 4 || rows == 8)
    return multiply_fours<T, Add>(rows / 4, x, x_stride, over, weights, panels, out, out_stride, ahead);
  if (ahead) ahead->divide(std::max(int64_t(1), groups * ((panels + most_panels(rows) - 1) / most_panels(rows))));
  for (int64_t j = 0; j < panels; j += block) {
    const T* from = weights + j * depth * panel<T>;
    T* to = out + j * panel<T>;
    for (int64_t g = 0, r = 0; g < groups; ++g) {
      int64_t count = (rows - r) / (groups - g);  // groups differ by one row at most
      const T* in = x + r * x_stride;
      T* result = to + r * out_stride;
      switch (count) {
        case 1: multiply_rows<T, 1, Add>(in, x_stride, over, from, block, result, out_stride, ahead); break;
        case 2: multiply_rows<T, 2, Add>(in, x_stride, over, from, block, result, out_stride, ahead); break;
        case 3: multiply_rows<T, 3, Add>(in, x_stride, over, from, block, result, out_stride, ahead); break;
        case 4: multiply_rows<T, 4, Add>(in, x_stride, over, from, block, result, out_stride, ahead); break;
        case 5: multiply_rows<T, 5, Add>(in, x_stride, over, from, block, result, out_stride, ahead); break;
        case 6: multiply_rows<T, 6, Add>(in, x_stride, over, from, block, result, out_stride, ahead); break;
      }
      r += count;
    }
  }
}

// out[i, :] += sum_r left[r, i] right[r, :] over `count` rows: some rows of `out` and one panel at a time, in registers.
template <class T, int Rows>
INLINE void add_outer_tile(int64_t count, const T* left, int64_t left_stride, const T* right, int64_t right_stride, T* out,
                           int64_t out_stride) {
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
      const T *from = left + i, *with = right + j * panel<T>;
      T* to = out + i * out_stride + j * panel<T>;
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

// ---- One row --------------------------------------------------------------------------------------------------------

// Its product reads every weight once, so they lie in the order in which they are read: some panels side by side.

// Returns where the next weights are.
template <class T, int Vectors> INLINE const T* multiply_one(const T* x, int64_t depth, const T* w, T* out) {
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
__attribute__((noinline)) void product_of_one(const T* x, int64_t depth, const T* weights, int64_t panels, T* out) {
  for (int64_t left = panels, some; left > 0; left -= some, out += some * panel<T>) {
    some = panels_together(left, most_panels(1));
    if (some == 4)
      weights = multiply_one<T, 8>(x, depth, weights, out);
    else if (some == 3)
      weights = multiply_one<T, 6>(x, depth, weights, out);
    else if (some == 2)
      weights = multiply_one<T, 4>(x, depth, weights, out);
    else
      weights = multiply_one<T, 2>(x, depth, weights, out);
  }
}

// ---- Panels ---------------------------------------------------------------------------------------------------------

// Of a matrix with `depth` rows, over which a product runs, and `width` columns, padded, for `product` or `product_of_one`;
// returns where they end.
template <class T, class Entry> T* pack(int64_t depth, int64_t width, T* out, Entry entry, bool for_one = false) {
  for (int64_t panels = padded<T>(width) / panel<T>, j = 0, some; j < panels; j += some) {
    some = for_one ? panels_together(panels - j, most_panels(1)) : 1;
    for (int64_t i = 0; i < depth; ++i)
      for (int64_t l = j * panel<T>; l < (j + some) * panel<T>; ++l, ++out) *out = l < width ? entry(i, l) : T(0);
  }
  return out;
}

// Weights of one head, (2 size, size) row by row, as panels for [K; V] x: outputs are padded, the reduction is not.
template <class T> void pack_forward(const T* weight, int64_t size, T* out, bool for_one = false) {
  const int64_t pad = padded<T>(size);
  auto entry = [&](int64_t i, int64_t j) {
    const int64_t of_key = j < pad ? j : j - pad, row = j < pad ? j : of_key + size;
    return of_key < size ? weight[row * size + i] : T(0);
  };
  pack<T>(size, 2 * pad, out, entry, for_one);
}

// The same as panels for [K' V'] g: the reduction runs over the 2 size rows.
template <class T> void pack_backward(const T* weight, int64_t size, T* out) {
  pack<T>(2 * size, size, out, [&](int64_t i, int64_t j) { return weight[i * size + j]; });
}

}  // namespace
