// A short call of an ADPT layer in one go: drive, recurrence and read-out, for float and double. Forward only.
//
// Weights are read as torch stores them, (out, in) in row-major order: packing them, as adpt_scan does, costs more
// than a few steps. Nothing of the size of a matrix is kept between calls, so a weight that changed is always seen. The
// vectors that are evaluated from other parameters (eigenvalues, gain, beta) come with those parameters (`sources`) and
// a copy of their bytes: a call whose copy is out of date computes nothing.
//
// Letters, as in ../../adpt_scan/csrc/plane.h:
//   x, u         the state before the step, and the drive
//   p, q         the projections K x and V x; k and w are unit vectors along p and along the rest of q
// Sizes and indices:
//   m, n, pad    the state dimension of a head, that of all heads, and m padded to whole cache lines
//   r, t, l      sequence, step, and sequence within a group of as many sequences as a SIMD vector has lanes
//   s            the arguments of the call, `struct Layer`

#include "../../csrc/panels.h"
#include "../../adpt_scan/csrc/plane.h"

// Arguments of a call, mirrored field by field in cpu.py. A `void*` points to SCALAR, which is float or double.
struct Layer {
  int64_t batch, steps, width, heads, size, output_width;  // size: state dimension of one head
  int64_t complex_pairs, rotates, source, retraction, rotation_aware;  // booleans, and the enums of adpt_scan/form.py
  double spike_threshold;
  const void *x, *initial;                                             // initial: null for zeros
  const void *input_weight, *input_bias, *gain_real, *gain_imag;       // (n, width), (n); imaginary parts and biases may
  const void *real, *imag, *beta;                                      // be null
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

// Sequences that are stepped together, and rows of a product whose inputs stay in the L1 cache.
template <class T> constexpr int64_t group_rows = lanes<T>;
constexpr int64_t block_rows = 32;

// ---- Products with unpacked weights: out[r, j] = sum_i x[r, i] W[j, i] + bias[j] ------------------------------------

// A tile of eight results. The order of the sum is the same for every tile, so a row does not depend on the others.
template <class T, int Rows>
INLINE void multiply_tile_unpacked(const T* x, int64_t x_stride, const T* weights, int64_t depth, int64_t count,
                                   const T* bias, T* out, int64_t out_stride) {
  constexpr int Outputs = 8 / Rows;
  const int64_t whole = depth / lanes<T> * lanes<T>;
  const T* w[Outputs];
  for (int j = 0; j < Outputs; ++j) w[j] = weights + (j < count ? j : 0) * depth;
  Vec<T> sum[8] = {};
  for (int64_t i = 0; i < whole; i += lanes<T>) {
    Vec<T> x_i[Rows];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) x_i[r] = load<T>(x + r * x_stride + i);
#pragma GCC unroll 8
    for (int j = 0; j < Outputs; ++j) {
      const Vec<T> w_i = load<T>(w[j] + i);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) sum[r * Outputs + j] += x_i[r] * w_i;
    }
  }
  T total[8];
  horizontal_sums<T, 8>(sum, total);
  for (int64_t i = whole; i < depth; ++i)
    for (int r = 0; r < Rows; ++r)
      for (int j = 0; j < Outputs; ++j) total[r * Outputs + j] += x[r * x_stride + i] * w[j][i];
  for (int r = 0; r < Rows; ++r)
    for (int j = 0; j < Outputs && j < count; ++j)
      out[r * out_stride + j] = total[r * Outputs + j] + (bias ? bias[j] : T(0));
}

template <class T>
__attribute__((noinline)) void multiply_unpacked(int64_t rows, const T* x, int64_t x_stride, const T* weights,
                                                 int64_t depth, int64_t width, const T* bias, T* out,
                                                 int64_t out_stride) {
  for (int64_t first = 0; first < rows; first += block_rows) {
    const int64_t end = std::min(first + block_rows, rows);
    if (end - first == 1) {
      for (int64_t j = 0; j < width; j += 8)
        multiply_tile_unpacked<T, 1>(x + first * x_stride, x_stride, weights + j * depth, depth, width - j,
                                     bias ? bias + j : nullptr, out + first * out_stride + j, out_stride);
      continue;
    }
    for (int64_t j = 0; j < width; j += 4)
      for (int64_t r = first; r < end; r += 2) {
        const int64_t from = std::min(r, end - 2);  // the last pair may overlap the one before
        multiply_tile_unpacked<T, 2>(x + from * x_stride, x_stride, weights + j * depth, depth, width - j,
                                     bias ? bias + j : nullptr, out + from * out_stride + j, out_stride);
      }
  }
}

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
      for (int64_t i = 0; i < count * pad; i += lanes<T>) store<T>(at.source + i, apply_source<T>(s, load<T>(at.x + i)));
      source = at.source;
    }
    for (int64_t half = 0; half < 2; ++half)
      multiply_unpacked<T>(
          count, source, pad, static_cast<const T*>(s.directions[2 * head + half]), s.size, s.size,
          s.direction_biases ? static_cast<const T*>(s.direction_biases[2 * head + half]) : nullptr,
          at.projections + half * pad, 2 * pad);
    auto vectors = [&](int64_t l) -> RowVectors<T> {
      return {at.projections + l * 2 * pad, at.x + l * pad, s.rotation_aware ? at.u + l * pad : nullptr};
    };
    compute_directions<T, N, Pairs>(spectrum, vectors, count, pad, at.dots, false, at.scratch, group);
    const N beta = N{} + static_cast<const T*>(s.beta)[head];
    const RotationScalars<N> plane = rotation_scalars<N>(s.retraction, group.plane, beta);
    by = {group.on_p * (plane.y1 + group.on_k * plane.y2), group.on_q * plane.y2,
          group.on_p * (plane.m1 + group.on_k * plane.m2), group.on_q * plane.m2};  // coefficients of p and q
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

// The drive: gain (B x + bias). `gain_imag` multiplies swapped pairs and has the sign of the first entry reversed.
template <class T> void compute_drive(const Layer& s) {
  const int64_t n = s.heads * s.size, rows = s.batch * s.steps;
  T* const drive = static_cast<T*>(s.drive);
  const T *real = static_cast<const T*>(s.gain_real), *imag = static_cast<const T*>(s.gain_imag);
  multiply_unpacked<T>(rows, static_cast<const T*>(s.x), s.width, static_cast<const T*>(s.input_weight), s.width, n,
                       static_cast<const T*>(s.input_bias), drive, n);
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

template <class T> Memory<T> allocate_group(const Layer& s, Arena<T>& memory) {
  Memory<T> at;
  at.allocate(padded_size<T>(s.size), memory);
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
  const Memory<T> at = allocate_group<T>(s, memory);
  std::memset(at.projections, 0, group_rows<T> * 2 * padded_size<T>(s.size) * sizeof(T));  // the padding stays zero
  compute_drive<T>(s);
  for (int64_t first = 0; first < s.batch; first += group_rows<T>) {
    const int count = int(std::min(group_rows<T>, s.batch - first));
    s.complex_pairs ? run_group<T, true>(s, at, first, count) : run_group<T, false>(s, at, first, count);
  }
  if (s.readout_weight)
    multiply_unpacked<T>(s.batch * s.steps, static_cast<const T*>(s.states), s.heads * s.size,
                         static_cast<const T*>(s.readout_weight), s.heads * s.size, s.output_width,
                         static_cast<const T*>(s.readout_bias), static_cast<T*>(s.outputs), s.output_width);
  return true;
}

}  // namespace

extern "C" {
EXPORT int64_t adpt_layer_layout() { return sizeof(Layer); }
// Size of the workspace in bytes.
EXPORT int64_t adpt_layer_workspace(const Layer* s) {
  Arena<SCALAR> memory = {nullptr, 0};
  allocate_group<SCALAR>(*s, memory);
  return memory.used * sizeof(SCALAR);
}
// Return 1 if the layer was run, 0 if the evaluated vectors are out of date.
EXPORT int64_t adpt_layer_forward(const Layer* s) { return run<SCALAR>(*s); }
}
