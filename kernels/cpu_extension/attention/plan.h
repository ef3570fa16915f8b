// The plan of an attention call: how rows of a batch are cut into items, and the memory of items.
#pragma once

#include <initializer_list>

#include "attention/tile.h"

namespace tandem {

constexpr int kSplit = 256;         // positions; constant, because it fixes the order of sums
constexpr int kQueriesPerItem = 64;  // queries times the heads of a group, at most
constexpr int64_t kItemBytes = 400 << 10;  // of keys and values: a core's cache holds two items
constexpr int kItemsPerThread = 4;  // lone parts per thread from which items take several heads
constexpr int kBlock = 4;  // query rows whose sums stay in registers

inline int64_t rounded_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// This struct mirrors `_Plan` in kernels/paged_attention/cpu_extension.py.
struct Plan {
  int64_t num_rows, num_heads, num_kv_heads, head_dim, block_size, table_stride;
  int64_t window;  // positions that a query sees, its own included; 0 for all
  int64_t num_threads;
  int64_t type;                // 0 float32, 1 bfloat16, 2 float16
  const int32_t* query_len;    // [R]
  const int32_t* seq_len;      // [R]
  const int32_t* block_table;  // [R, table_stride]
  const int64_t* first_query;  // [R], each row's first query in the batch
  int64_t* first_item;         // [R + 1], written by prepare
  int64_t* first_part;         // [R + 1], written by prepare
  int64_t scratch_floats, partial_floats;  // written by prepare
  int64_t least_block, most_block;         // written by prepare
  float* scratch;   // [num_threads, scratch_floats]
  float* partials;  // [partial_floats]
  int64_t lone_heads;  // written by prepare: most key heads of an item with a lone query

  int64_t group() const { return num_heads / num_kv_heads; }
  int64_t width() const { return rounded_up(head_dim, 16); }  // floats of a row of sums
  int64_t queries_per_item() const {
    return group() >= kQueriesPerItem ? 1 : kQueriesPerItem / group();
  }
  int64_t first_key(int64_t position) const {
    return window == 0 || position < window ? 0 : position - window + 1;
  }
  int64_t partial_stride() const { return group() * (width() + 2); }
  int64_t first_split(int64_t row) const {
    return first_key(seq_len[row] - query_len[row]) / kSplit;
  }
  int64_t num_splits(int64_t row) const {
    return (seq_len[row] - 1) / kSplit + 1 - first_split(row);
  }
  int64_t heads_per_item(int64_t row) const { return query_len[row] == 1 ? lone_heads : 1; }
  int64_t head_groups(int64_t row) const {
    return (num_kv_heads + heads_per_item(row) - 1) / heads_per_item(row);
  }
  int64_t number_bytes() const { return type == 0 ? 4 : 2; }
  // Returns the number of items that a query's splits are spread over. Rows of several queries have
  // items enough, and each goes through its splits one after another.
  int64_t num_parts(int64_t row) const { return query_len[row] == 1 ? num_splits(row) : 1; }
};

// Sums of M queries over some keys, with weights e ** (score - most): their result is values / sum.
struct Sums {
  float* values;  // [M, width]
  float* most;    // [M]
  float* sum;     // [M]
};

// One thread's memory for an item of M query rows.
struct Scratch {
  float* query;   // [M, width], scaled
  float* packed;  // [D, kTile]
  float* widened; // [kTile, width]
  float* scores;  // [M, kTile]
  float* kept;    // [M], factors of the sums before a tile
  Sums split, total;

  static int64_t floats(const Plan& plan) {
    return Scratch().place(plan, nullptr);
  }

  // Points the fields into `from` and returns the floats that they take; null only counts them.
  int64_t place(const Plan& plan, float* from) {
    const int64_t rows = plan.group() * plan.queries_per_item();
    int64_t used = 0;
    const auto take = [&](int64_t floats) {
      float* taken = from == nullptr ? nullptr : from + used;
      used += rounded_up(floats, 16);
      return taken;
    };
    query = take(rows * plan.width());
    packed = take(plan.width() * kTile);
    widened = take(plan.width() * kTile);
    scores = take(rows * kTile);
    kept = take(rows);
    for (Sums* sums : {&split, &total}) {
      sums->values = take(rows * plan.width());
      sums->most = take(rows);
      sums->sum = take(rows);
    }
    return used;
  }
};

// Adds `more` to `total`, both relative to the larger maximum.
inline void join(const Sums& total, const Sums& more, int64_t rows, int64_t width) {
  for (int64_t m = 0; m < rows; ++m) {
    const float most = more.most[m] > total.most[m] ? more.most[m] : total.most[m];
    const float subtracted = most == kMinusInfinity ? 0.0f : most;
    const Floats mine = exp_of(splat(total.most[m] - subtracted));
    const Floats theirs = exp_of(splat(more.most[m] - subtracted));
    float* values = total.values + m * width;
    const float* added = more.values + m * width;
    for (int64_t at = 0; at < width; at += kLanes)
      store(values + at, fused(load(added + at), theirs, load(values + at) * mine));
    total.sum[m] = fused(more.sum[m], theirs[0], total.sum[m] * mine[0]);
    total.most[m] = most;
  }
}

}  // namespace tandem
