// Shared by all kernels: SIMD vectors (GCC and Clang vector extensions) and threads.
//
// T        the scalar type, float or double; each library is compiled for one of them (-DSCALAR=float or double)
// Vec<T>   a SIMD register of T: 32 bytes with AVX, otherwise 16
// lanes<T> the number of T in a Vec<T>

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

// Call worker(0) to worker(count - 1), each in its own thread; those whose thread cannot be started run in the calling
// thread. Threads live for one call: calls share no state, and a fork loses none.
template <class Worker> void run_in_threads(int64_t count, Worker worker) {
  std::vector<std::thread> others;
  std::vector<int64_t> not_started;
  for (int64_t thread = 1; thread < count; ++thread) try {
      others.emplace_back(worker, thread);
    } catch (const std::system_error&) { not_started.push_back(thread); }
  worker(0);
  for (int64_t thread : not_started) worker(thread);
  for (std::thread& other : others) other.join();
}

}  // namespace
