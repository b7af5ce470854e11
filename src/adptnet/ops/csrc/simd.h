// SIMD vectors, by GCC and Clang vector extensions.
//
// T        the scalar type, float or double; each library is compiled for one of them (-DSCALAR=float or double)
// Vec<T>   a SIMD register of T: 32 bytes with AVX, otherwise 16
// lanes<T> the number of T in a Vec<T>
// N        a scalar of one row (N = T), or the same scalar of lanes<T> rows, one row per lane (N = Vec<T>)

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
#define INLINE inline __attribute__((always_inline))
// Marks the functions that Python calls: a Windows library exports nothing else, nor one with hidden symbols.
#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

namespace {

template <class T> struct Types;
template <> struct Types<float> {
  typedef float vector __attribute__((vector_size(VECTOR_BYTES)));
  typedef int32_t index;
};
template <> struct Types<double> {
  typedef double vector __attribute__((vector_size(VECTOR_BYTES)));
  typedef int64_t index;
};
template <class T> using Vec = typename Types<T>::vector;
template <class T> constexpr int lanes = VECTOR_BYTES / sizeof(T);

// Unaligned load and store.
template <class T> INLINE Vec<T> load(const T* from) {
  Vec<T> v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
template <class T> INLINE void store(T* to, Vec<T> v) { std::memcpy(to, &v, sizeof v); }

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(T, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
template <class T> struct IndexVec {
  typedef typename Types<T>::index type __attribute__((vector_size(VECTOR_BYTES)));
};
#define SHUFFLE(T, a, b, ...) __builtin_shuffle(a, b, typename IndexVec<T>::type{__VA_ARGS__})
#endif

template <class T, int... I> INLINE Vec<T> swap_pairs(Vec<T> x, std::integer_sequence<int, I...>) {
  return SHUFFLE(T, x, x, (I ^ 1)...);
}
// Map (a, b) to (b, a) in each pair of lanes. A complex product needs (-b, a): the multiplier `imag` carries the sign.
template <class T> INLINE Vec<T> swap_pairs(Vec<T> x) {
  return swap_pairs<T>(x, std::make_integer_sequence<int, lanes<T>>());
}

template <class T, int... I> INLINE Vec<T> repeat_first(Vec<T> x, std::integer_sequence<int, I...>) {
  return SHUFFLE(T, x, x, (I & ~1)...);
}
template <class T, int... I> INLINE Vec<T> repeat_second(Vec<T> x, std::integer_sequence<int, I...>) {
  return SHUFFLE(T, x, x, (I | 1)...);
}
// Map (a, b) to (a, a), or to (b, b), in each pair of lanes.
template <class T> INLINE Vec<T> repeat_first(Vec<T> x) {
  return repeat_first<T>(x, std::make_integer_sequence<int, lanes<T>>());
}
template <class T> INLINE Vec<T> repeat_second(Vec<T> x) {
  return repeat_second<T>(x, std::make_integer_sequence<int, lanes<T>>());
}

// ---- Across lanes ---------------------------------------------------------------------------------------------------

// Shuffle index that collects one half (lower or upper) of each group of lanes: of `a` in the lower half of the result,
// of `b` in its upper half.
constexpr int half_index(int lane, int group, int all, bool upper) {
  int start = lane / group * group, offset = lane % group, half = group / 2;
  return (offset < half ? start + offset : all + start + offset - half) + (upper ? half : 0);
}
template <class T, int Group, int... I> INLINE Vec<T> add_halves(Vec<T> a, Vec<T> b, std::integer_sequence<int, I...>) {
  return SHUFFLE(T, a, b, half_index(I, Group, lanes<T>, false)...) +
         SHUFFLE(T, a, b, half_index(I, Group, lanes<T>, true)...);
}
template <class T, int Group> INLINE Vec<T> reduce_group(Vec<T>* sums) {
  if constexpr (Group == 1) {
    return sums[0];
  } else {
    Vec<T> next[Group / 2];
#pragma GCC unroll 8
    for (int i = 0; i < Group / 2; ++i)
      next[i] = add_halves<T, Group>(sums[i], sums[i + Group / 2], std::make_integer_sequence<int, lanes<T>>());
    return reduce_group<T, Group / 2>(next);
  }
}
// Sum each of `Count` vectors over its lanes. Count is a multiple of eight, hence of every possible number of lanes.
template <class T, int Count> INLINE void horizontal_sums(Vec<T>* sums, T* out) {
#pragma GCC unroll 16
  for (int i = 0; i < Count; i += lanes<T>) store<T>(out + i, reduce_group<T, lanes<T>>(sums + i));
}

// Transpose blocks of lanes<T> vectors.
template <class T, int Half, int... I> INLINE void exchange(Vec<T>& a, Vec<T>& b, std::integer_sequence<int, I...>) {
  const Vec<T> lower = SHUFFLE(T, a, b, half_index(I, 2 * Half, lanes<T>, false)...);
  b = SHUFFLE(T, a, b, half_index(I, 2 * Half, lanes<T>, true)...);
  a = lower;
}
template <class T, int Half> INLINE void transpose(Vec<T>* rows) {
#pragma GCC unroll 8
  for (int i = 0; i < lanes<T>; ++i)
    if (!(i & Half)) exchange<T, Half>(rows[i], rows[i + Half], std::make_integer_sequence<int, lanes<T>>());
  if constexpr (Half > 1) transpose<T, Half / 2>(rows);
}
// Transpose a matrix of `count` rows: lane l of out[j] becomes rows[l * Columns + j]. Lanes from `count` on repeat
// row 0.
template <class T, int Columns> INLINE void transpose_rows(const T* rows, int, T* out) {
  std::memcpy(out, rows, Columns * sizeof(T));
}
template <class T, int Columns> INLINE void transpose_rows(const T* rows, int count, Vec<T>* out) {
#pragma GCC unroll 16
  for (int j = 0; j < Columns; j += lanes<T>) {
#pragma GCC unroll 8
    for (int l = 0; l < lanes<T>; ++l) out[j + l] = load<T>(rows + (l < count) * l * Columns + j);  // branch-free
    transpose<T, lanes<T> / 2>(out + j);
  }
}

// ---- A scalar of one row, or of one row per lane --------------------------------------------------------------------

// Return whether a comparison holds in all lanes.
INLINE bool all_lanes(bool holds) { return holds; }
INLINE bool all_lanes(int holds) { return holds; }  // several bools joined by &
template <class Mask> INLINE bool all_lanes(Mask mask) {
  int64_t parts[sizeof(Mask) / 8], both = -1;
  std::memcpy(parts, &mask, sizeof mask);
  for (int64_t part : parts) both &= part;
  return both == -1;
}

// The scalar type of N, and the number of rows that N holds a scalar of.
template <class N> struct Scalar {
  typedef N type;
};
template <> struct Scalar<Vec<float>> {
  typedef float type;
};
template <> struct Scalar<Vec<double>> {
  typedef double type;
};

template <class N> constexpr int rows_per = sizeof(N) / sizeof(typename Scalar<N>::type);
template <class N> INLINE auto lane(const N& numbers, int l) {
  if constexpr (rows_per<N> == 1)
    return numbers;
  else
    return numbers[l];
}

INLINE float sqrt_lanes(float s) { return std::sqrt(s); }
INLINE double sqrt_lanes(double s) { return std::sqrt(s); }
template <class N> INLINE N sqrt_lanes(N s) {
  typename Scalar<N>::type each[rows_per<N>];
  std::memcpy(each, &s, sizeof s);
#pragma omp simd
  for (int l = 0; l < rows_per<N>; ++l) each[l] = std::sqrt(each[l]);
  std::memcpy(&s, each, sizeof s);
  return s;
}

}  // namespace
