// Threads that go through operations together and wait for each other between them.
//
// OpenMP starts the threads, once for many operations. Its own waits put threads to sleep at once,
// so that they take no core from others while nothing is computed; but waking a thread takes longer
// than most waits within a step. Here a thread polls for a while before it sleeps, and polls less
// after a wait in which it had to sleep: on shared cores the thread that it waits for may need its
// core.
#pragma once

#include <atomic>
#include <cstdint>
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif
#include <linux/futex.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "lines.h"

namespace tandem {

// The state that a team shares. Each group of counters has a cache line of its own, so that threads
// that take items do not slow those that poll the round.
struct Team {
  alignas(kLineBytes) std::atomic<uint32_t> round{0};  // moves on when all members have come
  alignas(kLineBytes) std::atomic<int64_t> arrived{0}, asleep{0};
  alignas(kLineBytes) std::atomic<int64_t> taken{0};  // items taken since the last wait
};

// One thread of a team.
class Member {
 public:
  Member(Team& team, int64_t thread, int64_t count) : thread(thread), count(count), team_(team) {}

  const int64_t thread, count;

  // Return the first of this thread's part of `number` items and the first after it.
  int64_t first_of(int64_t number) const { return number * thread / count; }
  int64_t last_of(int64_t number) const { return number * (thread + 1) / count; }

  // Returns the number of an item that no thread has taken since the last wait, from 0 on.
  int64_t take() { return team_.taken.fetch_add(1, std::memory_order_relaxed); }

  // Returns when all members have called it; all see what the others wrote before.
  void wait() {
    const uint32_t round = team_.round.load(std::memory_order_relaxed);
    if (team_.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 < count) return look(round);
    team_.arrived.store(0, std::memory_order_relaxed);
    team_.taken.store(0, std::memory_order_relaxed);
    team_.round.store(round + 1);
    if (team_.asleep.load() > 0) futex(FUTEX_WAKE_PRIVATE, INT32_MAX);
  }

 private:
  static constexpr int kLeastLooks = 16, kMostLooks = 4096;  // the most take 0.2 ms

  void look(uint32_t round) {
    for (int look = 0; look < looks_; ++look) {
      if (team_.round.load(std::memory_order_acquire) != round) {
        looks_ = looks_ < kMostLooks ? 2 * looks_ : kMostLooks;
        return;
      }
#if defined(__x86_64__) || defined(__i386__)
      _mm_pause();
#elif defined(__aarch64__)
      asm volatile("isb");
#endif
    }
    looks_ = looks_ > kLeastLooks ? looks_ / 2 : kLeastLooks;
    team_.asleep.fetch_add(1);
    while (team_.round.load() == round) futex(FUTEX_WAIT_PRIVATE, round);
    team_.asleep.fetch_sub(1);
  }

  void futex(int operation, uint32_t value) {
    static_assert(sizeof team_.round == sizeof(uint32_t) &&
                      std::atomic<uint32_t>::is_always_lock_free,
                  "as the kernel reads it");
    syscall(SYS_futex, &team_.round, operation, value, nullptr, nullptr, 0);
  }

  Team& team_;
  int looks_ = kMostLooks;
};

// Calls `work` with a member on each of up to `num_threads` threads.
template <class Work>
void with_team(int64_t num_threads, const Work& work) {
  Team team;
  if (num_threads <= 1) {
    Member member(team, 0, 1);
    work(member);
    return;
  }
#pragma omp parallel num_threads(static_cast<int>(num_threads))
  {
    Member member(team, omp_get_thread_num(), omp_get_num_threads());
    work(member);
  }
}

}  // namespace tandem
