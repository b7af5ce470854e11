// The arguments of a call. cpu.py reads the layout of these structures from this file (`ops/_structures.py`).
//
// SCALAR is float or double, see ../../csrc/simd.h. Booleans are 0 or 1.

#pragma once

#include <cstdint>

struct Sizes {
  int64_t batch, steps, heads;
  int64_t size;                // state dimension of one head
  int64_t features, width;     // entries of a row of the drive, of a row of the state
  int64_t tile, threads;       // tile: sequences per task
  int64_t rank, outer, inner;  // of the factors of K and V, see factored.h; 0 for a part that is missing
  int64_t planes;              // rotations per step, each with its own K and V
  int64_t depth;               // columns of K and V of a head: `size`, or all entries of the state
};

// The variant of the recurrence; see `Form` in form.py.
struct Options {
  int64_t complex_pairs, rotates, directions_in_drive, beta_in_drive;  // booleans
  int64_t rotation_aware, slow_memory, has_norm, has_fixed_dot;        // booleans
  int64_t phased, whole_state;                                         // booleans
  int64_t source, retraction;                                          // the enums of form.py
  double spike_threshold, norm_epsilon;
  double dot;       // of key and value, if `has_fixed_dot`
  double softness;  // with `whole_state`
};

// In the order of the Python call: drive, state, `Constants`, reset, lengths, `Factors`. Those not given are null.
struct Inputs {
  const SCALAR *drive, *state;
  const SCALAR *real, *imag, *weight, *bias, *beta, *feed_real, *feed_imag, *decay, *charge, *norm_weight, *norm_bias;
  const uint8_t* reset;
  const int64_t* lengths;
  const SCALAR *left, *right, *outer, *inner;  // if given, K and V are applied by these factors; K before V
};

struct Outputs {
  SCALAR* states;
  SCALAR* projections;  // (heads, steps, batch, 2 planes pad), followed by the dot products of all rows; may be null
};

// Of the first inputs, in their order. Those not required are null; that of the drive is always computed.
struct Gradients {
  SCALAR *drive, *state;
  SCALAR *real, *imag, *weight, *bias, *beta, *feed_real, *feed_imag, *decay, *charge, *norm_weight, *norm_bias;
};

struct Scan {
  Sizes sizes;
  Options options;
  Inputs inputs;
  Outputs outputs;
  const SCALAR* state_gradients;
  Gradients gradients;
  void* workspace;
};

namespace {

using T = SCALAR;

enum Source { identity, relu, spikes };

// Return whether K and V are applied by their factors.
inline bool is_factored(const Scan& s) { return s.sizes.rank || s.sizes.outer; }
// Return the number of matrices K and V of a head, of the vectors p and q of a row, and so on: two per plane.
inline int64_t half_count(const Scan& s) { return 2 * s.sizes.planes; }
// Return whether a step is that of product.h.
inline bool is_product(const Scan& s) { return s.options.rotates && (s.sizes.planes > 1 || s.options.whole_state); }
// Return whether there are products with K and V at all.
inline bool has_weights(const Scan& s) { return s.options.rotates && !s.options.directions_in_drive; }

}  // namespace
