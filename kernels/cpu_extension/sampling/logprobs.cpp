// Log probabilities of drawn tokens and of the likeliest ids on the CPU, a row at a time; the
// definition is kernels/sampling/logprobs/reference.py. A row's bits depend on the row alone.
#include <atomic>
#include <new>

#include "export.h"
#include "sampling/logits.h"

namespace tandem {
namespace {

// This struct mirrors `_Telling` in kernels/sampling/logprobs/cpu_extension.py: Q rows out of R.
struct Telling {
  int64_t num_rows, vocab_size, row_stride, num_threads;
  int64_t type;            // 0 float32, 1 bfloat16, 2 float16
  int64_t num_top;         // K
  const void* logits;      // [R, row_stride]
  const int64_t* row;      // [Q], indices of rows of `logits`
  const int64_t* token;    // [R], the drawn tokens
  float* chosen;           // [Q], written
  int64_t* top_token;      // [Q, K], written
  float* top;              // [Q, K], written
};

// Puts the `count` best logits first in `best`, in falling order, the lower id first on ties.
// Logits of -infinity come last, and only if fewer than `count` are finite.
template <class T>
void rank_best(const T* logits, int64_t size, int64_t count, std::vector<Logit>* best) {
  collect_best(logits, size, count, best);
  if (static_cast<int64_t>(best->size()) < count) {
    sweep(logits, 0, size, [&](int64_t at, Floats x) {
      for (int lane = 0; lane < kLanes && at + lane < size; ++lane)
        if (!(x[lane] > kNever)) best->push_back({x[lane], static_cast<int32_t>(at + lane)});
    });
  }
  std::partial_sort(best->begin(), best->begin() + count, best->end(), [](Logit a, Logit b) {
    return a.value > b.value || (a.value == b.value && a.id < b.id);
  });
}

// Writes the results of the row at `place` of the Q rows.
template <class T>
void tell(const Telling& telling, int64_t place, std::vector<Logit>* scratch) {
  const int64_t row = telling.row[place], size = telling.vocab_size, count = telling.num_top;
  const T* logits = static_cast<const T*>(telling.logits) + row * telling.row_stride;
  int64_t* top_token = telling.top_token + place * count;
  float* top = telling.top + place * count;
  const Best best = best_of(logits, size);
  if (!std::isfinite(best.logit)) {  // such a row has no probabilities
    const float nan = std::numeric_limits<float>::quiet_NaN();
    telling.chosen[place] = nan;
    std::fill_n(top, count, nan);
    for (int64_t at = 0; at < count; ++at) top_token[at] = at;
    return;
  }
  const Scale scale{best.logit, 1.0f};
  constexpr float kAll = std::numeric_limits<float>::lowest();
  const double sum = masses(logits, size, scale, kAll, kAll).total;
  // The best is subtracted before the sum's logarithm: the difference is near 0 for ids that
  // matter, where float32 is most precise.
  const float log_sum = static_cast<float>(std::log(sum));
  const auto of = [&](float logit) { return scale(logit) - log_sum; };
  telling.chosen[place] = of(load_some(logits + telling.token[row], 1)[0]);
  if (count == 0) return;
  rank_best(logits, size, count, scratch);
  for (int64_t at = 0; at < count; ++at) {
    top_token[at] = (*scratch)[at].id;
    top[at] = of((*scratch)[at].value);
  }
}

// Writes the results of all rows; returns false if memory ran out.
template <class T>
bool tell_all(const Telling& telling) {
  const bool is_large =
      telling.num_rows > 1 && telling.num_rows * telling.vocab_size > kSerialElements;
  std::atomic<bool> is_told{true};
#pragma omp parallel num_threads(static_cast<int>(telling.num_threads)) if (is_large)
  {
    std::vector<Logit> scratch;
#pragma omp for schedule(dynamic)
    for (int64_t place = 0; place < telling.num_rows; ++place) {
      try {
        tell<T>(telling, place, &scratch);
      } catch (const std::bad_alloc&) {  // no exception may leave the region
        is_told = false;
      }
    }
  }
  return is_told;
}

}  // namespace
}  // namespace tandem

// Python compares this size with that of its own struct before the first call.
TANDEM_EXPORT int64_t tandem_sampling_telling_bytes() { return sizeof(tandem::Telling); }

// Computes log probabilities; returns false if memory ran out.
TANDEM_EXPORT bool tandem_sampling_tell(const tandem::Telling* telling) {
  const auto tell = telling->type == 0   ? tandem::tell_all<float>
                    : telling->type == 1 ? tandem::tell_all<tandem::BFloat16>
                                         : tandem::tell_all<tandem::Float16>;
  return tell(*telling);
}
