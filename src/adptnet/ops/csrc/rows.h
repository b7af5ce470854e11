// Rows in the memory of a task.
//
// size     the number of entries of a row
// pad      `size` rounded up to whole cache lines; the padding is zero
// stride   the distance from one row to the next, in entries

#pragma once

#include "simd.h"

namespace {

// Rows `stride` entries apart, the first of them at `data`. T may be const.
template <class T> struct Rows {
  T* data;
  int64_t stride;
};

// Return `size` rounded up to whole cache lines, which are whole panels.
template <class T> int64_t padded_size(int64_t size) {
  constexpr int64_t line = 64 / sizeof(T);
  return (size + line - 1) / line * line;
}

// Return the stride of rows that a product reads column by column: one cache line more than a row, because a stride
// that is a power of two would map all rows to a few sets of the L1 cache.
template <class T> int64_t row_stride(int64_t entries) { return entries + 64 / sizeof(T); }

// The first `count` entries at an address, or a whole vector if there are more; the other lanes are zero.
template <class T> INLINE Vec<T> load_first(const T* from, int64_t count) {
  if (count >= lanes<T>) return load<T>(from);
  Vec<T> v = {};
  if (count > 0) std::memcpy(&v, from, count * sizeof(T));
  return v;
}
template <class T> INLINE void store_first(T* to, int64_t count, Vec<T> v) {
  if (count >= lanes<T>) return store<T>(to, v);
  std::memcpy(to, &v, count * sizeof(T));
}

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

}  // namespace
