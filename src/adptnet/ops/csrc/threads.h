// Threads of a call.

#pragma once

#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace {

// Call worker(0) to worker(count - 1), each in its own thread; those whose thread cannot be started run in the calling
// thread. Threads live for one call: calls share no state, and a fork loses none.
template <class Worker> void run_in_threads(int64_t count, Worker worker) {
  std::vector<std::thread> others;
  std::vector<int64_t> not_started;
  for (int64_t thread = 1; thread < count; ++thread) try {
      others.emplace_back(worker, thread);
    } catch (const std::system_error&) { not_started.push_back(thread); }
  worker(0);
  for (int64_t thread : not_started) worker(thread);
  for (std::thread& other : others) other.join();
}

}  // namespace
