// The step of an ADPT recurrence at many known states, for float and double: Jacobians, and a pass of Newton's method
// along time. The derivation is in the README beside this file.
//
// States come in tiles of successive steps, so that K x and V x are one matrix product and the rest is done in the cache.
// Vectors of a state are padded with zeros to `pad`, as in ../adpt_scan. Eigenvalues are real, key and value come from the
// state itself.

#include "../adpt_scan/products.h"
#include "../adpt_scan/rotation.h"

// Mirrored field by field in cpu.py. Pointers without a type are to NUMBER: float or double, chosen when it is compiled.
struct Step {
  int64_t batch, steps, size, form, threads;
  int64_t tile;                              // steps done together
  int64_t packed;                            // whether the workspace holds K and V from a call before
  int64_t diagonal;                          // the transition: 0 for the eigenvalues, 1 for the diagonal of M
  int64_t sweep;                             // whether the correction of a tile is carried into the next one's guess
  int64_t states_batch, drive_batch;         // strides from one sequence to the next
  double relative, absolute;                 // of the tolerance, see ../tolerance.py
  double decay;                              // of the recent scale, per step
  const void *real, *weight, *bias, *beta;
  const void *drive, *initial, *fresh;
  const uint8_t* reset;                      // (batch, steps), may be null
  const void* recent;                        // (batch, size), recent scale before the first step, may be null
  void *states, *next;                       // states: changed only in a sweep; next: (batch, steps, size)
  void *residual, *excess, *scale, *move;    // (batch, steps); excess and move in units of the tolerance
  void* jacobians;                           // (batch, steps, size, size)
  void* workspace;
};

namespace {

constexpr int numbers = 4;  // y1, y2, m1, m2 of a turn

template <class T> struct Task {
  T *real, *bias;
  T *x, *projections, *scratch;              // of a tile
  T *now, *plus, *delta;                     // of a pass: states of a tile and one before, the new state, corrections
  T *recent, *off, *moved;                   // of a pass: the recent scale; residual and move of a step
  T *cotangents, *rows;                      // of Jacobians
  Row<T>* row;

  void lay_out(const Step& s, Arena<T>& memory) {
    const int64_t pad = padded<T>(s.size);
    real = memory.take(pad);
    bias = memory.take(2 * pad);
    x = memory.take(s.tile * pad);
    projections = memory.take(s.tile * 2 * pad);
    scratch = memory.take(s.tile * 2 * pad);
    now = memory.take((s.tile + 1) * pad);
    plus = memory.take(pad);
    delta = memory.take(pad);
    recent = memory.take(pad);
    off = memory.take(pad);
    moved = memory.take(pad);
    cotangents = memory.take(s.jacobians ? s.tile * numbers * 2 * pad : 0);
    rows = memory.take(s.jacobians ? s.tile * numbers * pad : 0);
    row = reinterpret_cast<Row<T>*>(memory.take(s.tile * sizeof(Row<T>) / sizeof(T) + 16));
  }
};

template <class T> void load_constants(const Step& s, Task<T>& task) {
  const int64_t m = s.size, pad = padded<T>(m);
  fetch<T>(static_cast<const T*>(s.real), m, task.real, pad);
  std::memset(task.bias, 0, 2 * pad * sizeof(T));
  if (s.bias) {
    fetch<T>(static_cast<const T*>(s.bias), m, task.bias, pad);
    fetch<T>(static_cast<const T*>(s.bias) + m, m, task.bias + pad, pad);
  }
}

// Directions and numbers of the rotation at `count` states in task.x.
template <class T> void look(const Step& s, Task<T>& task, const T* weights, int64_t count) {
  const int64_t m = s.size, pad = padded<T>(m);
  const Eigen<T> eigen = {task.real, nullptr};
  product<T, false>(count, task.x, pad, {m, 0, 0}, weights, 2 * pad / panel<T>, task.projections, 2 * pad);
  for (int64_t r = 0; r < count; ++r) {
    T* p = task.projections + r * 2 * pad;
    if (s.bias)
      for (int64_t i = 0; i < 2 * pad; i += lanes<T>) store<T>(p + i, load<T>(p + i) + load<T>(task.bias + i));
  }
  for (int64_t first = 0; first < count; first += lanes<T>) {
    const int some = std::min<int64_t>(lanes<T>, count - first);
    auto place = [&](int l) -> Place<T> {
      return {task.projections + (first + l) * 2 * pad, task.x + (first + l) * pad, nullptr};
    };
    Group<T, Vec<T>> group;
    T products[lanes<T> * dots];
    directions<T, Vec<T>, false>(eigen, place, some, pad, products, false, task.scratch + first * 2 * pad, group);
    for (int l = 0; l < some; ++l) task.row[first + l] = row_of(group, l);
  }
}

// k and w of a row.
template <class T> INLINE void plane_of(const Row<T>& row, int64_t i, Vec<T>& k, Vec<T>& w) {
  k = row.on_p * load<T>(row.p + i);
  w = row.on_q * load<T>(row.q + i) + row.on_k * k;
}

// ---- A pass of Newton's method --------------------------------------------------------------------------------------

template <class T> INLINE Vec<T> larger(Vec<T> a, Vec<T> b) { return a > b ? a : b; }
template <class T> INLINE Vec<T> size_of(Vec<T> x) { return x < 0 ? -x : x; }

// The largest entry; NaN if `checked`, a sum of zeros, is not zero: comparisons do not see it.
template <class T> INLINE T largest(Vec<T> sizes, Vec<T> checked) {
  T most = 0, sum = 0;
  for (int l = 0; l < lanes<T>; ++l) {
    most = sizes[l] > most ? sizes[l] : most;
    sum += checked[l];
  }
  return most + sum;
}

// diag(Q L Q') = L + 2 L (k alpha + w gamma) + k^2 aa + 2 k w ag + w^2 gg, Q = I + k alpha' + w gamma'.
template <class T> struct Diagonal {
  T a, b, ww, aa, ag, gg;

  Diagonal(int64_t form, const Plane<T>& d, T beta) {
    const Coefficients<T> q = coefficients<T>(form, beta * beta * d.ww);
    a = beta * q.linear;
    b = beta * beta * q.quadratic;
    ww = d.ww;
    aa = a * a * d.wLw - 2 * a * b * ww * d.kLw + b * b * ww * ww * d.kLk;
    ag = -(a * a * d.kLw + a * b * d.wLw - a * b * ww * d.kLk - b * b * ww * d.kLw);
    gg = a * a * d.kLk + 2 * a * b * d.kLw + b * b * d.wLw;
  }
  Vec<T> at(Vec<T> real, Vec<T> k, Vec<T> w) const {
    Vec<T> alpha = a * w - b * ww * k, gamma = -(a * k + b * w);
    return real + 2 * real * (k * alpha + w * gamma) + k * k * aa + 2 * (k * w) * ag + w * w * gg;
  }
};

// Residual and move of a step in units of the tolerance of each channel; `off_check` and `move_check` are 0 or NaN.
template <class T> void measure(const Step& s, const Task<T>& task, T value, T off_check, T move_check, int64_t at) {
  const T relative = s.relative, absolute = s.absolute;
  Vec<T> excess = {}, move = {}, most = value + Vec<T>{};
  for (int64_t i = 0; i < padded<T>(s.size); i += lanes<T>) {
    Vec<T> recent = load<T>(task.recent + i), limit = recent < most ? recent : most;
    limit = relative * limit + absolute;
    excess = larger<T>(load<T>(task.off + i) / limit, excess);
    move = larger<T>(load<T>(task.moved + i) / limit, move);
  }
  static_cast<T*>(s.excess)[at] = largest<T>(excess, Vec<T>{}) + off_check;
  static_cast<T*>(s.move)[at] = largest<T>(move, Vec<T>{}) + move_check;
}

// Step t of a sequence, row r of its tile: f at task.x, and the new state from the one before it in task.plus.
template <class T>
void advance(const Step& s, Task<T>& task, int64_t sequence, int64_t t, int64_t r, bool fresh, bool last) {
  const int64_t m = s.size, pad = padded<T>(m), at = sequence * s.steps + t;
  const Row<T>& row = task.row[r];
  const T beta = *static_cast<const T*>(s.beta), *x = task.x + r * pad, *now = task.now + (r + 1) * pad;
  T u[64 / sizeof(T)];  // the end of a row of the drive
  const T* drive = static_cast<const T*>(s.drive) + sequence * s.drive_batch + t * m;
  T* next = static_cast<T*>(s.next) + at * m;
  Turn<T> by = {0, 0, 0, 0};
  if (!row.still) by = turn<T>(s.form, row.plane, beta);
  const bool varies = s.diagonal && !row.still;
  const Diagonal<T> diagonal(s.form, varies ? row.plane : Plane<T>{}, beta);
  const T decay = s.decay;
  Vec<T> apart = {}, made = {}, scale = {}, check = {}, move_check = {};
  for (int64_t i = 0; i < pad; i += lanes<T>) {
    const T* driven = drive + i;
    const bool whole = i + lanes<T> <= m;
    if (!whole) {
      for (int l = 0; l < lanes<T>; ++l) u[l] = i + l < m ? drive[i + l] : T(0);
      driven = u;
    }
    Vec<T> k = {}, w = {}, real = load<T>(task.real + i), old = load<T>(x + i);
    if (!row.still) plane_of<T>(row, i, k, w);
    Vec<T> value = real * (old + by.y1 * k + by.y2 * w) + (by.m1 * k + by.m2 * w) + load<T>(driven);
    Vec<T> transition = varies ? diagonal.at(real, k, w) : real;
    Vec<T> entered = load<T>(task.plus + i), plus = fresh ? value : value + transition * (entered - old);
    store<T>(task.plus + i, plus);
    if (whole)
      store<T>(next + i, plus);
    else
      for (int l = 0; i + l < m; ++l) next[i + l] = plus[l];
    Vec<T> current = s.sweep && last ? plus : load<T>(now + i);
    Vec<T> off = value - current, by_much = plus - current;
    store<T>(task.off + i, size_of<T>(off));
    store<T>(task.moved + i, size_of<T>(by_much));
    const Vec<T> before = fresh ? Vec<T>{} : decay * load<T>(task.recent + i);
    store<T>(task.recent + i, larger<T>(size_of<T>(value), before));
    apart = larger<T>(size_of<T>(off), apart);
    made = larger<T>(size_of<T>(value), made);
    scale = larger<T>(larger<T>(size_of<T>(old), size_of<T>(value)), scale);
    check += off * T(0);
    move_check += by_much * T(0);
  }
  static_cast<T*>(s.residual)[at] = largest<T>(apart, check);
  static_cast<T*>(s.scale)[at] = largest<T>(scale, check);
  measure<T>(s, task, largest<T>(made, check), largest<T>(check, check), largest<T>(move_check, move_check), at);
}

template <class T> void run_pass(const Step& s, Task<T>& task, const T* weights, int64_t sequence) {
  const int64_t m = s.size, pad = padded<T>(m);
  T* states = static_cast<T*>(s.states) + sequence * s.states_batch;
  const T* initial = static_cast<const T*>(s.initial) + sequence * m;
  const T* start = s.fresh ? static_cast<const T*>(s.fresh) + sequence * m : nullptr;
  const uint8_t* reset = s.reset ? s.reset + sequence * s.steps : nullptr;
  load_constants(s, task);
  fetch<T>(initial, m, task.plus, pad);
  std::memset(task.recent, 0, pad * sizeof(T));
  if (s.recent) fetch<T>(static_cast<const T*>(s.recent) + sequence * m, m, task.recent, pad);
  for (int64_t first = 0; first < s.steps; first += s.tile) {
    const int64_t last = first + s.tile < s.steps ? first + s.tile : s.steps, count = last - first;
    for (int64_t r = 0; r <= count; ++r) fetch<T>(first + r ? states + (first + r - 1) * m : initial, m, task.now + r * pad, pad);
    if (s.sweep && first) {  // the guess of this tile, moved as its entry was: by L, L^2, ...
      for (int64_t i = 0; i < pad; ++i) task.delta[i] = task.plus[i] - task.delta[i];
      for (int64_t r = 1; r < count; ++r) {
        if (reset && reset[first + r - 1]) std::memset(task.delta, 0, pad * sizeof(T));
        for (int64_t i = 0; i < pad; ++i) task.now[r * pad + i] += task.delta[i] *= task.real[i];
        put<T>(task.now + r * pad, m, states + (first + r - 1) * m);
      }
    }
    for (int64_t r = 0; r < count; ++r) {
      const bool fresh = reset && reset[first + r];
      if (fresh)
        fetch<T>(start, m, task.x + r * pad, pad);
      else
        std::memcpy(task.x + r * pad, task.now + r * pad, pad * sizeof(T));
    }
    look<T>(s, task, weights, count);
    for (int64_t r = 0; r < count; ++r)
      advance<T>(s, task, sequence, first + r, r, reset && reset[first + r], r + 1 == count);
    if (s.sweep) {  // the next tile is entered by the new state, and measures how far that is from the old one
      std::memcpy(task.delta, task.now + count * pad, pad * sizeof(T));
      put<T>(task.plus, m, states + (last - 1) * m);
    }
  }
}

// ---- Jacobians ------------------------------------------------------------------------------------------------------

// Derivatives of y1, y2, m1, m2 at one state: with respect to p and q, with what the derivatives of k and w themselves add
// to the same columns of J, in `cotangents`; and with respect to x directly, in `rows`.
template <class T>
void pull_back(const Step& s, const Task<T>& task, const Row<T>& row, const Turn<T>& by, const T* x, T* cotangents, T* rows) {
  const int64_t pad = padded<T>(s.size);
  const T beta = *static_cast<const T*>(s.beta), c = row.dot;
  const Plane<T>& d = row.plane;
  const Turn<T> units[numbers] = {{1, 0, 0, 0}, {0, 1, 0, 0}, {0, 0, 1, 0}, {0, 0, 0, 1}};
  // On k and w of the derivatives of k and w, for the columns L k, L w, k, w.
  const T key_on_k[numbers] = {by.y1 - c * by.y2, 0, by.m1 - c * by.m2, 0}, key_on_w[numbers] = {by.y2, 0, by.m2, 0};
  const T value_on_k[numbers] = {by.y2, c * by.y2, by.m2, c * by.m2}, value_on_w[numbers] = {0, by.y2, 0, by.m2};
  for (int j = 0; j < numbers; ++j) {
    T beta_gradient;
    const Plane<T> e = turn_backward<T>(s.form, d, beta, units[j], beta_gradient);
    const T both = e.kLw + e.wLk;
    const T k_gk = e.kx * d.kx + e.kLx * d.kLx + 2 * e.kLk * d.kLk + both * d.kLw;
    const T k_gw = e.wx * d.kx + e.wLx * d.kLx + both * d.kLk + 2 * e.wLw * d.kLw;
    const T w_gw = e.wx * d.wx + 2 * e.ww * d.ww + e.wLx * d.wLx + both * d.kLw + 2 * e.wLw * d.wLw;
    T *to_p = cotangents + j * 2 * pad, *to_q = to_p + pad, *direct = rows + j * pad;
    for (int64_t i = 0; i < pad; i += lanes<T>) {
      Vec<T> k, w, real = load<T>(task.real + i), old = load<T>(x + i);
      plane_of<T>(row, i, k, w);
      Vec<T> gk = e.kx * old + real * (e.kLx * old + 2 * e.kLk * k + both * w);
      Vec<T> gw = e.wx * old + 2 * e.ww * w + real * (e.wLx * old + both * k + 2 * e.wLw * w);
      store<T>(to_p + i, row.key_scale * (gk - c * gw + (c * k_gw - k_gk - key_on_k[j]) * k - (k_gw + key_on_w[j]) * w));
      store<T>(to_q + i, row.value_scale * (gw - (k_gw + c * w_gw + value_on_k[j]) * k - (w_gw + value_on_w[j]) * w));
      store<T>(direct + i, e.kx * k + e.wx * w + real * (e.kLx * k + e.wLx * w));
    }
  }
}

// J = L + D_k K + D_v V + L k R1 + L w R2 + k R3 + w R4, row by row. `matrices` are K and V, padded.
template <class T>
void write_jacobian(const Step& s, const Task<T>& task, const Row<T>& row, const Turn<T>& by, const T* matrices, const T* rows,
                    T* out) {
  const int64_t m = s.size, pad = padded<T>(m), whole = m / lanes<T> * lanes<T>;
  const T c = row.dot;
  for (int64_t i = 0; i < m; ++i, out += m) {
    const T real = task.real[i], k = row.on_p * row.p[i], w = row.on_q * row.q[i] + row.on_k * k;
    const T on_key = row.key_scale * (real * (by.y1 - c * by.y2) + by.m1 - c * by.m2);
    const T on_value = row.value_scale * (real * by.y2 + by.m2), moved_k = real * k, moved_w = real * w;
    const T *key = matrices + i * pad, *value = key + m * pad;
    auto entries = [&](int64_t j) {
      return on_key * load<T>(key + j) + on_value * load<T>(value + j) + moved_k * load<T>(rows + j) +
             moved_w * load<T>(rows + pad + j) + k * load<T>(rows + 2 * pad + j) + w * load<T>(rows + 3 * pad + j);
    };
    int64_t j = 0;
    for (; j < whole; j += lanes<T>) store<T>(out + j, entries(j));
    if (j < m) {
      Vec<T> rest = entries(j);
      for (int64_t l = 0; j + l < m; ++l) out[j + l] = rest[l];
    }
    out[i] += real;
  }
}

// The Jacobians at states `first` to `last` of a sequence.
template <class T>
void run_jacobians(const Step& s, Task<T>& task, const T* weights, const T* transposed, const T* matrices, int64_t sequence,
                   int64_t first, int64_t last) {
  const int64_t m = s.size, pad = padded<T>(m), count = last - first;
  const T *states = static_cast<const T*>(s.states) + sequence * s.states_batch, beta = *static_cast<const T*>(s.beta);
  T* out = static_cast<T*>(s.jacobians) + (sequence * s.steps + first) * m * m;
  for (int64_t r = 0; r < count; ++r) fetch<T>(states + (first + r) * m, m, task.x + r * pad, pad);
  look<T>(s, task, weights, count);
  for (int64_t r = 0; r < count; ++r) {
    const Row<T>& row = task.row[r];
    T *cotangents = task.cotangents + r * numbers * 2 * pad, *rows = task.rows + r * numbers * pad;
    if (row.still) {
      std::memset(cotangents, 0, numbers * 2 * pad * sizeof(T));
      std::memset(rows, 0, numbers * pad * sizeof(T));
    } else {
      pull_back<T>(s, task, row, turn<T>(s.form, row.plane, beta), task.x + r * pad, cotangents, rows);
    }
  }
  product<T, true>(count * numbers, task.cotangents, 2 * pad, {m, pad - m, m}, transposed, pad / panel<T>, task.rows, pad);
  for (int64_t r = 0; r < count; ++r, out += m * m) {
    const Row<T>& row = task.row[r];
    if (row.still) {
      std::memset(out, 0, m * m * sizeof(T));
      for (int64_t i = 0; i < m; ++i) out[i * m + i] = task.real[i];
    } else {
      write_jacobian<T>(s, task, row, turn<T>(s.form, row.plane, beta), matrices, task.rows + r * numbers * pad, out);
    }
  }
}

// ---- Tasks ----------------------------------------------------------------------------------------------------------

template <class T> int64_t task_memory(const Step& s) {
  Arena<T> memory = {nullptr, 0};
  Task<T>{}.lay_out(s, memory);
  return memory.used;
}

// K and V in panels; for Jacobians also transposed in panels, and row by row.
template <class T> int64_t weight_memory(const Step& s) { return 2 * s.size * padded<T>(s.size) * (s.jacobians ? 3 : 1); }

template <class T> void run(const Step& s) {
  const int64_t m = s.size, pad = padded<T>(m), each = 2 * m * pad, tiles = (s.steps + s.tile - 1) / s.tile;
  T *weights = static_cast<T*>(s.workspace), *transposed = weights + each, *matrices = transposed + each;
  T* memory = weights + weight_memory<T>(s);
  const T* given = static_cast<const T*>(s.weight);
  if (!s.packed) pack_forward<T>(given, m, weights);
  if (s.jacobians && !s.packed) {
    pack_backward<T>(given, m, transposed);
    for (int64_t i = 0; i < 2 * m; ++i) fetch<T>(given + i * m, m, matrices + i * pad, pad);
  }
  in_threads(s.threads, [&](int64_t thread) {
    Task<T> task = {};
    Arena<T> own = {memory + thread * task_memory<T>(s), 0};
    task.lay_out(s, own);
    load_constants(s, task);
    if (s.jacobians)
      for (int64_t i = thread; i < s.batch * tiles; i += s.threads) {
        const int64_t first = i % tiles * s.tile, last = first + s.tile < s.steps ? first + s.tile : s.steps;
        run_jacobians<T>(s, task, weights, transposed, matrices, i / tiles, first, last);
      }
    else
      for (int64_t i = thread; i < s.batch; i += s.threads) run_pass<T>(s, task, weights, i);
  });
}

}  // namespace

extern "C" {
int64_t adpt_step_layout() { return sizeof(Step); }
int64_t adpt_step_workspace(const Step* s) {
  return (weight_memory<NUMBER>(*s) + s->threads * task_memory<NUMBER>(*s)) * sizeof(NUMBER);
}
void adpt_step_run(const Step* s) { run<NUMBER>(*s); }
}
