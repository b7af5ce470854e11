// x_t = a_t x_{t-1} + b_t and its backward, for float and double. The derivation is in the README beside this file.
//
// A task is some columns of one sequence and runs all its steps alone. Columns do not meet, so the numbers are the same
// however they are shared among threads. Time runs upwards here: a scan in reverse has negative strides.

#include "../vectors.h"

// Mirrored field by field in cpu.py. Pointers without a type are to NUMBER: float or double, chosen when it is compiled.
struct Scan {
  int64_t batch, steps, size;                // size: numbers in a row, two for a complex one
  int64_t pairs, tile;                       // complex; steps done for some columns before the next columns
  int64_t threads, tasks_of_row, columns;    // columns: of a task
  int64_t transition_batch, transition_time;  // strides, of which those of what is the same everywhere are 0
  int64_t offset_batch, offset_time;
  int64_t states_batch, states_time;         // of every gradient as well
  int64_t reset_batch, reset_time;
  const void *transition, *offset, *initial;
  const uint8_t* reset;
  void* states;
  const void* state_gradients;
  void *offset_gradients, *initial_gradients;
  void* transition_gradients;                // of every step, or null
  double* transition_sums;                   // (batch, size) over all steps, or null
};

namespace {

constexpr int together = 4;  // vectors whose steps are done side by side, to hide the latency of each

// The first `count` of fewer than all lanes, the rest being zero: halves of a vector, quarters and so on, as they fit.
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

template <class T, int... I> INLINE Vec<T> of_pairs(Vec<T> x, int part, std::integer_sequence<int, I...>) {
  return part ? SHUFFLE(T, x, x, (I | 1)...) : SHUFFLE(T, x, x, (I & ~1)...);
}
template <class T> INLINE Vec<T> reals(Vec<T> x) { return of_pairs<T>(x, 0, std::make_integer_sequence<int, lanes<T>>()); }
template <class T> INLINE Vec<T> imags(Vec<T> x) { return of_pairs<T>(x, 1, std::make_integer_sequence<int, lanes<T>>()); }
template <class T> INLINE Vec<T> signs() {
  Vec<T> v;
  for (int l = 0; l < lanes<T>; ++l) v[l] = l % 2 ? T(1) : T(-1);
  return v;
}

// a x and the conjugate of a times x.
template <class T, bool Pairs> INLINE Vec<T> times(Vec<T> a, Vec<T> x) {
  if constexpr (!Pairs) return a * x;
  return reals<T>(a) * x + signs<T>() * imags<T>(a) * swapped<T>(x);
}
template <class T, bool Pairs> INLINE Vec<T> conjugate_times(Vec<T> a, Vec<T> x) {
  if constexpr (!Pairs) return a * x;
  return reals<T>(a) * x - signs<T>() * imags<T>(a) * swapped<T>(x);
}

// The rows of one sequence, from some column on.
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

// Steps `first` to `last` of `Count` vectors, or of a part of one: `state` is what enters and what leaves.
template <class T, bool Pairs, int Count, bool Part>
INLINE void forward(const Scan& s, const Sequence<T>& q, int64_t first, int64_t last, int64_t column, int64_t part,
                    T* state) {
  Vec<T> x[Count];
  for (int v = 0; v < Count; ++v) x[v] = load<T>(state + v * lanes<T>);
  for (int64_t t = first; t < last; ++t) {
    const T *a = q.transition + t * s.transition_time + column, *b = q.offset + t * s.offset_time + column;
    T* out = q.states + t * s.states_time + column;
    const bool fresh = q.reset && q.reset[t * s.reset_time];
#pragma GCC unroll 8
    for (int v = 0; v < Count; ++v) {
      const int64_t i = v * lanes<T>;
      Vec<T> given = Part ? load_part<T>(b + i, part) : load<T>(b + i);
      Vec<T> moved = times<T, Pairs>(Part ? load_part<T>(a + i, part) : load<T>(a + i), x[v]);
      x[v] = fresh ? given : given + moved;
      Part ? store_part<T>(out + i, x[v], part) : store<T>(out + i, x[v]);
    }
  }
  for (int v = 0; v < Count; ++v) store<T>(state + v * lanes<T>, x[v]);
}

// The same steps backwards. `state` is the derivative at what step `last` - 1 leaves for the next one, and then at what
// enters step `first`.
template <class T, bool Pairs, int Count, bool Part>
INLINE void backward(const Scan& s, const Sequence<T>& q, int64_t first, int64_t last, int64_t column, int64_t part,
                     T* state) {
  Vec<T> carry[Count], sum[Count] = {};
  for (int v = 0; v < Count; ++v) carry[v] = load<T>(state + v * lanes<T>);
  auto get = [&](const T* from) { return Part ? load_part<T>(from, part) : load<T>(from); };
  auto put = [&](T* to, Vec<T> value) { Part ? store_part<T>(to, value, part) : store<T>(to, value); };
  for (int64_t t = last - 1; t >= first; --t) {
    const int64_t row = t * s.states_time + column;
    const T *a = q.transition + t * s.transition_time + column;
    const T* before = t ? q.states + row - s.states_time : q.initial ? q.initial + column : nullptr;
    const bool fresh = q.reset && q.reset[t * s.reset_time];
#pragma GCC unroll 8
    for (int v = 0; v < Count; ++v) {
      const int64_t i = v * lanes<T>;
      Vec<T> g = get(q.state_gradients + row + i) + carry[v];
      put(q.offset_gradients + row + i, g);
      carry[v] = fresh ? Vec<T>{} : conjugate_times<T, Pairs>(get(a + i), g);
      if (!q.sums && !q.transition_gradients) continue;
      Vec<T> change = fresh || !before ? Vec<T>{} : conjugate_times<T, Pairs>(get(before + i), g);
      if (q.transition_gradients)
        put(q.transition_gradients + row + i, change);
      else
        sum[v] += change;
    }
  }
  for (int v = 0; v < Count; ++v) {
    store<T>(state + v * lanes<T>, carry[v]);
    if (q.sums)  // of a few steps, and these in double: the error does not grow with the length
      for (int l = 0; l < (Part ? part : lanes<T>); ++l) q.sums[column + v * lanes<T> + l] += sum[v][l];
  }
}

// All columns of a task, some at a time.
template <class T, bool Pairs, bool Backward>
INLINE void run_steps(const Scan& s, const Sequence<T>& q, int64_t columns, int64_t first, int64_t last, T* state) {
  int64_t i = 0;
  auto some = [&](auto count, auto part) {
    if constexpr (Backward)
      backward<T, Pairs, count, part>(s, q, first, last, i, columns - i, state + i);
    else
      forward<T, Pairs, count, part>(s, q, first, last, i, columns - i, state + i);
    i += count * lanes<T>;
  };
  while (i + together * lanes<T> <= columns) some(std::integral_constant<int, together>(), std::false_type());
  while (i + lanes<T> <= columns) some(std::integral_constant<int, 1>(), std::false_type());
  if (i < columns) some(std::integral_constant<int, 1>(), std::true_type());
}

template <class T, bool Pairs, bool Backward> void run(const Scan& s) {
  const int64_t tiles = (s.steps + s.tile - 1) / s.tile;
  in_threads(s.threads, [&](int64_t thread) {
    std::vector<T> state(s.columns + lanes<T>);
    for (int64_t task = thread; task < s.batch * s.tasks_of_row; task += s.threads) {
      const int64_t begin = task % s.tasks_of_row * s.columns;
      const int64_t columns = begin + s.columns < s.size ? s.columns : s.size - begin;
      const Sequence<T> q(s, task / s.tasks_of_row, begin);
      for (int64_t i = 0; i < columns; ++i) state[i] = !Backward && q.initial ? q.initial[i] : T(0);
      for (int64_t j = 0; j < tiles; ++j) {
        const int64_t first = (Backward ? tiles - 1 - j : j) * s.tile;
        const int64_t last = first + s.tile < s.steps ? first + s.tile : s.steps;
        run_steps<T, Pairs, Backward>(s, q, columns, first, last, state.data());
      }
      if (q.initial_gradients) std::memcpy(q.initial_gradients, state.data(), columns * sizeof(T));
    }
  });
}

}  // namespace

extern "C" {
int64_t linear_scan_layout() { return sizeof(Scan); }
void linear_scan_forward(const Scan* s) { s->pairs ? run<NUMBER, true, false>(*s) : run<NUMBER, false, false>(*s); }
void linear_scan_backward(const Scan* s) { s->pairs ? run<NUMBER, true, true>(*s) : run<NUMBER, false, true>(*s); }
}
