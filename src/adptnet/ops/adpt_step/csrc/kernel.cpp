// The step f(x) = M(x) x + u of an ADPT recurrence at many known states, for float and double: Jacobians, and a pass of
// Newton's method over time. The derivation is in ../README.md.
//
// States are processed in tiles of consecutive steps, so that K x and V x are one matrix product and the rest of the
// work stays in cache. State vectors are padded with zeros to `pad` entries, as in ../../adpt_scan. Eigenvalues are
// real; key and value are computed from the state itself.
//
// Letters, as in the README and in ../../adpt_scan/csrc/plane.h:
//   x, u, L         the state before the step, the drive, the eigenvalues Λ
//   p, q, k, w, c   K x, V x, the unit key, the part of the unit value orthogonal to k, and k.v
//   y1 y2 m1 m2     f(x) = L (x + y1 k + y2 w) + m1 k + m2 w + u
//   D_k, D_v        diagonal factors of K and V in the Jacobian; r1 to r4 (`rows`) its rank-one rows
//   gp, gq          gradients with respect to p and q
// Sizes and indices:
//   m, pad          the state dimension, and m padded to whole cache lines
//   r, t            row of a tile, and step
//   s               the arguments of the call, `struct Step`

#include "../../adpt_scan/csrc/directions.h"
#include "../../csrc/panels.h"
#include "../../csrc/threads.h"

// Arguments of a call; cpu.py reads the layout from here. A `void*` points to SCALAR, which is float or double.
struct Step {
  int64_t batch, steps, size, retraction, threads;
  int64_t tile;                       // steps per tile
  int64_t packed;                     // whether the workspace holds the packed K and V of a previous call
  int64_t diagonal;                   // the transition: 0 for the eigenvalues, 1 for the diagonal of M
  int64_t sweep;                      // whether the correction of a tile is propagated into the guess of the next
  int64_t states_batch, drive_batch;  // strides from one sequence to the next
  double relative, absolute;          // the tolerance, see ../../tolerance.py
  double scale_decay;                 // factor by which the recent scale decays per step
  const void *real, *weight, *bias, *beta;
  const void *drive, *initial;
  const void* reset_state;                 // (batch, size), the state that enters a step with a reset
  const uint8_t* reset;                    // (batch, steps), may be null
  const void* recent_scale;                // (batch, size), before the first step, may be null
  void* states;                            // the iterate, written only in a sweep
  void* updated;                           // (batch, steps, size), the next iterate
  void *residual, *excess, *scale, *move;  // (batch, steps); excess and move in units of the tolerance
  void *transition, *allowed;              // (batch, steps, size), A and the tolerances, may be null
  void* jacobians;                         // (batch, steps, size, size)
  void* workspace;
};

namespace {

constexpr int scalar_count = 4;  // y1, y2, m1, m2

template <class T> struct Task {
  T *real, *bias;
  T *x, *projections, *scratch;         // of a tile
  T *current_states, *updated, *delta;  // Newton pass: the iterate in a tile and one step before, the updated state,
                                        // the correction at the entry of a tile
  T *recent_scale, *residual, *change;  // Newton pass: of one step
  T *cotangents, *rows;                 // Jacobians
  Row<T>* row;

  void allocate(const Step& s, Arena<T>& memory) {
    const int64_t pad = padded_size<T>(s.size);
    real = memory.allocate(pad);
    bias = memory.allocate(2 * pad);
    x = memory.allocate(s.tile * pad);
    projections = memory.allocate(s.tile * 2 * pad);
    scratch = memory.allocate(s.tile * 2 * pad);
    current_states = memory.allocate((s.tile + 1) * pad);
    updated = memory.allocate(pad);
    delta = memory.allocate(pad);
    recent_scale = memory.allocate(pad);
    residual = memory.allocate(pad);
    change = memory.allocate(pad);
    cotangents = memory.allocate(s.jacobians ? s.tile * scalar_count * 2 * pad : 0);
    rows = memory.allocate(s.jacobians ? s.tile * scalar_count * pad : 0);
    row = reinterpret_cast<Row<T>*>(memory.allocate(s.tile * sizeof(Row<T>) / sizeof(T) + 16));
  }
};

template <class T> void load_constants(const Step& s, Task<T>& task) {
  const int64_t m = s.size, pad = padded_size<T>(m);
  load_row<T>(static_cast<const T*>(s.real), m, task.real, pad);
  std::memset(task.bias, 0, 2 * pad * sizeof(T));
  if (s.bias) {
    load_row<T>(static_cast<const T*>(s.bias), m, task.bias, pad);
    load_row<T>(static_cast<const T*>(s.bias) + m, m, task.bias + pad, pad);
  }
}

// Compute directions and dot products of the rotation at the `count` states in task.x.
template <class T> void compute_rows(const Step& s, Task<T>& task, const T* weights, int64_t count) {
  const int64_t m = s.size, pad = padded_size<T>(m);
  const Spectrum<T> spectrum = {task.real, nullptr};
  matmul<T, false>(count, {task.x, pad}, {m, 0, 0}, {weights, 2 * pad / panel_width<T>}, {task.projections, 2 * pad});
  for (int64_t r = 0; r < count; ++r) {
    T* p = task.projections + r * 2 * pad;
    if (s.bias)
      for (int64_t i = 0; i < 2 * pad; i += lanes<T>) store<T>(p + i, load<T>(p + i) + load<T>(task.bias + i));
  }
  for (int64_t first = 0; first < count; first += lanes<T>) {
    const int some = std::min<int64_t>(lanes<T>, count - first);
    auto at = [&](int l) -> RowVectors<T> {
      return {task.projections + (first + l) * 2 * pad, task.x + (first + l) * pad, nullptr};
    };
    Group<T, Vec<T>> group;
    T dots[lanes<T> * dot_count];
    compute_directions<T, Vec<T>, false>(spectrum, at, some, pad, {dots, false, task.scratch + first * 2 * pad}, group);
    for (int l = 0; l < some; ++l) task.row[first + l] = get_row(group, l);
  }
}

// Load k and w of a row.
template <class T> INLINE void load_plane(const Row<T>& row, int64_t i, Vec<T>& k, Vec<T>& w) {
  k = row.on_p * load<T>(row.p + i);
  w = row.on_q * load<T>(row.q + i) + row.on_k * k;
}

// ---- A pass of Newton's method --------------------------------------------------------------------------------------

// Store entries i, i + 1, ... of a row of m entries in memory that is not padded.
template <class T> INLINE void store_lanes(Vec<T> values, T* row, int64_t i, int64_t m) {
  if (i + lanes<T> <= m)
    store<T>(row + i, values);
  else
    for (int l = 0; i + l < m; ++l) row[i + l] = values[l];
}

template <class T> INLINE Vec<T> max_lanes(Vec<T> a, Vec<T> b) { return a > b ? a : b; }
template <class T> INLINE Vec<T> abs_lanes(Vec<T> x) { return x < 0 ? -x : x; }

// Return the largest entry. Comparisons drop NaN, so `check` carries it: a sum of entries times zero, which is 0 or
// NaN.
template <class T> INLINE T largest(Vec<T> sizes, Vec<T> check) {
  T most = 0, sum = 0;
  for (int l = 0; l < lanes<T>; ++l) {
    most = sizes[l] > most ? sizes[l] : most;
    sum += check[l];
  }
  return most + sum;
}

// The diagonal of M = Q L Q' (eq:diag_M of the paper; `RotatedConjugate.diagonal` is the PyTorch implementation):
// diag(Q L Q') = L + 2 L (k alpha + w gamma) + k^2 aa + 2 k w ag + w^2 gg for Q = I + k alpha' + w gamma', where aa, ag
// and gg are alpha.L alpha, alpha.L gamma and gamma.L gamma.
template <class T> struct TransitionDiagonal {
  T a, b, ww, aa, ag, gg;

  TransitionDiagonal(int64_t retraction, const PlaneDots<T>& d, T beta) {
    const Coefficients<T> coef = coefficients<T>(retraction, beta * beta * d.ww);
    a = beta * coef.linear;
    b = beta * beta * coef.quadratic;
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

// Write residual and change of a step in units of the tolerance of each channel. The checks are 0 or NaN.
template <class T> void measure(const Step& s, const Task<T>& task, T value, T residual_check, T move_check,
                                int64_t at) {
  const T relative = s.relative, absolute = s.absolute;
  T* allowed = s.allowed ? static_cast<T*>(s.allowed) + at * s.size : nullptr;
  Vec<T> excess = {}, move = {}, step_scale = value + Vec<T>{};
  for (int64_t i = 0; i < padded_size<T>(s.size); i += lanes<T>) {
    Vec<T> recent_scale = load<T>(task.recent_scale + i), limit = recent_scale < step_scale ? recent_scale : step_scale;
    limit = relative * limit + absolute;
    if (allowed) store_lanes<T>(limit, allowed, i, s.size);
    excess = max_lanes<T>(load<T>(task.residual + i) / limit, excess);
    move = max_lanes<T>(load<T>(task.change + i) / limit, move);
  }
  static_cast<T*>(s.excess)[at] = largest<T>(excess, Vec<T>{}) + residual_check;
  static_cast<T*>(s.move)[at] = largest<T>(move, Vec<T>{}) + move_check;
}

// Newton update at step t, row r of its tile: evaluate f at task.x and advance task.updated, the updated state.
template <class T>
void update_state(const Step& s, Task<T>& task, int64_t sequence, int64_t t, int64_t r, bool is_reset, bool last) {
  const int64_t m = s.size, pad = padded_size<T>(m), at = sequence * s.steps + t;
  const Row<T>& row = task.row[r];
  const T beta = *static_cast<const T*>(s.beta), *x = task.x + r * pad, *iterate = task.current_states + (r + 1) * pad;
  T u_tail[64 / sizeof(T)];  // the last, partial vector of a row of the drive
  const T* drive = static_cast<const T*>(s.drive) + sequence * s.drive_batch + t * m;
  T *out = static_cast<T*>(s.updated) + at * m, *factors = static_cast<T*>(s.transition);
  RotationScalars<T> by = {0, 0, 0, 0};
  if (!row.no_rotation) by = rotation_scalars<T>(s.retraction, row.plane, beta);
  const bool varies = s.diagonal && !row.no_rotation;
  const TransitionDiagonal<T> diagonal(s.retraction, varies ? row.plane : PlaneDots<T>{}, beta);
  const T decay = s.scale_decay;
  Vec<T> residual_scale = {}, value_scale = {}, scale = {}, check = {}, move_check = {};
  for (int64_t i = 0; i < pad; i += lanes<T>) {
    const T* u_i = drive + i;
    const bool whole = i + lanes<T> <= m;
    if (!whole) {
      for (int l = 0; l < lanes<T>; ++l) u_tail[l] = i + l < m ? drive[i + l] : T(0);
      u_i = u_tail;
    }
    Vec<T> k = {}, w = {}, real = load<T>(task.real + i), x_i = load<T>(x + i);
    if (!row.no_rotation) load_plane<T>(row, i, k, w);
    Vec<T> value = real * (x_i + by.y1 * k + by.y2 * w) + (by.m1 * k + by.m2 * w) + load<T>(u_i);
    Vec<T> transition = varies ? diagonal.at(real, k, w) : real;
    Vec<T> previous = load<T>(task.updated + i), updated = is_reset ? value : value + transition * (previous - x_i);
    store<T>(task.updated + i, updated);
    store_lanes<T>(updated, out, i, m);
    if (factors) store_lanes<T>(transition, factors + at * m, i, m);
    Vec<T> current = s.sweep && last ? updated : load<T>(iterate + i);
    Vec<T> residual = value - current, change = updated - current;
    store<T>(task.residual + i, abs_lanes<T>(residual));
    store<T>(task.change + i, abs_lanes<T>(change));
    const Vec<T> before = is_reset ? Vec<T>{} : decay * load<T>(task.recent_scale + i);
    store<T>(task.recent_scale + i, max_lanes<T>(abs_lanes<T>(value), before));
    residual_scale = max_lanes<T>(abs_lanes<T>(residual), residual_scale);
    value_scale = max_lanes<T>(abs_lanes<T>(value), value_scale);
    scale = max_lanes<T>(max_lanes<T>(abs_lanes<T>(x_i), abs_lanes<T>(value)), scale);
    check += residual * T(0);
    move_check += change * T(0);
  }
  static_cast<T*>(s.residual)[at] = largest<T>(residual_scale, check);
  static_cast<T*>(s.scale)[at] = largest<T>(scale, check);
  measure<T>(s, task, largest<T>(value_scale, check), largest<T>(check, check), largest<T>(move_check, move_check), at);
}

template <class T> void run_pass(const Step& s, Task<T>& task, const T* weights, int64_t sequence) {
  const int64_t m = s.size, pad = padded_size<T>(m);
  T* states = static_cast<T*>(s.states) + sequence * s.states_batch;
  const T* initial = static_cast<const T*>(s.initial) + sequence * m;
  const T* reset_state = s.reset_state ? static_cast<const T*>(s.reset_state) + sequence * m : nullptr;
  const uint8_t* reset = s.reset ? s.reset + sequence * s.steps : nullptr;
  load_constants(s, task);
  load_row<T>(initial, m, task.updated, pad);
  std::memset(task.recent_scale, 0, pad * sizeof(T));
  if (s.recent_scale) load_row<T>(static_cast<const T*>(s.recent_scale) + sequence * m, m, task.recent_scale, pad);
  for (int64_t first = 0; first < s.steps; first += s.tile) {
    const int64_t last = first + s.tile < s.steps ? first + s.tile : s.steps, count = last - first;
    for (int64_t r = 0; r <= count; ++r)
      load_row<T>(first + r ? states + (first + r - 1) * m : initial, m, task.current_states + r * pad, pad);
    if (s.sweep && first) {  // correct the guess of this tile by L, L^2, ... times the correction at its entry
      for (int64_t i = 0; i < pad; ++i) task.delta[i] = task.updated[i] - task.delta[i];
      for (int64_t r = 1; r < count; ++r) {
        if (reset && reset[first + r - 1]) std::memset(task.delta, 0, pad * sizeof(T));
        for (int64_t i = 0; i < pad; ++i) task.current_states[r * pad + i] += task.delta[i] *= task.real[i];
        store_row<T>(task.current_states + r * pad, m, states + (first + r - 1) * m);
      }
    }
    for (int64_t r = 0; r < count; ++r) {
      const bool is_reset = reset && reset[first + r];
      if (is_reset)
        load_row<T>(reset_state, m, task.x + r * pad, pad);
      else
        std::memcpy(task.x + r * pad, task.current_states + r * pad, pad * sizeof(T));
    }
    compute_rows<T>(s, task, weights, count);
    for (int64_t r = 0; r < count; ++r)
      update_state<T>(s, task, sequence, first + r, r, reset && reset[first + r], r + 1 == count);
    if (s.sweep) {  // the next tile starts from the updated state; keep the old one for the correction
      std::memcpy(task.delta, task.current_states + count * pad, pad * sizeof(T));
      store_row<T>(task.updated, m, states + (last - 1) * m);
    }
  }
}

// ---- Jacobians ------------------------------------------------------------------------------------------------------

// Gradients of y1, y2, m1 and m2 at one state. `cotangents`: with respect to p and q, including what the derivatives of
// k and w add to the same columns of J. `rows`: the direct gradient with respect to x.
template <class T>
void scalar_gradients(const Step& s, const Task<T>& task, const Row<T>& row, const RotationScalars<T>& by, const T* x,
                      T* cotangents, T* rows) {
  const int64_t pad = padded_size<T>(s.size);
  const T beta = *static_cast<const T*>(s.beta), c = row.cosine;
  const PlaneDots<T>& d = row.plane;
  const RotationScalars<T> units[scalar_count] = {{1, 0, 0, 0}, {0, 1, 0, 0}, {0, 0, 1, 0}, {0, 0, 0, 1}};
  // Contributions of dk and dw along k and w, for the columns L k, L w, k, w of J.
  const T key_on_k[scalar_count] = {by.y1 - c * by.y2, 0, by.m1 - c * by.m2, 0},
          key_on_w[scalar_count] = {by.y2, 0, by.m2, 0};
  const T value_on_k[scalar_count] = {by.y2, c * by.y2, by.m2, c * by.m2},
          value_on_w[scalar_count] = {0, by.y2, 0, by.m2};
  for (int j = 0; j < scalar_count; ++j) {
    T beta_gradient;
    const PlaneDots<T> e = rotation_scalars_backward<T>(s.retraction, d, beta, units[j], beta_gradient);
    const T both = e.kLw + e.wLk;
    const T k_gk = e.kx * d.kx + e.kLx * d.kLx + 2 * e.kLk * d.kLk + both * d.kLw;
    const T k_gw = e.wx * d.kx + e.wLx * d.kLx + both * d.kLk + 2 * e.wLw * d.kLw;
    const T w_gw = e.wx * d.wx + 2 * e.ww * d.ww + e.wLx * d.wLx + both * d.kLw + 2 * e.wLw * d.wLw;
    T *gp = cotangents + j * 2 * pad, *gq = gp + pad, *direct = rows + j * pad;
    for (int64_t i = 0; i < pad; i += lanes<T>) {
      Vec<T> k, w, real = load<T>(task.real + i), x_i = load<T>(x + i);
      load_plane<T>(row, i, k, w);
      Vec<T> gk = e.kx * x_i + real * (e.kLx * x_i + 2 * e.kLk * k + both * w);
      Vec<T> gw = e.wx * x_i + 2 * e.ww * w + real * (e.wLx * x_i + both * k + 2 * e.wLw * w);
      store<T>(gp + i, row.key_scale * (gk - c * gw + (c * k_gw - k_gk - key_on_k[j]) * k - (k_gw + key_on_w[j]) * w));
      store<T>(gq + i, row.value_scale * (gw - (k_gw + c * w_gw + value_on_k[j]) * k - (w_gw + value_on_w[j]) * w));
      store<T>(direct + i, e.kx * k + e.wx * w + real * (e.kLx * k + e.wLx * w));
    }
  }
}

// J = L + D_k K + D_v V + L k r1' + L w r2' + k r3' + w r4', row by row. `matrices` holds K and V, padded.
template <class T>
void write_jacobian(const Step& s, const Task<T>& task, const Row<T>& row, const RotationScalars<T>& by,
                    const T* matrices, const T* rows, T* out) {
  const int64_t m = s.size, pad = padded_size<T>(m), whole = m / lanes<T> * lanes<T>;
  const T c = row.cosine;
  for (int64_t i = 0; i < m; ++i, out += m) {
    const T real = task.real[i], k = row.on_p * row.p[i], w = row.on_q * row.q[i] + row.on_k * k;
    const T D_k = row.key_scale * (real * (by.y1 - c * by.y2) + by.m1 - c * by.m2);
    const T D_v = row.value_scale * (real * by.y2 + by.m2), Lk = real * k, Lw = real * w;
    const T *key = matrices + i * pad, *value = key + m * pad;
    auto entries = [&](int64_t j) {
      return D_k * load<T>(key + j) + D_v * load<T>(value + j) + Lk * load<T>(rows + j) + Lw * load<T>(rows + pad + j) +
             k * load<T>(rows + 2 * pad + j) + w * load<T>(rows + 3 * pad + j);
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

// The Jacobians at the states `first` to `last` - 1 of a sequence.
template <class T>
void run_jacobians(const Step& s, Task<T>& task, const T* weights, const T* transposed, const T* matrices,
                   int64_t sequence, int64_t first, int64_t last) {
  const int64_t m = s.size, pad = padded_size<T>(m), count = last - first;
  const T *states = static_cast<const T*>(s.states) + sequence * s.states_batch, beta = *static_cast<const T*>(s.beta);
  T* out = static_cast<T*>(s.jacobians) + (sequence * s.steps + first) * m * m;
  for (int64_t r = 0; r < count; ++r) load_row<T>(states + (first + r) * m, m, task.x + r * pad, pad);
  compute_rows<T>(s, task, weights, count);
  for (int64_t r = 0; r < count; ++r) {
    const Row<T>& row = task.row[r];
    T *cotangents = task.cotangents + r * scalar_count * 2 * pad, *rows = task.rows + r * scalar_count * pad;
    if (row.no_rotation) {
      std::memset(cotangents, 0, scalar_count * 2 * pad * sizeof(T));
      std::memset(rows, 0, scalar_count * pad * sizeof(T));
    } else {
      scalar_gradients<T>(s, task, row, rotation_scalars<T>(s.retraction, row.plane, beta), task.x + r * pad,
                          cotangents, rows);
    }
  }
  matmul<T, true>(count * scalar_count, {task.cotangents, 2 * pad}, {m, pad - m, m},
                  {transposed, pad / panel_width<T>}, {task.rows, pad});
  for (int64_t r = 0; r < count; ++r, out += m * m) {
    const Row<T>& row = task.row[r];
    if (row.no_rotation) {
      std::memset(out, 0, m * m * sizeof(T));
      for (int64_t i = 0; i < m; ++i) out[i * m + i] = task.real[i];
    } else {
      write_jacobian<T>(s, task, row, rotation_scalars<T>(s.retraction, row.plane, beta), matrices,
                        task.rows + r * scalar_count * pad, out);
    }
  }
}

// ---- Tasks ----------------------------------------------------------------------------------------------------------

template <class T> int64_t task_memory(const Step& s) {
  Arena<T> memory = {nullptr, 0};
  Task<T>{}.allocate(s, memory);
  return memory.used;
}

// Entries of the packed K and V; for Jacobians also of the packed transposes, and of K and V row by row.
template <class T> int64_t weight_memory(const Step& s) {
  return 2 * s.size * padded_size<T>(s.size) * (s.jacobians ? 3 : 1);
}

template <class T> void run(const Step& s) {
  const int64_t m = s.size, pad = padded_size<T>(m), each = 2 * m * pad, tiles = (s.steps + s.tile - 1) / s.tile;
  T *weights = static_cast<T*>(s.workspace), *transposed = weights + each, *matrices = transposed + each;
  T* memory = weights + weight_memory<T>(s);
  const T* weight = static_cast<const T*>(s.weight);
  if (!s.packed) pack_forward<T>(weight, m, m, weights);
  if (s.jacobians && !s.packed) {
    pack_backward<T>(weight, m, m, transposed);
    for (int64_t i = 0; i < 2 * m; ++i) load_row<T>(weight + i * m, m, matrices + i * pad, pad);
  }
  run_in_threads(s.threads, [&](int64_t thread) {
    Task<T> task = {};
    Arena<T> own = {memory + thread * task_memory<T>(s), 0};
    task.allocate(s, own);
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
EXPORT int64_t adpt_step_layout() { return sizeof(Step); }
EXPORT int64_t adpt_step_workspace(const Step* s) {
  return (weight_memory<SCALAR>(*s) + s->threads * task_memory<SCALAR>(*s)) * sizeof(SCALAR);
}
EXPORT void adpt_step_run(const Step* s) { run<SCALAR>(*s); }
}
