// A_T ... A_2 A_1 F: a frame of vectors multiplied by a sequence of matrices, for float and double.
//
// The frame is stored in panels, the format in which panels.h reads its weights, so each product writes what the next
// one reads. Panels are independent: threads share them without synchronisation.
//
//   A, F      `matrices` and `frame`
//   n         the number of rows of the frame, `size`
//   i, j, l   row, panel, and column within a panel
//   c         the arguments of the call, `struct Chain`

#include "../../csrc/panels.h"
#include "../../csrc/threads.h"

// Arguments of a call; cpu.py reads the layout from here. A `void*` points to SCALAR, which is float or double.
struct Chain {
  int64_t batch, steps, size, count;  // count: columns of the frame
  int64_t parts, threads;             // parts: tasks into which the panels of one frame are divided
  int64_t matrices_batch;             // stride from one sequence to the next
  const void *matrices, *frame;       // (batch, steps, size, size) and (batch, size, count)
  void *out, *workspace;
};

namespace {

template <class T> int64_t panel_count(const Chain& c) { return (c.count + panel_width<T> - 1) / panel_width<T>; }
template <class T> int64_t panels_per_part(const Chain& c) { return (panel_count<T>(c) + c.parts - 1) / c.parts; }
// Memory of a task: two frames, one to read and one to write.
template <class T> int64_t part_memory(const Chain& c) { return 2 * panels_per_part<T>(c) * c.size * panel_width<T>; }

template <class T> void run_part(const Chain& c, int64_t sequence, int64_t part, T* memory) {
  const int64_t n = c.size, each = n * panel_width<T>, most = panels_per_part<T>(c), begin = part * most;
  const int64_t panels = begin + most < panel_count<T>(c) ? most : panel_count<T>(c) - begin;
  if (panels <= 0) return;
  const T* matrix = static_cast<const T*>(c.matrices) + sequence * c.matrices_batch;
  const T* frame = static_cast<const T*>(c.frame) + sequence * n * c.count;
  T *from = memory, *to = memory + most * each;
  for (int64_t j = 0; j < panels; ++j)
    for (int64_t i = 0; i < n; ++i)
      for (int64_t l = 0; l < panel_width<T>; ++l) {
        const int64_t column = (begin + j) * panel_width<T> + l;
        from[j * each + i * panel_width<T> + l] = column < c.count ? frame[i * c.count + column] : T(0);
      }
  for (int64_t t = 0; t < c.steps; ++t, matrix += n * n, std::swap(from, to))
    for (int64_t j = 0; j < panels; ++j)
      matmul<T, false>(n, {matrix, n}, {n, 0, 0}, {from + j * each, 1}, {to + j * each, panel_width<T>});
  T* out = static_cast<T*>(c.out) + sequence * n * c.count;
  for (int64_t j = 0; j < panels; ++j)
    for (int64_t i = 0; i < n; ++i)
      for (int64_t l = 0; l < panel_width<T> && (begin + j) * panel_width<T> + l < c.count; ++l)
        out[i * c.count + (begin + j) * panel_width<T> + l] = from[j * each + i * panel_width<T> + l];
}

template <class T> void run(const Chain& c) {
  run_in_threads(c.threads, [&](int64_t thread) {
    for (int64_t i = thread; i < c.batch * c.parts; i += c.threads)
      run_part<T>(c, i / c.parts, i % c.parts, static_cast<T*>(c.workspace) + thread * part_memory<T>(c));
  });
}

}  // namespace

extern "C" {
EXPORT int64_t matrix_chain_layout() { return sizeof(Chain); }
EXPORT int64_t matrix_chain_workspace(const Chain* c) { return c->threads * part_memory<SCALAR>(*c) * sizeof(SCALAR); }
EXPORT void matrix_chain_run(const Chain* c) { run<SCALAR>(*c); }
}
