// Software prefetch, in small portions between the parts of a computation.

#pragma once

#include <algorithm>

#include "simd.h"

namespace {

// Queue of memory regions that the next steps need. A product issues the prefetches between its register tiles, a few
// cache lines at a time: issued all at once they would wait for each other. They go to L2, so that L1 keeps the
// operands of the product.
class Prefetcher {
 public:
  void clear() { regions = lines = region = row = line = 0; }
  // Queue `count` entries of each of `rows` rows.
  template <class T> INLINE void add(const T* from, int64_t count, int64_t rows = 1, int64_t stride = 0) {
    const int64_t lines_per_row = (count * int64_t(sizeof(T)) + 63) / 64;
    if (!lines_per_row) return;
    queue[regions++] = {reinterpret_cast<const char*>(from), lines_per_row, rows, stride * int64_t(sizeof(T))};
    lines += rows * lines_per_row;
  }
  // Divide the queue into `parts` shares, one for each call of `issue_share`.
  void split(int64_t parts) { share = parts > 0 ? (lines + parts - 1) / parts : lines; }
  void issue_share() { issue(share); }
  void issue_rest() { issue(lines); }

 private:
  void issue(int64_t count) {
    while (count > 0 && region < regions) {
      const Region& from = queue[region];
      const char* const begin = from.begin + row * from.stride;
      const int64_t end = std::min(line + count, from.lines);
      count -= end - line;
      for (; line < end; ++line) __builtin_prefetch(begin + 64 * line, 0, 2);
      if (line < from.lines) return;
      line = 0;
      if (++row == from.rows) {
        row = 0;
        ++region;
      }
    }
  }

  struct Region {
    const char* begin;
    int64_t lines, rows, stride;  // cache lines per row, number of rows, bytes from one row to the next
  };
  Region queue[8];  // no step adds more
  int64_t regions = 0, lines = 0;
  int64_t region = 0, row = 0, line = 0;  // position of the next prefetch
  int64_t share = 0;                      // lines per call of `issue_share`
};

}  // namespace
