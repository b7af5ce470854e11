// What the kernels share: vectors of the compiler (GCC and Clang), and threads.

#pragma once

#include <cstdint>
#include <cstring>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#if defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
#define INLINE inline __attribute__((always_inline))

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

template <class T> INLINE Vec<T> load(const T* from) {
  Vec<T> v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
template <class T> INLINE void store(T* to, Vec<T> v) { std::memcpy(to, &v, sizeof v); }

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(T, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
template <class T> struct IndexVec { typedef typename Types<T>::index type __attribute__((vector_size(VECTOR_BYTES))); };
#define SHUFFLE(T, a, b, ...) __builtin_shuffle(a, b, typename IndexVec<T>::type{__VA_ARGS__})
#endif

template <class T, int... I> INLINE Vec<T> swapped(Vec<T> x, std::integer_sequence<int, I...>) {
  return SHUFFLE(T, x, x, (I ^ 1)...);
}
// (p, q) becomes (q, p) in each pair; the sign of the quarter turn is in `imag`.
template <class T> INLINE Vec<T> swapped(Vec<T> x) { return swapped<T>(x, std::make_integer_sequence<int, lanes<T>>()); }

// worker(0) to worker(count - 1), each in a thread. Threads live for one call: nothing is shared between calls, and nothing
// is lost in a fork.
template <class Worker> void in_threads(int64_t count, Worker worker) {
  std::vector<std::thread> others;
  std::vector<int64_t> left;
  for (int64_t thread = 1; thread < count; ++thread) try {
      others.emplace_back(worker, thread);
    } catch (const std::system_error&) {
      left.push_back(thread);
    }
  worker(0);
  for (int64_t thread : left) worker(thread);
  for (std::thread& other : others) other.join();
}

}  // namespace
