// x_t = a_t x_{t-1} + b_t and its backward, for float and double. The derivation is in ../README.md.
//
// A task is a range of columns of one sequence and runs all steps on one thread. Columns are independent, so results do
// not depend on the number of threads. A reverse scan has negative strides in time.
//
//   a, b, x   the transition, the offset and the states of x_t = a_t x_{t-1} + b_t
//   g..       the gradient with respect to ..; g is that with respect to x_t, including later steps, which is also gb
//   t, i, v   step, column, and vector of columns
//   Pairs     complex numbers, stored as (real, imaginary) in neighbouring lanes
//   Part      the last vector of a row, of which only `part` columns exist
//   s, q      the arguments of the call, `struct Scan`, and the rows of one sequence

#include "../../csrc/simd.h"
#include "../../csrc/threads.h"

// Arguments of a call; cpu.py reads the layout from here. A `void*` points to SCALAR, which is float or double.
struct Scan {
  int64_t batch, steps, size;                    // size: entries of a row, two for a complex number
  int64_t pairs;                                 // boolean: complex numbers, stored as (real, imaginary) pairs
  int64_t tile;                                  // steps of a column range before the next range
  int64_t threads, tasks_per_sequence, columns;  // columns: of a task
  int64_t transition_batch, transition_time;     // strides in entries; 0 along a dimension that is broadcast
  int64_t offset_batch, offset_time;
  int64_t states_batch, states_time;  // also those of the gradients
  int64_t reset_batch, reset_time;
  const void *transition, *offset, *initial;
  const uint8_t* reset;
  void* states;
  const void* state_gradients;
  void *offset_gradients, *initial_gradients;
  void* transition_gradients;  // one per step, or null
  double* transition_sums;     // (batch, size), summed over the steps, or null
};

namespace {

constexpr int unrolled = 4;  // vectors that are stepped together, to hide the latency of the recurrence

// Load or store the first `count` lanes, fewer than all, by halves, quarters and so on; the other lanes are zero.
template <class T> INLINE Vec<T> load_part(const T* from, int64_t count) {
  T whole[lanes<T>] = {};
  int64_t at = 0;
#pragma GCC unroll 4
  for (int64_t some = lanes<T> / 2; some; some /= 2)
    if (count & some) {
      std::memcpy(whole + at, from + at, some * sizeof(T));
      at += some;
    }
  return load<T>(whole);
}
template <class T> INLINE void store_part(T* to, Vec<T> v, int64_t count) {
  T whole[lanes<T>];
  store<T>(whole, v);
  int64_t at = 0;
#pragma GCC unroll 4
  for (int64_t some = lanes<T> / 2; some; some /= 2)
    if (count & some) {
      std::memcpy(to + at, whole + at, some * sizeof(T));
      at += some;
    }
}

// Duplicate the real (part = 0) or the imaginary part (part = 1) of each pair into both of its lanes.
template <class T, int... I> INLINE Vec<T> duplicate_part(Vec<T> x, int part, std::integer_sequence<int, I...>) {
  return part ? SHUFFLE(T, x, x, (I | 1)...) : SHUFFLE(T, x, x, (I & ~1)...);
}
template <class T> INLINE Vec<T> real_parts(Vec<T> x) {
  return duplicate_part<T>(x, 0, std::make_integer_sequence<int, lanes<T>>());
}
template <class T> INLINE Vec<T> imag_parts(Vec<T> x) {
  return duplicate_part<T>(x, 1, std::make_integer_sequence<int, lanes<T>>());
}
// (-1, 1) in each pair.
template <class T> INLINE Vec<T> pair_signs() {
  Vec<T> v;
  for (int l = 0; l < lanes<T>; ++l) v[l] = l % 2 ? T(1) : T(-1);
  return v;
}

// a x, and the conjugate of a times x.
template <class T, bool Pairs> INLINE Vec<T> multiply(Vec<T> a, Vec<T> x) {
  if constexpr (!Pairs) return a * x;
  return real_parts<T>(a) * x + pair_signs<T>() * imag_parts<T>(a) * swap_pairs<T>(x);
}
template <class T, bool Pairs> INLINE Vec<T> multiply_conjugate(Vec<T> a, Vec<T> x) {
  if constexpr (!Pairs) return a * x;
  return real_parts<T>(a) * x - pair_signs<T>() * imag_parts<T>(a) * swap_pairs<T>(x);
}

// Pointers to one sequence, at a given first column.
template <class T> struct Sequence {
  const T *transition, *offset, *initial;
  const uint8_t* reset;
  T* states;
  const T* state_gradients;
  T *offset_gradients, *initial_gradients, *transition_gradients;
  double* sums;

  Sequence(const Scan& s, int64_t index, int64_t column) {
    auto at = [&](auto* base, int64_t stride) { return base ? base + index * stride + column : nullptr; };
    transition = at(static_cast<const T*>(s.transition), s.transition_batch);
    offset = at(static_cast<const T*>(s.offset), s.offset_batch);
    initial = at(static_cast<const T*>(s.initial), s.size);
    states = at(static_cast<T*>(s.states), s.states_batch);
    state_gradients = at(static_cast<const T*>(s.state_gradients), s.states_batch);
    offset_gradients = at(static_cast<T*>(s.offset_gradients), s.states_batch);
    initial_gradients = at(static_cast<T*>(s.initial_gradients), s.size);
    transition_gradients = at(static_cast<T*>(s.transition_gradients), s.states_batch);
    sums = at(s.transition_sums, s.size);
    reset = s.reset ? s.reset + index * s.reset_batch : nullptr;
  }
};

// Steps `first` to `last` - 1 of `Count` vectors, or of a partial one. `carry` is the state that enters and then the
// one that leaves.
template <class T, bool Pairs, int Count, bool Part>
INLINE void forward(const Scan& s, const Sequence<T>& q, int64_t first, int64_t last, int64_t column, int64_t part,
                    T* carry) {
  Vec<T> x[Count];
  for (int v = 0; v < Count; ++v) x[v] = load<T>(carry + v * lanes<T>);
  for (int64_t t = first; t < last; ++t) {
    const T *a = q.transition + t * s.transition_time + column, *b = q.offset + t * s.offset_time + column;
    T* out = q.states + t * s.states_time + column;
    const bool is_reset = q.reset && q.reset[t * s.reset_time];
#pragma GCC unroll 8
    for (int v = 0; v < Count; ++v) {
      const int64_t i = v * lanes<T>;
      Vec<T> b_t = Part ? load_part<T>(b + i, part) : load<T>(b + i);
      Vec<T> ax = multiply<T, Pairs>(Part ? load_part<T>(a + i, part) : load<T>(a + i), x[v]);
      x[v] = is_reset ? b_t : b_t + ax;
      Part ? store_part<T>(out + i, x[v], part) : store<T>(out + i, x[v]);
    }
  }
  for (int v = 0; v < Count; ++v) store<T>(carry + v * lanes<T>, x[v]);
}

// The same steps backwards. `carry` is the gradient that the steps from `last` on pass to the state of step `last` - 1,
// and then the one that these steps pass to the state before step `first`.
template <class T, bool Pairs, int Count, bool Part>
INLINE void backward(const Scan& s, const Sequence<T>& q, int64_t first, int64_t last, int64_t column, int64_t part,
                     T* carry) {
  Vec<T> gx[Count], sum[Count] = {};
  for (int v = 0; v < Count; ++v) gx[v] = load<T>(carry + v * lanes<T>);
  auto load_columns = [&](const T* from) { return Part ? load_part<T>(from, part) : load<T>(from); };
  auto store_columns = [&](T* to, Vec<T> value) { Part ? store_part<T>(to, value, part) : store<T>(to, value); };
  for (int64_t t = last - 1; t >= first; --t) {
    const int64_t row = t * s.states_time + column;
    const T* a = q.transition + t * s.transition_time + column;
    const T* before = t ? q.states + row - s.states_time : q.initial ? q.initial + column : nullptr;
    const bool is_reset = q.reset && q.reset[t * s.reset_time];
#pragma GCC unroll 8
    for (int v = 0; v < Count; ++v) {
      const int64_t i = v * lanes<T>;
      Vec<T> g = load_columns(q.state_gradients + row + i) + gx[v];
      store_columns(q.offset_gradients + row + i, g);
      gx[v] = is_reset ? Vec<T>{} : multiply_conjugate<T, Pairs>(load_columns(a + i), g);
      if (!q.sums && !q.transition_gradients) continue;
      Vec<T> ga = is_reset || !before ? Vec<T>{} : multiply_conjugate<T, Pairs>(load_columns(before + i), g);
      if (q.transition_gradients)
        store_columns(q.transition_gradients + row + i, ga);
      else
        sum[v] += ga;
    }
  }
  for (int v = 0; v < Count; ++v) {
    store<T>(carry + v * lanes<T>, gx[v]);
    if (q.sums)  // partial sums of one tile, added in double: the error does not grow with the length
      for (int l = 0; l < (Part ? part : lanes<T>); ++l) q.sums[column + v * lanes<T> + l] += sum[v][l];
  }
}

// All columns of a task, one group of vectors after another.
template <class T, bool Pairs, bool Backward>
INLINE void run_steps(const Scan& s, const Sequence<T>& q, int64_t columns, int64_t first, int64_t last, T* carry) {
  int64_t i = 0;
  auto run_columns = [&](auto count, auto part) {
    if constexpr (Backward)
      backward<T, Pairs, count, part>(s, q, first, last, i, columns - i, carry + i);
    else
      forward<T, Pairs, count, part>(s, q, first, last, i, columns - i, carry + i);
    i += count * lanes<T>;
  };
  while (i + unrolled * lanes<T> <= columns) run_columns(std::integral_constant<int, unrolled>(), std::false_type());
  while (i + lanes<T> <= columns) run_columns(std::integral_constant<int, 1>(), std::false_type());
  if (i < columns) run_columns(std::integral_constant<int, 1>(), std::true_type());
}

template <class T, bool Pairs, bool Backward> void run(const Scan& s) {
  const int64_t tiles = (s.steps + s.tile - 1) / s.tile;
  run_in_threads(s.threads, [&](int64_t thread) {
    std::vector<T> carry(s.columns + lanes<T>);
    for (int64_t task = thread; task < s.batch * s.tasks_per_sequence; task += s.threads) {
      const int64_t begin = task % s.tasks_per_sequence * s.columns;
      const int64_t columns = begin + s.columns < s.size ? s.columns : s.size - begin;
      const Sequence<T> q(s, task / s.tasks_per_sequence, begin);
      for (int64_t i = 0; i < columns; ++i) carry[i] = !Backward && q.initial ? q.initial[i] : T(0);
      for (int64_t j = 0; j < tiles; ++j) {
        const int64_t first = (Backward ? tiles - 1 - j : j) * s.tile;
        const int64_t last = first + s.tile < s.steps ? first + s.tile : s.steps;
        run_steps<T, Pairs, Backward>(s, q, columns, first, last, carry.data());
      }
      if (q.initial_gradients) std::memcpy(q.initial_gradients, carry.data(), columns * sizeof(T));
    }
  });
}

}  // namespace

extern "C" {
EXPORT int64_t linear_scan_layout() { return sizeof(Scan); }
EXPORT void linear_scan_forward(const Scan* s) {
  s->pairs ? run<SCALAR, true, false>(*s) : run<SCALAR, false, false>(*s);
}
EXPORT void linear_scan_backward(const Scan* s) {
  s->pairs ? run<SCALAR, true, true>(*s) : run<SCALAR, false, true>(*s);
}
}
