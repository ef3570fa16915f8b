// Draws a step's tokens on the CPU: kernels/sampling/reference.py is the definition.
//
// A row whose token the rounding of float32 could change is not drawn here: its state says so, and
// the caller leaves it to the definition's own arithmetic. A row's token depends on the row alone.
#include <new>

#include "export.h"
#include "sampling/logits.h"

namespace tandem {
namespace {

// This struct mirrors `_Draws` in kernels/sampling/cpu_extension.py: R rows, A allowed
// ids, B biases, P penalties.
struct Draws {
  int64_t num_rows, vocab_size, row_stride, num_threads;
  int64_t type;  // 0 float32, 1 bfloat16, 2 float16
  double least_temperature, top_p_slack, least_mass;
  const void* logits;          // [R, row_stride]
  const float* temperature;    // [R]
  const int32_t* top_k;        // [R]
  const float* top_p;          // [R]
  const float* least_scaled;   // [R], lowest scaled logit that min_p keeps; may be null
  const int64_t* seed;         // [R]
  const int64_t* position;     // [R]
  const int64_t* choice;       // [R]
  const int64_t* first_allowed;  // [R + 1], each row's first allowed id; null where all rows may draw all
  const int64_t* allowed_token;  // [A], in the order of rows
  const int64_t* first_bias;   // [R + 1], each row's first bias; null without any
  const int64_t* bias_token;   // [B], in the order of rows
  const float* bias_value;     // [B]
  const int64_t* penalty;      // [R], each row's place among P, or -1; null without any
  const float* repetition;     // [P]
  const float* frequency;      // [P]
  const float* presence;       // [P]
  const int64_t* prompt_len;   // [P]
  const int64_t* history_len;  // [P]
  const int32_t* history;      // [P, history_stride]
  int64_t history_stride;
  int64_t* token;  // [R], written
  int8_t* state;   // [R], written, a State each

  bool is_confined(int64_t row) const {
    return first_allowed != nullptr && first_allowed[row] < first_allowed[row + 1];
  }

  bool has_edits(int64_t row) const {
    return is_confined(row) || (first_bias != nullptr && first_bias[row] < first_bias[row + 1]) ||
           (penalty != nullptr && penalty[row] >= 0);
  }
};

// The outcome of a row: without a finite best it is invalid; kUndecided leaves it to the
// definition; kNoSuchId means that an edit names an id or a place of a history that does not exist.
enum State : int8_t { kInvalid = 0, kDrawn = 1, kUndecided = 2, kNoSuchId = 3 };

struct Scratch {
  std::vector<Logit> best;
  std::vector<float> edited;
  std::vector<float> kept;
  std::vector<int32_t> counts;  // [V], all 0 between rows, or empty
};

// Returns a logit after penalties, with the bits of PyTorch, which rounds each product before it is
// subtracted: `volatile` keeps the compiler from fusing the two.
float penalised(float logit, int32_t count, const Draws& draws, int64_t place) {
  if (!std::isfinite(logit)) return logit;
  const float repetition = draws.repetition[place];
  const volatile float frequent = draws.frequency[place] * static_cast<float>(count);
  const volatile float present = draws.presence[place] * static_cast<float>(std::min(count, 1));
  const volatile float repeated = logit > 0.0f ? logit / repetition : logit * repetition;
  const float after = (repeated - frequent) - present;
  constexpr float kMost = std::numeric_limits<float>::max();
  return std::min(std::max(after, -kMost), kMost);
}

// Penalises each id of a history once: a count of -1 marks the ids that are done.
void penalise(const Draws& draws, int64_t place, Scratch* scratch) {
  const int32_t* history = draws.history + place * draws.history_stride;
  const int64_t end = draws.history_len[place];
  std::vector<int32_t>& counts = scratch->counts;
  counts.resize(draws.vocab_size);
  for (int64_t at = draws.prompt_len[place]; at < end; ++at) ++counts[history[at]];
  for (int64_t at = 0; at < end; ++at) {
    int32_t& count = counts[history[at]];
    float& logit = scratch->edited[history[at]];
    if (count >= 0) logit = penalised(logit, count, draws, place);
    count = -1;
  }
  for (int64_t at = 0; at < end; ++at) counts[history[at]] = 0;
}

// Takes all logits but those of a row's allowed ids, which exist, to -infinity; NaN and +infinity
// become NaN.
void rule_out_others(const Draws& draws, int64_t row, Scratch* scratch) {
  const int64_t begin = draws.first_allowed[row], end = draws.first_allowed[row + 1];
  const int64_t* token = draws.allowed_token;
  std::vector<float>& edited = scratch->edited;
  scratch->kept.clear();
  for (int64_t at = begin; at < end; ++at) scratch->kept.push_back(edited[token[at]]);
  for (int64_t id = 0; id < draws.vocab_size; ++id) edited[id] += kNever;
  for (int64_t at = begin; at < end; ++at) edited[token[at]] = scratch->kept[at - begin];
}

// Computes a row's logits after its edits in `scratch->edited`. Returns false if an edit names an
// id or a place of a history that does not exist.
template <class T>
bool edit(const Draws& draws, int64_t row, const T* logits, Scratch* scratch) {
  const int64_t size = draws.vocab_size;
  const auto is_known = [size](int64_t id) { return 0 <= id && id < size; };
  std::vector<float>& edited = scratch->edited;
  edited.resize(size + kLanes);
  sweep(logits, 0, size, [&](int64_t at, Floats x) { store(edited.data() + at, x); });
  if (draws.is_confined(row)) {
    const int64_t* token = draws.allowed_token;
    if (!std::all_of(token + draws.first_allowed[row], token + draws.first_allowed[row + 1], is_known))
      return false;
    rule_out_others(draws, row, scratch);
  }
  if (draws.first_bias != nullptr) {
    for (int64_t at = draws.first_bias[row]; at < draws.first_bias[row + 1]; ++at) {
      if (!is_known(draws.bias_token[at])) return false;
      edited[draws.bias_token[at]] += draws.bias_value[at];
    }
  }
  if (draws.penalty != nullptr && draws.penalty[row] >= 0) {
    const int64_t place = draws.penalty[row];
    const int64_t prompt = draws.prompt_len[place], end = draws.history_len[place];
    if (prompt < 0 || prompt > end || end > draws.history_stride) return false;
    const int32_t* history = draws.history + place * draws.history_stride;
    if (!std::all_of(history, history + end, is_known)) return false;
    penalise(draws, place, scratch);
  }
  return true;
}

// Returns a row's noise, with words from Philox4x32-10 (Salmon et al., SC 2011).
Noise noise_of(uint64_t seed, uint32_t position, uint32_t choice) {
  Noise noise{{position, choice, 0, 0}};
  uint32_t* c = noise.words;
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = 0xd2511f53ull * c[0], second = 0xcd9e8d57ull * c[2];
    const uint32_t odd = c[1], last = c[3];
    c[0] = static_cast<uint32_t>(second >> 32) ^ odd ^ key[0];
    c[1] = static_cast<uint32_t>(second);
    c[2] = static_cast<uint32_t>(first >> 32) ^ last ^ key[1];
    c[3] = static_cast<uint32_t>(first);
    key[0] += 0x9e3779b9u;
    key[1] += 0xbb67ae85u;
  }
  return noise;
}

enum class Place { kInside, kOutside, kUnsure };

// Returns whether an id with `masses.above` above it lies in the nucleus that holds `share` of the
// total, or that the errors of the masses leave it open.
Place place_in_nucleus(const Masses& masses, const Draws& draws, double share) {
  constexpr double kError = 5e-6;  // relative, of exponentials, their arguments and sums
  const double missed = draws.vocab_size * draws.least_mass;  // the definition truncates less
  const double total = masses.total * kError + missed, above = masses.above * kError + missed;
  if (masses.above + above < share * (masses.total - total)) return Place::kInside;
  if (masses.above - above >= share * (masses.total + total)) return Place::kOutside;
  return Place::kUnsure;
}

// Returns the smallest logit that min_p and top_k keep.
template <class T>
float least_kept(const Draws& draws, const T* logits, int64_t row, const Scale& scale,
                 std::vector<Logit>* scratch) {
  float bound = draws.least_scaled == nullptr ? kNever : draws.least_scaled[row];
  const int64_t top_k = draws.top_k[row];
  if (top_k > 0 && top_k < draws.vocab_size)
    bound = std::max(bound, scale(best_but(logits, draws.vocab_size, top_k, scratch)));
  return scale.least([bound](float scaled) { return scaled >= bound && scaled > kNever; });
}

// Draws a row's token. The winner among all kept ids is that of the nucleus if it lies in the
// nucleus; if not, neither does any id that is as unlikely, and the search goes on among likelier
// ids.
template <class T>
State draw(const Draws& draws, int64_t row, const T* logits, std::vector<Logit>* scratch) {
  const int64_t size = draws.vocab_size;
  int64_t* token = draws.token + row;
  *token = 0;
  const Best best = best_of(logits, size);
  if (!std::isfinite(best.logit)) return kInvalid;
  const float temperature = draws.temperature[row];
  if (temperature <= 0.0f || draws.top_k[row] == 1) {
    *token = best.id;
    return kDrawn;
  }
  const Scale scale{best.logit,
                    std::max(temperature, static_cast<float>(draws.least_temperature))};
  const Noise noise = noise_of(static_cast<uint64_t>(draws.seed[row]),
                               static_cast<uint32_t>(draws.position[row]),
                               static_cast<uint32_t>(draws.choice[row]));
  const float least = least_kept(draws, logits, row, scale, scratch);
  const bool has_nucleus = draws.top_p[row] < 1.0f;
  const double share = static_cast<double>(draws.top_p[row]) - draws.top_p_slack;
  for (float from = least;;) {
    const Winner winner = winner_of(logits, size, scale, noise, best, from);
    *token = winner.id;
    if (!winner.is_sure) return kUndecided;
    if (!has_nucleus || winner.scaled == 0.0f) return kDrawn;
    from = scale.least([&](float scaled) { return scaled > winner.scaled; });
    const Place place = place_in_nucleus(masses(logits, size, scale, least, from), draws, share);
    if (place == Place::kInside) return kDrawn;
    if (place == Place::kUnsure) return kUndecided;
  }
}

template <class T>
State draw_row(const Draws& draws, int64_t row, Scratch* scratch) {
  const T* logits = static_cast<const T*>(draws.logits) + row * draws.row_stride;
  if (!draws.has_edits(row)) return draw(draws, row, logits, &scratch->best);
  if (!edit(draws, row, logits, scratch)) return kNoSuchId;
  return draw<float>(draws, row, scratch->edited.data(), &scratch->best);
}

template <class T>
void draw_all(const Draws& draws) {
  const bool is_large =
      draws.num_rows > 1 && draws.num_rows * draws.vocab_size > kSerialElements;
#pragma omp parallel num_threads(static_cast<int>(draws.num_threads)) if (is_large)
  {
    Scratch scratch;
#pragma omp for schedule(dynamic)
    for (int64_t row = 0; row < draws.num_rows; ++row) {
      try {
        draws.state[row] = draw_row<T>(draws, row, &scratch);
      } catch (const std::bad_alloc&) {  // no exception may leave the region
        draws.state[row] = kUndecided;   // the definition raises if it lacks memory too
      }
    }
  }
}

}  // namespace
}  // namespace tandem

// Python compares this size with that of its own struct before the first call.
TANDEM_EXPORT int64_t tandem_sampling_draws_bytes() { return sizeof(tandem::Draws); }

// Draws all rows. Returns how many are neither drawn nor invalid.
TANDEM_EXPORT int64_t tandem_sampling_draw(const tandem::Draws* draws) {
  const auto draw = draws->type == 0   ? tandem::draw_all<float>
                    : draws->type == 1 ? tandem::draw_all<tandem::BFloat16>
                                       : tandem::draw_all<tandem::Float16>;
  draw(*draws);
  return std::count_if(draws->state, draws->state + draws->num_rows,
                       [](int8_t state) { return state > tandem::kDrawn; });
}
