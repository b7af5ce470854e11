// A short call of an ADPT layer in one go, without gradients: drive, recurrence and read-out, for float and double. With
// gradients, the drive's are computed here (`drive_gradients.h`), those of the recurrence by adpt_scan.
//
// Weights are read as torch stores them, (out, in) in row-major order: packing them, as adpt_scan does, costs more
// than a few steps. Nothing of the size of a matrix is kept between calls, so a weight that changed is always seen. The
// vectors that are evaluated from other parameters (eigenvalues, gain, beta) come with those parameters (`sources`) and
// a copy of their bytes: a call whose copy is out of date computes nothing.
//
// Letters, as in ../../adpt_scan/csrc/plane.h:
//   x, u         the state before the step, and the drive
//   p, q         the projections K x and V x; k and w are unit vectors along p and along the rest of q
//   D, U         the matrices of the input gate, `gate_down` and `gate_up`
// Sizes and indices:
//   m, n, pad    the state dimension of a head, that of all heads, and m padded to whole cache lines
//   r, t, l      sequence, step, and sequence within a group of as many sequences as a SIMD vector has lanes
//   s            the arguments of the call, `struct Layer`

#include <algorithm>

#include "../../adpt_scan/csrc/directions.h"
#include "drive_gradients.h"

// Arguments of a call; cpu.py reads the layout from here. A `void*` points to SCALAR, which is float or double.
struct Layer {
  int64_t batch, steps, width, heads, size, output_width;  // size: state dimension of one head
  int64_t complex_pairs, rotates, source, retraction, rotation_aware;  // booleans, and the enums of adpt_scan/form.py
  int64_t gate_rank;                                                   // 0 without an input gate
  double spike_threshold;
  const void *x, *initial;                                             // initial: null for zeros
  const void *input_weight, *input_bias, *gain_real, *gain_imag;       // (n, width) and (n); imaginary parts, biases
  const void *real, *imag, *beta;                                      // and the identity B: null
  const void *gate_down, *gate_up, *gate_bias;                         // (gate_rank, n), (n, gate_rank), (n)
  const void *const *directions, *const *direction_biases;             // (heads, 2): K and V of each head
  const void *readout_weight, *readout_bias;                           // (output_width, n); null for the identity
  int64_t source_count;
  const void* const* sources;    // the parameters that the evaluated vectors depend on
  const int64_t* source_bytes;
  const void* source_copies;     // their bytes, one after another
  void *drive, *states, *final;  // (batch, steps, n) twice, and (batch, n); `final` may be `initial`
  void* outputs;                 // (batch, steps, output_width); `states` itself without a read-out
  void* workspace;
};

namespace {

enum Source { identity, relu, spikes };

template <class T> constexpr int64_t group_rows = lanes<T>;  // sequences that are stepped together

// ---- Recurrence -----------------------------------------------------------------------------------------------------

// Memory of one head of a group of sequences.
template <class T> struct Memory {
  T *real, *imag, *x, *source, *u, *projections, *dots, *scratch;

  void allocate(int64_t pad, Arena<T>& memory) {
    real = memory.allocate(pad);
    imag = memory.allocate(pad);
    for (T** vectors : {&x, &source, &u}) *vectors = memory.allocate(group_rows<T> * pad);
    for (T** vectors : {&projections, &scratch}) *vectors = memory.allocate(group_rows<T> * 2 * pad);
    dots = memory.allocate(group_rows<T> * dot_count);
  }
};

template <class T> INLINE Vec<T> apply_source(const Layer& s, Vec<T> x) {
  if (s.source == relu) return x <= 0 ? Vec<T>{} : x;  // NaN passes
  return x >= T(s.spike_threshold) ? Vec<T>{} + 1 : Vec<T>{};
}

// x <- L (x + y1 p + y2 q) + m1 p + m2 q + u, with padded vectors.
template <class T, bool Pairs>
INLINE void update_state(const Spectrum<T>& spectrum, int64_t pad, const T* u, const T* p, const T* q,
                         RotationScalars<T> by, T* x) {
  for (int64_t i = 0; i < pad; i += lanes<T>) {
    const Vec<T> p_i = load<T>(p + i), q_i = load<T>(q + i), x_i = load<T>(x + i), u_i = load<T>(u + i);
    if constexpr (Pairs) {
      store<T>(x + i, apply_lambda<T, true>(spectrum, i, x_i + by.y1 * p_i + by.y2 * q_i) +
                          (by.m1 * p_i + by.m2 * q_i) + u_i);
    } else {
      const Vec<T> real = load<T>(spectrum.real + i);
      store<T>(x + i, (real * x_i + u_i) + (real * by.y1 + by.m1) * p_i + (real * by.y2 + by.m2) * q_i);
    }
  }
}

// One step of `count` sequences, whose scalars are those of one row (N = T) or of one row per lane.
template <class T, class N, bool Pairs>
void step_rows(const Layer& s, const Memory<T>& at, int64_t head, int count, int64_t pad) {
  const Spectrum<T> spectrum = {at.real, at.imag};
  Group<T, N> group;
  RotationScalars<N> by = {};
  if (s.rotates) {
    const T* source = at.x;
    if (s.source != identity) {
      for (int64_t i = 0; i < count * pad; i += lanes<T>)
        store<T>(at.source + i, apply_source<T>(s, load<T>(at.x + i)));
      source = at.source;
    }
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t which = 2 * head + half;
      const void* bias = s.direction_biases ? s.direction_biases[which] : nullptr;
      multiply_unpacked<T>(count, {source, pad},
                           {static_cast<const T*>(s.directions[which]), static_cast<const T*>(bias), s.size, s.size},
                           {at.projections + half * pad, 2 * pad});
    }
    auto vectors = [&](int64_t l) -> RowVectors<T> {
      return {at.projections + l * 2 * pad, at.x + l * pad, s.rotation_aware ? at.u + l * pad : nullptr};
    };
    compute_directions<T, N, Pairs>(spectrum, vectors, count, pad, {at.dots, false, at.scratch}, group);
    const N beta = N{} + static_cast<const T*>(s.beta)[head];
    by = scalars_of_projections<N>(group, rotation_scalars<N>(s.retraction, group.plane, beta));
  }
  for (int l = 0; l < count; ++l)
    if (s.rotates && !group.no_rotation[l])
      update_state<T, Pairs>(spectrum, pad, at.u + l * pad, group.p[l], group.q[l],
                             {lane(by.y1, l), lane(by.y2, l), lane(by.m1, l), lane(by.m2, l)}, at.x + l * pad);
    else  // p and q are multiplied by zero: any finite vectors do
      update_state<T, Pairs>(spectrum, pad, at.u + l * pad, at.real, at.real, {0, 0, 0, 0}, at.x + l * pad);
}

template <class T, bool Pairs> void run_group(const Layer& s, const Memory<T>& at, int64_t first, int count) {
  const int64_t m = s.size, n = s.heads * m, pad = padded_size<T>(m);
  const T *initial = static_cast<const T*>(s.initial), *drive = static_cast<const T*>(s.drive);
  for (int64_t head = 0; head < s.heads; ++head) {
    const int64_t offset = head * m;
    load_row<T>(static_cast<const T*>(s.real) + offset, m, at.real, pad);
    if (Pairs) load_row<T>(static_cast<const T*>(s.imag) + offset, m, at.imag, pad);
    for (int64_t l = 0; l < count; ++l) {
      if (initial)
        load_row<T>(initial + (first + l) * n + offset, m, at.x + l * pad, pad);
      else
        std::memset(at.x + l * pad, 0, pad * sizeof(T));
    }
    for (int64_t t = 0; t < s.steps; ++t) {
      for (int64_t l = 0; l < count; ++l)
        load_row<T>(drive + ((first + l) * s.steps + t) * n + offset, m, at.u + l * pad, pad);
      count == 1 ? step_rows<T, T, Pairs>(s, at, head, count, pad)
                 : step_rows<T, Vec<T>, Pairs>(s, at, head, count, pad);
      for (int64_t l = 0; l < count; ++l)
        store_row<T>(at.x + l * pad, m, static_cast<T*>(s.states) + ((first + l) * s.steps + t) * n + offset);
    }
    for (int64_t l = 0; l < count; ++l)
      store_row<T>(at.x + l * pad, m, static_cast<T*>(s.final) + (first + l) * n + offset);
  }
}

// ---- Drive ----------------------------------------------------------------------------------------------------------

// The drive: gain gate (B x + bias). `gain_imag` multiplies swapped pairs and has the sign of the first entry reversed.
template <class T> void compute_drive(const Layer& s, T* hidden, T* logits) {
  const int64_t n = s.heads * s.size, rows = s.batch * s.steps;
  T* const drive = static_cast<T*>(s.drive);
  const T *real = static_cast<const T*>(s.gain_real), *imag = static_cast<const T*>(s.gain_imag);
  if (s.input_weight)
    multiply_unpacked<T>(rows, {static_cast<const T*>(s.x), s.width},
                         {static_cast<const T*>(s.input_weight), static_cast<const T*>(s.input_bias), s.width, n},
                         {drive, n});
  else
    std::memcpy(drive, s.x, rows * n * sizeof(T));
  if (s.gate_rank) {
    const Gate<T> gate = {static_cast<const T*>(s.gate_down), static_cast<const T*>(s.gate_up),
                          static_cast<const T*>(s.gate_bias), s.gate_rank, n};
    apply_gate<T>(gate, rows, drive, hidden, logits);
  }
  for (int64_t r = 0; r < rows; ++r) {
    T* const u = drive + r * n;
    if (!imag) {
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) u[i] *= real[i];
      continue;
    }
    for (int64_t i = 0; i + 1 < n; i += 2) {
      const T a = u[i], b = u[i + 1];
      u[i] = real[i] * a + imag[i] * b;
      u[i + 1] = real[i + 1] * b + imag[i + 1] * a;
    }
  }
}

// ---- A call ---------------------------------------------------------------------------------------------------------

// Workspace of a call.
template <class T> struct Workspace {
  Memory<T> group;
  T *hidden, *logits;  // of a block of rows
};

template <class T> Workspace<T> allocate_workspace(const Layer& s, Arena<T>& memory) {
  Workspace<T> at = {};
  at.group.allocate(padded_size<T>(s.size), memory);
  if (s.gate_rank) {
    at.hidden = memory.allocate(block_rows * s.gate_rank);
    at.logits = memory.allocate(block_rows * s.heads * s.size);
  }
  return at;
}

// Return whether the parameters of the evaluated vectors are those of the copy.
bool is_current(const Layer& s) {
  const char* copy = static_cast<const char*>(s.source_copies);
  for (int64_t i = 0; i < s.source_count; copy += s.source_bytes[i++])
    if (std::memcmp(s.sources[i], copy, s.source_bytes[i])) return false;
  return true;
}

template <class T> bool run(const Layer& s) {
  if (!is_current(s)) return false;
  Arena<T> memory = {static_cast<T*>(s.workspace), 0};
  const Workspace<T> workspace = allocate_workspace<T>(s, memory);
  const Memory<T>& at = workspace.group;
  std::memset(at.projections, 0, group_rows<T> * 2 * padded_size<T>(s.size) * sizeof(T));  // the padding stays zero
  compute_drive<T>(s, workspace.hidden, workspace.logits);
  for (int64_t first = 0; first < s.batch; first += group_rows<T>) {
    const int count = int(std::min(group_rows<T>, s.batch - first));
    s.complex_pairs ? run_group<T, true>(s, at, first, count) : run_group<T, false>(s, at, first, count);
  }
  if (s.readout_weight) {
    const int64_t n = s.heads * s.size;
    multiply_unpacked<T>(s.batch * s.steps, {static_cast<const T*>(s.states), n},
                         {static_cast<const T*>(s.readout_weight), static_cast<const T*>(s.readout_bias), n,
                          s.output_width},
                         {static_cast<T*>(s.outputs), s.output_width});
  }
  return true;
}

}  // namespace

extern "C" {
EXPORT int64_t adpt_layer_layout() { return sizeof(Layer); }
// Size of the workspace in bytes.
EXPORT int64_t adpt_layer_workspace(const Layer* s) {
  Arena<SCALAR> memory = {nullptr, 0};
  allocate_workspace<SCALAR>(*s, memory);
  return memory.used * sizeof(SCALAR);
}
// Return 1 if the layer was run, 0 if the evaluated vectors are out of date.
EXPORT int64_t adpt_layer_forward(const Layer* s) { return run<SCALAR>(*s); }
EXPORT int64_t adpt_layer_is_current(const Layer* s) { return is_current(*s); }
EXPORT int64_t adpt_layer_drive_layout() { return sizeof(DriveGradients); }
EXPORT int64_t adpt_layer_drive_workspace(const DriveGradients* s) {
  Arena<SCALAR> memory = {nullptr, 0};
  DriveMemory<SCALAR>().allocate(*s, memory);
  return memory.used * sizeof(SCALAR);
}
EXPORT void adpt_layer_drive_backward(const DriveGradients* s) {
  Arena<SCALAR> memory = {static_cast<SCALAR*>(s->workspace), 0};
  DriveMemory<SCALAR> at = {};
  at.allocate(*s, memory);
  differentiate_drive<SCALAR>(*s, at);
}
}
