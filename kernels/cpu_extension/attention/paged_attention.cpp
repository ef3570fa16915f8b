// Causal attention of some rows of a batch over a paged cache, on the CPU.
//
// kv_cache [blocks, block_size, 2, K, D], keys before values; query [T, H, D], out [T, H, D].
// Work is cut into items of one row, some of its queries, one key head and some of its splits;
// threads take items in turn. The heads that share keys are computed together, so that keys and
// values are read once. A row with a lone query is bound by memory: where there are many such rows,
// an item has several key heads, which lie side by side in the cache, and while it is computed the
// keys and values of the next item are prefetched line by line.
//
// A split is kSplit positions counted from the sequence's start, and splits are always joined in
// order: the bits of a query's result depend on its own sequence, position and window alone, not on
// the batch, the chunk that it is computed in, or the number of threads.
//
// Split keys and log-sum-exp joining: Flash-Decoding (Dao et al., 2023). Online softmax: Milakov
// and Gimelshein, arXiv:1805.02867. Here splits have a fixed size instead of a fixed number.
#include <algorithm>

#include "attention/plan.h"
#include "export.h"
#include "operations.h"

namespace tandem {
namespace {

template <class T>
struct Attention {
  const Plan& plan;
  const T* query;
  int64_t token_stride, head_stride;
  const T* cache;
  T* out;
  float scale;

  // A unit of work: some queries of a row, under some key heads, over some splits.
  struct Item {
    int64_t row, head, num_heads;
    int64_t first, count;  // queries [first, first + count) of the row
    int64_t split, end;    // splits [split, end) of the row
  };

  Item item_at(int64_t index) const {
    int64_t row = 0, above = plan.num_rows;
    while (above - row > 1) {
      const int64_t middle = (row + above) / 2;
      (plan.first_item[middle] <= index ? row : above) = middle;
    }
    const int64_t parts = plan.num_parts(row), own = index - plan.first_item[row];
    const int64_t groups = plan.head_groups(row), heads = plan.heads_per_item(row);
    const int64_t part = own / groups % parts, head = own % groups * heads;
    const int64_t first = own / groups / parts * plan.queries_per_item();
    const int64_t left = plan.query_len[row] - first;
    const int64_t count = left < plan.queries_per_item() ? left : plan.queries_per_item();
    const int64_t last = position(row, first + count - 1);
    const int64_t split = plan.first_key(position(row, first)) / kSplit + part;
    const int64_t num_heads = std::min(heads, plan.num_kv_heads - head);
    return {row, head, num_heads, first, count, split, parts > 1 ? split + 1 : last / kSplit + 1};
  }

  // Positions [base + from, base + to) of a row; key[j] points at the key of position base + j.
  struct Tile {
    int64_t base;
    int from, to;
    const T* const* key;
  };

  int64_t position(int64_t row, int64_t query_at) const {
    return plan.seq_len[row] - plan.query_len[row] + query_at;
  }

  // Computes an item. `after` is the item that this thread computes next, or -1: if both have lone
  // queries, the keys and values of `after` are prefetched meanwhile. Items of other rows prefetch
  // their own next tile.
  void run(int64_t index, int64_t after, const Scratch& scratch) const {
    const Item item = item_at(index);
    const T* keys[kSplit];
    Ahead<T> ahead;
    if (after >= 0 && plan.query_len[item.row] == 1) {
      const Item next = item_at(after);
      if (plan.query_len[next.row] == 1) ahead = ahead_of(item, next, keys);
    }
    for (int64_t head = item.head; head < item.head + item.num_heads; ++head) {
      Item one = item;
      one.head = head;
      attend_head(one, ahead, scratch);
    }
  }

  // Joins the parts of a lone query under one key head, in the order of splits, and writes `out`.
  void finish(int64_t row, int64_t head) const {
    const int64_t first = plan.first_part[row];
    const Sums total = partial(first, head);
    for (int64_t part = first + 1; part < plan.first_part[row + 1]; ++part)
      join(total, partial(part, head), plan.group(), plan.width());
    give(row, head, 0, 1, total);
  }

 private:
  void attend_head(const Item& item, Ahead<T>& ahead, const Scratch& scratch) const {
    const int64_t rows = item.count * plan.group();
    take_queries(item, scratch.query);
    for (int64_t split = item.split; split < item.end; ++split) {
      const bool alone = split == item.split;
      const Sums& sums = alone ? scratch.total : scratch.split;
      attend_split(item, split, ahead, scratch, sums);
      if (!alone) join(scratch.total, sums, rows, plan.width());
    }
    if (plan.num_parts(item.row) == 1) {
      give(item.row, item.head, item.first, item.count, scratch.total);
      return;
    }
    const int64_t part =
        plan.first_part[item.row] + item.split - plan.first_split(item.row);
    const Sums kept = partial(part, item.head);
    std::memcpy(kept.values, scratch.total.values, rows * plan.width() * sizeof(float));
    std::memcpy(kept.most, scratch.total.most, rows * sizeof(float));
    std::memcpy(kept.sum, scratch.total.sum, rows * sizeof(float));
  }

  struct Positions {
    int64_t from, to;
  };

  // Returns the positions of a split that some query of an item sees.
  Positions positions(const Item& item, int64_t split) const {
    const int64_t from = plan.first_key(position(item.row, item.first));
    const int64_t to = position(item.row, item.first + item.count - 1) + 1;
    return {std::max(from, split * kSplit), std::min(to, (split + 1) * kSplit)};
  }

  // Returns prefetches of all keys and values of `next`, spread over the work of `item`. Both have
  // a lone query; `keys` has room for the pointers of a split.
  Ahead<T> ahead_of(const Item& item, const Item& next, const T** keys) const {
    const Positions own = positions(item, item.split), others = positions(next, next.split);
    const int64_t count = own.to - own.from, num_keys = others.to - others.from;
    find_keys(next, others.from, others.to, keys);
    return {keys, num_keys, next.num_heads * plan.head_dim, plan.num_kv_heads * plan.head_dim,
            item.num_heads * num_turns<T>(count, plan.head_dim), item.num_heads * count};
  }

  Sums partial(int64_t part, int64_t head) const {
    const int64_t group = plan.group();
    float* from = plan.partials + (part * plan.num_kv_heads + head) * plan.partial_stride();
    return {from, from + group * plan.width(), from + group * (plan.width() + 1)};
  }

  // Copies the queries of an item to `to` [count * group, width], scaled and in float32.
  void take_queries(const Item& item, float* to) const {
    const int64_t first = plan.first_query[item.row] + item.first;
    for (int64_t at = 0; at < item.count; ++at)
      for (int64_t g = 0; g < plan.group(); ++g, to += plan.width()) {
        const T* from = query + (first + at) * token_stride +
                        (item.head * plan.group() + g) * head_stride;
        for (int64_t d = 0; d < plan.head_dim; d += kLanes)
          store(to + d, load_some(from + d, plan.head_dim - d) * splat(scale));
      }
  }

  // Writes the results of `count` queries of a row under one key head to `out`.
  void give(int64_t row, int64_t head, int64_t first, int64_t count, const Sums& sums) const {
    int64_t m = 0;
    for (int64_t at = 0; at < count; ++at)
      for (int64_t g = 0; g < plan.group(); ++g, ++m) {
        T* to = out + ((plan.first_query[row] + first + at) * plan.num_heads +
                       head * plan.group() + g) * plan.head_dim;
        const float* values = sums.values + m * plan.width();
        for (int64_t d = 0; d < plan.head_dim; d += kLanes)
          store_some(to + d, load(values + d) / splat(sums.sum[m]), left(plan.head_dim, d));
      }
  }

  void attend_split(const Item& item, int64_t split, Ahead<T>& ahead, const Scratch& scratch,
                    const Sums& sums) const {
    const int64_t rows = item.count * plan.group();
    for (int64_t m = 0; m < rows; ++m) {
      sums.most[m] = kMinusInfinity;
      sums.sum[m] = 0.0f;
    }
    std::memset(sums.values, 0, rows * plan.width() * sizeof(float));
    const auto [from, to] = positions(item, split);
    const bool is_lone = plan.query_len[item.row] == 1;
    const T* keys[2][kTile];
    Tile tile = find_tile(item, from / kTile * kTile, from, to, keys[0]);
    for (int turn = 1; tile.base < to; turn = 1 - turn) {
      const Tile next = find_tile(item, tile.base + kTile, from, to, keys[turn]);
      if (!is_lone) {
        ahead = {next.key + next.from, next.to - next.from, plan.head_dim,
                 plan.num_kv_heads * plan.head_dim,
                 num_turns<T>(tile.to - tile.from, plan.head_dim), tile.to - tile.from};
      }
      attend_tile(item, tile, ahead, scratch, sums);
      tile = next;
    }
  }

  void attend_tile(const Item& item, const Tile& tile, Ahead<T>& ahead, const Scratch& scratch,
                   const Sums& sums) const {
    const int from = tile.from, to = tile.to;
    const int first = from / kLanes, last = (to + kLanes - 1) / kLanes;
    const int64_t to_value = plan.num_kv_heads * plan.head_dim;
    const T* value[kTile];
    for (int j = from; j < to; ++j) value[j] = tile.key[j] + to_value;
    turn_keys(tile.key, ahead, first, last, plan.head_dim, scratch.packed);
    const int rows = item.count * plan.group();
    for (int m = 0; m < rows; m += kBlock) {
      const int last_row = std::min(m + kBlock, rows) - 1;
      score_some(m, rows, first_vector(seen(item, tile, m)),
                 last_vector(seen(item, tile, last_row)), scratch);
    }
    bool alike = true;  // all queries see the same keys of this tile
    for (int m = 0; m < rows; ++m) {
      const Keys own = seen(item, tile, m);
      alike = alike && own.from == from && own.to == to;
      scratch.kept[m] = weigh(scratch.scores + m * kTile, first_vector(own), last_vector(own),
                              own.from, own.to, sums.most + m, sums.sum + m);
    }
    if (sizeof(T) < sizeof(float) && rows > kBlock) {
      const float* widened[kTile];
      for (int j = from; j < to; ++j) {
        float* row = scratch.widened + j * plan.width();
        for (int64_t d = 0; d < plan.head_dim; d += kLanes)
          store(row + d, load_some(value[j] + d, plan.head_dim - d));
        widened[j] = row;
      }
      add_all(item, tile, alike, widened, &ahead, scratch, sums);
    } else {
      add_all(item, tile, alike, value, &ahead, scratch, sums);
    }
  }

  // Keys [from, to) of a tile, counted from its base.
  struct Keys {
    int from, to;
  };
  static int first_vector(const Keys& keys) { return keys.from / kLanes; }
  static int last_vector(const Keys& keys) { return (keys.to + kLanes - 1) / kLanes; }

  // Returns the keys of a tile that row m of an item sees.
  Keys seen(const Item& item, const Tile& tile, int m) const {
    const int64_t at = position(item.row, item.first + m / plan.group());
    return {clamp(plan.first_key(at) - tile.base, tile.from, tile.to),
            clamp(at + 1 - tile.base, tile.from, tile.to)};
  }

  static int clamp(int64_t value, int least, int most) {
    return value < least ? least : value > most ? most : static_cast<int>(value);
  }

  // Fills `key` with pointers to the keys of positions [from, to).
  void find_keys(const Item& item, int64_t from, int64_t to, const T** key) const {
    const int32_t* table = plan.block_table + item.row * plan.table_stride;
    const int64_t position_stride = 2 * plan.num_kv_heads * plan.head_dim;
    int64_t block = from / plan.block_size, offset = from % plan.block_size;
    for (int64_t left = to - from; left > 0; ++block, offset = 0) {
      const T* at = cache + (table[block] * plan.block_size + offset) * position_stride +
                    item.head * plan.head_dim;
      const int64_t here = std::min(plan.block_size - offset, left);
      for (int64_t j = 0; j < here; ++j, at += position_stride) *key++ = at;
      left -= here;
    }
  }

  // Returns the tile at position `base`, cut to positions [from, to), and finds its keys if it has
  // any. Lanes without a position repeat the key of another lane: their results are never read.
  Tile find_tile(const Item& item, int64_t base, int64_t from, int64_t to, const T** key) const {
    const Tile tile{base, clamp(from - base, 0, kTile), clamp(to - base, 0, kTile), key};
    if (tile.from >= tile.to) return tile;
    find_keys(item, base + tile.from, base + tile.to, key + tile.from);
    for (int j = tile.from / kLanes * kLanes; j < tile.from; ++j) key[j] = key[tile.from];
    for (int j = tile.to; j % kLanes != 0; ++j) key[j] = key[tile.to - 1];
    return tile;
  }

  void score_some(int m, int rows, int first, int last, const Scratch& scratch) const {
    const float* own = scratch.query + m * plan.width();
    float* scores = scratch.scores + m * kTile;
    const int64_t stride = plan.width();
    const int dim = plan.head_dim;
    switch (rows - m) {
      case 1: return score<1>(own, stride, dim, scratch.packed, first, last, scores);
      case 2: return score<2>(own, stride, dim, scratch.packed, first, last, scores);
      case 3: return score<3>(own, stride, dim, scratch.packed, first, last, scores);
      default: return score<4>(own, stride, dim, scratch.packed, first, last, scores);
    }
  }

  template <class V>
  void add_all(const Item& item, const Tile& tile, bool alike, const V* const* value,
               Ahead<T>* ahead, const Scratch& scratch, const Sums& sums) const {
    const int rows = item.count * plan.group(), dim = plan.head_dim;
    const int group = plan.group();
    const int64_t width = plan.width();
    for (int m = 0; m < rows;) {
      float* held = sums.values + m * width;
      const float* kept = scratch.kept + m;
      const float* weights = scratch.scores + m * kTile;
      // Values that a query does not see are left out instead of multiplied by a weight of 0: they
      // may be NaN. The heads of one query see the same keys.
      const auto [from, to] = seen(item, tile, m);
      const int count = std::min(kBlock, alike ? rows - m : group - m % group);
      switch (count) {
        case 1: add_values<1>(held, width, kept, weights, value, ahead, from, to, dim); break;
        case 2: add_values<2>(held, width, kept, weights, value, ahead, from, to, dim); break;
        case 3: add_values<3>(held, width, kept, weights, value, ahead, from, to, dim); break;
        default: add_values<4>(held, width, kept, weights, value, ahead, from, to, dim);
      }
      m += count;
      ahead = nullptr;  // the first pass has made all prefetches of this tile
    }
  }
};

template <class T>
void attend_as(Member& member, const Plan& plan, const void* query, int64_t token_stride,
               int64_t head_stride, const void* cache, void* out, float scale) {
  const Attention<T> attention{plan,        static_cast<const T*>(query), token_stride,
                               head_stride, static_cast<const T*>(cache), static_cast<T*>(out),
                               scale};
  const int64_t num_items = plan.first_item[plan.num_rows];
  Scratch scratch;
  scratch.place(plan, plan.scratch + member.thread * plan.scratch_floats);
  for (int64_t item = member.take(), after; item < num_items; item = after) {
    after = member.take();
    attention.run(item, after < num_items ? after : -1, scratch);
  }
  if (plan.first_part[plan.num_rows] == 0) return;
  member.wait();
  const int64_t num_finished = plan.num_rows * plan.num_kv_heads;
  for (int64_t at = member.first_of(num_finished); at < member.last_of(num_finished); ++at) {
    const int64_t row = at / plan.num_kv_heads;
    if (plan.num_parts(row) > 1) attention.finish(row, at % plan.num_kv_heads);
  }
}

}  // namespace

// Attends to the cache with all rows of a plan. Members take items, which the team counts from its
// last wait: callers wait before this call, and again before the next operation that takes items.
void attend(Member& member, const Plan& plan, const void* query, int64_t token_stride,
            int64_t head_stride, const void* cache, void* out, float scale) {
  const auto attend_typed = plan.type == 0   ? attend_as<float>
                            : plan.type == 1 ? attend_as<BFloat16>
                                             : attend_as<Float16>;
  attend_typed(member, plan, query, token_stride, head_stride, cache, out, scale);
}

}  // namespace tandem

// Python compares this size with that of its own struct before the first call.
TANDEM_EXPORT int64_t tandem_attention_plan_bytes() { return sizeof(tandem::Plan); }

// Cuts the rows into items and fills the fields that plan.h marks as written by prepare.
TANDEM_EXPORT void tandem_attention_prepare(tandem::Plan* plan) {
  plan->least_block = plan->most_block = 0;
  int64_t items = 0, parts = 0, lone_parts = 0;
  for (int64_t row = 0; row < plan->num_rows; ++row)
    if (plan->query_len[row] == 1) lone_parts += plan->num_splits(row);
  const int64_t bytes = tandem::kSplit * 2 * plan->head_dim * plan->number_bytes();
  const bool are_many = lone_parts >= tandem::kItemsPerThread * plan->num_threads;
  const int64_t most_heads = std::min(plan->num_kv_heads, tandem::kItemBytes / bytes);
  plan->lone_heads = are_many ? std::max<int64_t>(1, most_heads) : 1;
  for (int64_t row = 0; row < plan->num_rows; ++row) {
    plan->first_item[row] = items;
    plan->first_part[row] = parts;
    const int64_t own = plan->num_parts(row);
    const int64_t per_item = plan->queries_per_item();
    items += (plan->query_len[row] + per_item - 1) / per_item * own * plan->head_groups(row);
    parts += own > 1 ? own : 0;
    const int64_t first = plan->first_key(plan->seq_len[row] - plan->query_len[row]);
    for (int64_t block = first / plan->block_size;
         block <= (plan->seq_len[row] - 1) / plan->block_size; ++block) {
      const int64_t id = plan->block_table[row * plan->table_stride + block];
      if (id < plan->least_block) plan->least_block = id;
      if (id > plan->most_block) plan->most_block = id;
    }
  }
  plan->first_item[plan->num_rows] = items;
  plan->first_part[plan->num_rows] = parts;
  plan->scratch_floats = tandem::Scratch::floats(*plan);
  plan->partial_floats = parts * plan->num_kv_heads * plan->partial_stride();
}

// Attends to the cache with queries of the given strides, in elements; `out` is contiguous.
TANDEM_EXPORT void tandem_attention_attend(const tandem::Plan* plan, const void* query,
                                           int64_t token_stride, int64_t head_stride,
                                           const void* cache, void* out, float scale) {
  using namespace tandem;
  const int64_t num_items = plan->first_item[plan->num_rows];
  with_team(num_items > 1 ? plan->num_threads : 1, [&](Member& member) {
    tandem::attend(member, *plan, query, token_stride, head_stride, cache, out, scale);
  });
}
