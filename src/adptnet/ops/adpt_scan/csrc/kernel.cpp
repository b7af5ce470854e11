// The ADPT recurrence, forward and backward, for float and double: work of the threads, and entry points. The
// derivation is in ../README.md.
//
//   arguments.h         the arguments of a call
//   plane.h             the scalars of one rotation, forward and backward
//   directions.h        from the vectors of a row to these scalars
//   product.h           a step with several rotations, or with planes of the whole state
//   variants.h          LayerNorm of the directions, fixed dot product, slow memory, ReLU and spikes
//   factored.h          products with K and V in factored form
//   sums.h, task.h      gradients that are summed over rows; memory and addresses of a task
//   weights.h           products with K and V
//   forward.h, single_sequence.h, backward.h, whole_state.h   the loops over time
//
// s is the arguments of the call, `struct Scan`. SIMD uses GCC and Clang vector extensions only.

#include <vector>

#include "../../csrc/threads.h"
#include "backward.h"
#include "single_sequence.h"
#include "whole_state.h"

namespace {

// Benchmarks only: run the matrix products of all steps and nothing else, as a baseline.
enum Products { forward_products, backward_products, weight_products, not_only_products };

void run_products(const Task& task, const Weights& weights, const Weights& transposed, Products which) {
  const Scan& s = task.s;
  const int64_t m = task.m, pad = task.pad();
  const int64_t block_steps = which == forward_products ? 1 : steps_per_block(s, task.rows);
  for (int64_t i = 0; i < block_steps * task.rows * task.x_stride(); ++i) task.source[i] = 1;
  for (int64_t i = 0; which != forward_products && i < block_steps * task.rows * task.gradient_stride(); ++i)
    task.gradients[i] = 1;
  for (int64_t t = 0; t < s.sizes.steps; ++t)
    if (which == forward_products)
      project(task, weights, task.rows, task.projections);
    else if (which == backward_products)
      for (int64_t plane = 0; plane < s.sizes.planes; ++plane)
        matmul<T, false>(task.rows, {task.gradients + plane * 2 * pad, task.gradient_stride()}, {m, pad - m, m},
                         {transposed.panels + plane * Weights::plane_entries(s), pad / panel_width<T>},
                         {task.previous_g, pad});
    else if (t % block_steps == 0)
      add_weight_gradients(task, std::min(block_steps, s.sizes.steps - t) * task.rows);
}

template <bool Pairs>
void run_task(Task& task, bool backward, const Weights& weights, const Weights& transposed) {
  task.load_constants();
  if (backward)
    run_backward<Pairs>(task, weights, transposed);
  else if (is_single_sequence(task.s))
    run_single_sequence<Pairs>(task, weights);
  else
    run_forward<Pairs>(task, weights);
}

// Planes of the whole state: run the tasks of all heads of a tile.
template <bool Pairs>
void run_together(Heads& heads, bool backward, const std::vector<Weights>& weights,
                  const std::vector<Weights>& transposed) {
  for (Task& task : heads) task.load_constants();
  if (backward)
    run_backward_together<Pairs>(heads, weights, transposed);
  else
    run_forward_together<Pairs>(heads, weights);
}

// Sizes in entries of T.
int64_t task_memory(const Scan& s, bool backward) {
  Arena<T> memory = {nullptr, 0};
  const int64_t together = s.options.whole_state ? s.sizes.heads : 1;
  for (int64_t head = 0; head < together; ++head) Task(s, head, 0, backward, memory);
  if (s.options.whole_state) WholeState{}.allocate(s, backward, memory);
  return memory.used;
}
int64_t weight_memory(const Scan& s) {
  Arena<T> memory = {nullptr, 0};
  Weights{}.allocate(s, memory);
  return has_weights(s) ? memory.used : 0;
}
// Of the sums in double of all tasks, rounded up as `Arena` does.
int64_t totals_memory(const Scan& s, int64_t tasks) {
  const int64_t count = tasks * sum_count(s) * padded_size<T>(s.sizes.size) * int64_t(sizeof(double) / sizeof(T));
  return (count + 15) / 16 * 16;
}
int64_t tile_count(const Scan& s) { return (s.sizes.batch + s.sizes.tile - 1) / s.sizes.tile; }

// The workspace holds the packed weights of all heads; in the backward, the sums of all tasks and the weight gradients
// of all threads; and the memory of the task that each thread runs.
void run(const Scan& s, bool backward, Products products = not_only_products) {
  const int64_t heads = s.sizes.heads, threads = s.sizes.threads, tiles = tile_count(s), tasks = tiles * heads;
  Arena<T> memory = {static_cast<T*>(s.workspace), 0};
  std::vector<Weights> weights(heads), transposed(heads);
  for (int64_t h = 0; has_weights(s) && h < heads; ++h) {
    weights[h].allocate(s, memory);
    weights[h].for_matvec = s.sizes.tile == 1 && !backward;  // the backward projects many steps at once
    if (!backward || !s.outputs.projections) pack_weights(s, h, false, weights[h]);
    if (!backward) continue;
    transposed[h].allocate(s, memory);
    pack_weights(s, h, true, transposed[h]);
  }
  const int64_t totals_size = backward ? totals_memory(s, tasks) : 0, sums_size = weight_sum_size(s);
  double* const totals = reinterpret_cast<double*>(memory.allocate(totals_size));
  if (totals_size) std::memset(totals, 0, totals_size * sizeof(T));
  T* const weight_sums = backward && sums_size ? memory.allocate(threads * sums_size) : nullptr;
  const int64_t each = task_memory(s, backward);
  run_in_threads(threads, [&](int64_t thread) {
    if (weight_sums) std::memset(weight_sums + thread * sums_size, 0, sums_size * sizeof(T));
    for (int64_t i = thread; i < (s.options.whole_state ? tiles : tasks); i += threads) {
      const int64_t head = i / tiles;
      Arena<T> own = {memory.base + memory.used + thread * each, 0};
      if (s.options.whole_state) {
        WholeState whole;
        whole.allocate(s, backward, own);
        Heads together;
        together.reserve(heads);
        for (int64_t h = 0; h < heads; ++h) {
          Task& task = together.emplace_back(s, h, i * s.sizes.tile, backward, own);
          task.whole = &whole;
          if (backward) task.sums.totals = totals + (h * tiles + i) * sum_count(s) * task.pad();
          if (weight_sums) task.weight_sums = weight_sums + thread * sums_size + h * (sums_size / heads);
        }
        s.options.complex_pairs ? run_together<true>(together, backward, weights, transposed)
                                : run_together<false>(together, backward, weights, transposed);
        continue;
      }
      Task task(s, head, i % tiles * s.sizes.tile, backward, own);
      if (backward) task.sums.totals = totals + i * sum_count(s) * task.pad();
      if (weight_sums) task.weight_sums = weight_sums + thread * sums_size + head * (sums_size / heads);
      if (products != not_only_products)
        run_products(task, weights[head], transposed[head], products);
      else
        s.options.complex_pairs ? run_task<true>(task, backward, weights[head], transposed[head])
                                : run_task<false>(task, backward, weights[head], transposed[head]);
    }
  });
  if (s.gradients.weight) reduce_weight_gradients(s, weight_sums);
  if (backward) reduce_totals(s, totals, tiles);
}

}  // namespace

extern "C" {
EXPORT int64_t adpt_scan_layout() { return sizeof(Scan); }
// Size of the workspace in bytes. It depends on sizes and options only.
EXPORT int64_t adpt_scan_workspace(const Scan* s, int64_t backward) {
  const int64_t weights = s->sizes.heads * weight_memory(*s) * (backward ? 2 : 1);
  const int64_t each = task_memory(*s, backward) + (backward ? weight_sum_size(*s) : 0);
  const int64_t totals = backward ? totals_memory(*s, tile_count(*s) * s->sizes.heads) : 0;
  return (weights + s->sizes.threads * each + totals) * sizeof(SCALAR);
}
EXPORT void adpt_scan_forward(const Scan* s) { run(*s, false); }
EXPORT void adpt_scan_backward(const Scan* s) { run(*s, true); }
EXPORT void adpt_scan_products(const Scan* s, int64_t which) { run(*s, which != forward_products, Products(which)); }
}
