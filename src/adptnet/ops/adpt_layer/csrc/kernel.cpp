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
//   D, U         the matrices of the input gate, `gate_down` and `gate_up`
// Sizes and indices:
//   m, n, pad    the state dimension of a head, that of all heads, and m padded to whole cache lines
//   r, t, l      sequence, step, and sequence within a group of as many sequences as a SIMD vector has lanes
//   s            the arguments of the call, `struct Layer`

#include <algorithm>

#include "../../adpt_scan/csrc/directions.h"
#include "../../csrc/rows.h"

// Arguments of a call; cpu.py reads the layout from here. A `void*` points to SCALAR, which is float or double.
struct Layer {
  int64_t batch, steps, width, heads, size, output_width;  // size: state dimension of one head
  int64_t complex_pairs, rotates, source, retraction, rotation_aware;  // booleans, and the enums of adpt_scan/form.py
  int64_t gate_rank;                                                   // 0 without an input gate
  double spike_threshold;
  const void *x, *initial;                                             // initial: null for zeros
  const void *input_weight, *input_bias, *gain_real, *gain_imag;       // (n, width) and (n); imaginary parts and
  const void *real, *imag, *beta;                                      // biases may be null
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

// Sequences that are stepped together, and rows of a product whose inputs stay in the L1 cache.
template <class T> constexpr int64_t group_rows = lanes<T>;
constexpr int64_t block_rows = 32;

// ---- Products with unpacked weights: out[r, j] = sum_i x[r, i] W[j, i] + bias[j] ------------------------------------

// A matrix, (width, depth) in row-major order, and a bias, which may be null.
template <class T> struct Linear {
  const T *weights, *bias;
  int64_t depth, width;
};

// A tile of eight results. The order of the sum is the same for every tile, so a row does not depend on the others.
template <class T, int Count>
INLINE void multiply_tile_unpacked(Rows<const T> x, const Linear<T>& by, Rows<T> out) {
  constexpr int Outputs = 8 / Count;
  const int64_t depth = by.depth, whole = depth / lanes<T> * lanes<T>;
  const T* w[Outputs];
  for (int j = 0; j < Outputs; ++j) w[j] = by.weights + (j < by.width ? j : 0) * depth;
  Vec<T> sum[8] = {};
  for (int64_t i = 0; i < whole; i += lanes<T>) {
    Vec<T> x_i[Count];
#pragma GCC unroll 8
    for (int r = 0; r < Count; ++r) x_i[r] = load<T>(x.data + r * x.stride + i);
#pragma GCC unroll 8
    for (int j = 0; j < Outputs; ++j) {
      const Vec<T> w_i = load<T>(w[j] + i);
#pragma GCC unroll 8
      for (int r = 0; r < Count; ++r) sum[r * Outputs + j] += x_i[r] * w_i;
    }
  }
  T total[8];
  horizontal_sums<T, 8>(sum, total);
  for (int64_t i = whole; i < depth; ++i)
    for (int r = 0; r < Count; ++r)
      for (int j = 0; j < Outputs; ++j) total[r * Outputs + j] += x.data[r * x.stride + i] * w[j][i];
  for (int r = 0; r < Count; ++r)
    for (int j = 0; j < Outputs && j < by.width; ++j)
      out.data[r * out.stride + j] = total[r * Outputs + j] + (by.bias ? by.bias[j] : T(0));
}

template <class T>
__attribute__((noinline)) void multiply_unpacked(int64_t rows, Rows<const T> x, const Linear<T>& by, Rows<T> out) {
  // The results from column j on.
  auto multiply_from = [&](auto count, int64_t r, int64_t j) {
    const Linear<T> rest = {by.weights + j * by.depth, by.bias ? by.bias + j : nullptr, by.depth, by.width - j};
    multiply_tile_unpacked<T, count>({x.data + r * x.stride, x.stride}, rest,
                                     {out.data + r * out.stride + j, out.stride});
  };
  constexpr std::integral_constant<int, 1> one_row;
  constexpr std::integral_constant<int, 2> two_rows;
  for (int64_t first = 0; first < rows; first += block_rows) {
    const int64_t end = std::min(first + block_rows, rows);
    if (end - first == 1) {
      for (int64_t j = 0; j < by.width; j += 8) multiply_from(one_row, first, j);
      continue;
    }
    for (int64_t j = 0; j < by.width; j += 4)
      for (int64_t r = first; r < end; r += 2)
        multiply_from(two_rows, std::min(r, end - 2), j);  // the last pair may overlap the one before
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

template <class T> struct Softplus;
template <> struct Softplus<float> {
  static constexpr int exp_terms = 8, log_terms = 8;
  static constexpr float least = -87.0f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
  static constexpr int mantissa = 23, bias = 127;
};
template <> struct Softplus<double> {
  static constexpr int exp_terms = 14, log_terms = 17;
  static constexpr double least = -708.0, ln2_high = 0.693145751953125, ln2_low = 1.42860682030941723212e-6;
  static constexpr int mantissa = 52, bias = 1023;
};

// log(1 + exp(x)), and x itself above 20 as in torch. With e = exp(-|x|) it is max(x, 0) + 2 artanh(e / (2 + e)), whose
// argument is at most 1/3, so that the series of artanh needs few terms and no logarithm.
template <class T> INLINE Vec<T> softplus(Vec<T> x) {
  using Constant = Softplus<T>;
  typedef typename Types<T>::index Bits __attribute__((vector_size(VECTOR_BYTES)));
  Vec<T> y = x > 0 ? -x : x;
  y = y < Constant::least ? Vec<T>{} + Constant::least : y;
  const Vec<T> scaled = y * T(1.44269504088896340736) - T(0.5);
  const Bits power = __builtin_convertvector(scaled, Bits);  // rounds toward zero, hence to the nearest integer
  const Vec<T> whole = __builtin_convertvector(power, Vec<T>);
  const Vec<T> r = (y - whole * Constant::ln2_high) - whole * Constant::ln2_low;
  Vec<T> e = Vec<T>{} + 1;
  for (int i = Constant::exp_terms; i > 0; --i) e = 1 + e * r * (T(1) / T(i));  // Taylor's series of exp(r)
  const Bits shifted = (power + Constant::bias) << Constant::mantissa;
  Vec<T> two_to_power;
  std::memcpy(&two_to_power, &shifted, sizeof shifted);
  e *= two_to_power;
  const Vec<T> z = e / (e + 2), square = z * z;
  Vec<T> sum = {};
  for (int i = Constant::log_terms - 1; i >= 0; --i) sum = sum * square + T(2) / T(2 * i + 1);
  const Vec<T> smooth = (x > 0 ? x : Vec<T>{}) + z * sum;
  return x <= 20 ? smooth : x;  // NaN passes
}

// Multiply the projected inputs of `rows` rows by the gate softplus(U D' u + bias). `hidden` and `gate` have room for
// `block_rows` rows of D' u and of the gate.
template <class T> void apply_gate(const Layer& s, int64_t rows, T* u, T* hidden, T* gate) {
  const int64_t n = s.heads * s.size;
  for (int64_t first = 0; first < rows; first += block_rows) {
    const int64_t count = std::min(block_rows, rows - first);
    T* const block = u + first * n;
    multiply_unpacked<T>(count, {block, n}, {static_cast<const T*>(s.gate_down), nullptr, n, s.gate_rank},
                         {hidden, s.gate_rank});
    multiply_unpacked<T>(count, {hidden, s.gate_rank},
                         {static_cast<const T*>(s.gate_up), static_cast<const T*>(s.gate_bias), s.gate_rank, n},
                         {gate, n});
    const int64_t entries = count * n, whole = entries / lanes<T> * lanes<T>;
    for (int64_t i = 0; i < whole; i += lanes<T>)
      store<T>(block + i, load<T>(block + i) * softplus<T>(load<T>(gate + i)));
    for (int64_t i = whole; i < entries; ++i) {
      Vec<T> last = {};
      last[0] = gate[i];
      block[i] *= softplus<T>(last)[0];
    }
  }
}

// The drive: gain gate (B x + bias). `gain_imag` multiplies swapped pairs and has the sign of the first entry reversed.
template <class T> void compute_drive(const Layer& s, T* hidden, T* gate) {
  const int64_t n = s.heads * s.size, rows = s.batch * s.steps;
  T* const drive = static_cast<T*>(s.drive);
  const T *real = static_cast<const T*>(s.gain_real), *imag = static_cast<const T*>(s.gain_imag);
  multiply_unpacked<T>(rows, {static_cast<const T*>(s.x), s.width},
                       {static_cast<const T*>(s.input_weight), static_cast<const T*>(s.input_bias), s.width, n},
                       {drive, n});
  if (s.gate_rank) apply_gate<T>(s, rows, drive, hidden, gate);
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
  T *hidden, *gate;  // of a block of rows
};

template <class T> Workspace<T> allocate_workspace(const Layer& s, Arena<T>& memory) {
  Workspace<T> at = {};
  at.group.allocate(padded_size<T>(s.size), memory);
  if (s.gate_rank) {
    at.hidden = memory.allocate(block_rows * s.gate_rank);
    at.gate = memory.allocate(block_rows * s.heads * s.size);
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
  compute_drive<T>(s, workspace.hidden, workspace.gate);
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
}
