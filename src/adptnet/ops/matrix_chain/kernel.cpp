// A frame of vectors carried through matrices one after another, for float and double.
//
// The frame is kept in panels, as products.h takes its weights: what a product writes is what the next one reads. Panels do
// not meet, so threads share them out and never wait.

#include "../adpt_scan/products.h"

// Mirrored field by field in cpu.py. Pointers without a type are to NUMBER: float or double, chosen when it is compiled.
struct Chain {
  int64_t batch, steps, size, count;  // count: columns of the frame
  int64_t parts, threads;             // parts: of the panels of one frame
  int64_t matrices_batch;             // stride from one sequence to the next
  const void *matrices, *frame;       // (batch, steps, size, size) and (batch, size, count)
  void *out, *workspace;
};

namespace {

template <class T> int64_t panels_of(const Chain& c) { return (c.count + panel<T> - 1) / panel<T>; }
template <class T> int64_t panels_of_part(const Chain& c) { return (panels_of<T>(c) + c.parts - 1) / c.parts; }
// Two frames: one that is read, one that is written.
template <class T> int64_t part_memory(const Chain& c) { return 2 * panels_of_part<T>(c) * c.size * panel<T>; }

template <class T> void run_part(const Chain& c, int64_t sequence, int64_t part, T* memory) {
  const int64_t n = c.size, each = n * panel<T>, most = panels_of_part<T>(c), begin = part * most;
  const int64_t panels = begin + most < panels_of<T>(c) ? most : panels_of<T>(c) - begin;
  if (panels <= 0) return;
  const T* matrix = static_cast<const T*>(c.matrices) + sequence * c.matrices_batch;
  const T* frame = static_cast<const T*>(c.frame) + sequence * n * c.count;
  T *from = memory, *to = memory + most * each;
  for (int64_t j = 0; j < panels; ++j)
    for (int64_t i = 0; i < n; ++i)
      for (int64_t l = 0; l < panel<T>; ++l) {
        const int64_t column = (begin + j) * panel<T> + l;
        from[j * each + i * panel<T> + l] = column < c.count ? frame[i * c.count + column] : T(0);
      }
  for (int64_t t = 0; t < c.steps; ++t, matrix += n * n, std::swap(from, to))
    for (int64_t j = 0; j < panels; ++j)
      product<T, false>(n, matrix, n, {n, 0, 0}, from + j * each, 1, to + j * each, panel<T>);
  T* out = static_cast<T*>(c.out) + sequence * n * c.count;
  for (int64_t j = 0; j < panels; ++j)
    for (int64_t i = 0; i < n; ++i)
      for (int64_t l = 0; l < panel<T> && (begin + j) * panel<T> + l < c.count; ++l)
        out[i * c.count + (begin + j) * panel<T> + l] = from[j * each + i * panel<T> + l];
}

template <class T> void run(const Chain& c) {
  in_threads(c.threads, [&](int64_t thread) {
    for (int64_t i = thread; i < c.batch * c.parts; i += c.threads)
      run_part<T>(c, i / c.parts, i % c.parts, static_cast<T*>(c.workspace) + thread * part_memory<T>(c));
  });
}

}  // namespace

extern "C" {
int64_t matrix_chain_layout() { return sizeof(Chain); }
int64_t matrix_chain_workspace(const Chain* c) { return c->threads * part_memory<NUMBER>(*c) * sizeof(NUMBER); }
void matrix_chain_run(const Chain* c) { run<NUMBER>(*c); }
}
