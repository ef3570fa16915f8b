// All layers of a decoder over a step's rows in one call on the CPU, in float32 or bfloat16.
//
// It calls the single operations one after another, so its results have the same bits. It saves the
// returns to Python between them: a step of few rows streams all weights through the processor's
// caches, so that each of nine returns per layer finds the interpreter evicted. The threads
// also stay awake from the first layer to the last.
#include <algorithm>

#include "export.h"
#include "operations.h"
#include "room.h"
#include "vectors.h"

namespace tandem {
namespace {

// These structs mirror `_Matrix`, `_Layer` and `_Stack` in kernels/layer_stack/cpu_extension.py.
struct Matrix {
  const void* packed;
  int64_t is_narrow, num_chunks;
};

struct Layer {
  Matrix qkv, output, gate_up, down;
  const void *input_norm, *mlp_norm;
  const void *qk_norm, *qkv_bias, *output_bias, *gate_up_bias, *down_bias;  // null if absent
  void* kv_cache;
  const Plan* plan;
};

struct Stack {
  int64_t num_layers, hidden_size, inner_size, num_heads, num_kv_heads, head_dim;
  int64_t num_rows, num_positions, num_threads;
  int64_t type;                // kFloat32 or kBFloat16, of all tensors but `rotation`
  const Layer* layers;         // [num_layers]
  void* hidden;                // [num_rows, hidden_size]
  const float* rotation;       // [num_rows, head_dim]
  const int64_t* kv_position;  // [num_rows]
  void* narrow;  // [num_rows, max(hidden_size, num_heads * head_dim)]
  void* wide;    // [num_rows, max(2 * inner_size, (num_heads + 2 * num_kv_heads) * head_dim)]
  void* inner;   // [num_rows, inner_size]
  float norm_eps, scale;

  int64_t query_size() const { return num_heads * head_dim; }
  int64_t qkv_size() const { return (num_heads + 2 * num_kv_heads) * head_dim; }

  // Returns the product of x [num_rows, width] and a weight of `num_columns`, all contiguous.
  Product product(const void* x, int64_t width, const Matrix& weight, const void* bias, void* out,
                  int64_t num_columns, bool adds) const {
    return {type, x,           width,    weight.packed, weight.is_narrow != 0, bias,
            out,  num_columns, num_rows, width,         num_columns,           adds,
            weight.num_chunks, type};
  }
};

// One thread's share of all layers. T is the type of activations and caches.
template <class T>
struct Run {
  const Stack& stack;
  Member& member;
  float* arranged;

  void norm(const void* weight) const {
    rms_norm(member, static_cast<const T*>(stack.hidden), stack.hidden_size,
             static_cast<const T*>(weight), static_cast<T*>(stack.narrow), stack.num_rows,
             stack.hidden_size, stack.norm_eps);
    member.wait();
  }

  void multiply(const void* x, int64_t width, const Matrix& weight, const void* bias, void* out,
                int64_t num_columns, bool adds) const {
    tandem::multiply(member, stack.product(x, width, weight, bias, out, num_columns, adds),
                     arranged);
    member.wait();
  }

  void attend(const Layer& layer) const {
    const Heads heads{stack.num_rows, stack.num_heads, stack.num_kv_heads, stack.head_dim};
    norm(layer.input_norm);
    multiply(stack.narrow, stack.hidden_size, layer.qkv, layer.qkv_bias, stack.wide,
             stack.qkv_size(), false);
    rope_kv_write(member, static_cast<T*>(stack.wide), stack.qkv_size(), stack.rotation,
                  stack.kv_position, static_cast<T*>(layer.kv_cache),
                  static_cast<const T*>(layer.qk_norm), stack.norm_eps, heads);
    member.wait();
    tandem::attend(member, *layer.plan, stack.wide, stack.qkv_size(), stack.head_dim,
                   layer.kv_cache, stack.narrow, stack.scale);
    member.wait();
    multiply(stack.narrow, stack.query_size(), layer.output, layer.output_bias, stack.hidden,
             stack.hidden_size, true);
  }

  void feed_forward(const Layer& layer) const {
    norm(layer.mlp_norm);
    multiply(stack.narrow, stack.hidden_size, layer.gate_up, layer.gate_up_bias, stack.wide,
             2 * stack.inner_size, false);
    silu_mul(member, static_cast<const T*>(stack.wide), 2 * stack.inner_size,
             static_cast<T*>(stack.inner), stack.num_rows, stack.inner_size);
    member.wait();
    multiply(stack.inner, stack.inner_size, layer.down, layer.down_bias, stack.hidden,
             stack.hidden_size, true);
  }
};

template <class T>
void run_layers(const Stack& stack, Member& member, float* arranged) {
  const Run<T> run{stack, member, arranged};
  for (int64_t index = 0; index < stack.num_layers; ++index) {
    run.attend(stack.layers[index]);
    run.feed_forward(stack.layers[index]);
  }
}

// Returns the floats of scratch that the largest product of any layer needs for arranged rows.
int64_t most_arranged_floats(const Stack& stack) {
  int64_t most = 0;
  for (int64_t index = 0; index < stack.num_layers; ++index) {
    const Layer& layer = stack.layers[index];
    const auto take = [&](int64_t width, const Matrix& weight) {
      const Product product =
          stack.product(nullptr, width, weight, nullptr, nullptr, 0, false);
      most = std::max(most, arranged_floats(product));
    };
    take(stack.hidden_size, layer.qkv);
    take(stack.query_size(), layer.output);
    take(stack.hidden_size, layer.gate_up);
    take(stack.inner_size, layer.down);
  }
  return most;
}

// Returns the first position past the end of the caches, or -1 if there is none.
int64_t first_outside(const Stack& stack) {
  for (int64_t row = 0; row < stack.num_rows; ++row)
    if (stack.kv_position[row] >= stack.num_positions) return stack.kv_position[row];
  return -1;
}

}  // namespace
}  // namespace tandem

// Python compares these sizes with those of its own structs before the first call.
TANDEM_EXPORT int64_t tandem_layer_bytes() { return sizeof(tandem::Layer); }
TANDEM_EXPORT int64_t tandem_stack_bytes() { return sizeof(tandem::Stack); }

// Runs all layers over `hidden`, in place. Returns -1, or the first position past the end of the
// caches; in that case nothing has been changed.
TANDEM_EXPORT int64_t tandem_layer_stack(const tandem::Stack* stack) {
  using namespace tandem;
  const int64_t outside = first_outside(*stack);
  if (outside >= 0) return outside;
  static thread_local Room room;  // the calling thread owns it, its team shares it
  float* const arranged = room.of(most_arranged_floats(*stack));
  const int64_t num_products = stack->num_rows * stack->hidden_size * 2 * stack->inner_size;
  with_team(num_products < kSerialProducts ? 1 : stack->num_threads, [&](Member& member) {
    (stack->type == kFloat32 ? run_layers<float> : run_layers<BFloat16>)(*stack, member, arranged);
  });
  return -1;
}
