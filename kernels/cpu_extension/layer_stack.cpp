// All layers of a decoder over a step's rows in one call, float32 on the CPU.
//
// It calls the operations as they are, one after another, so its bits are theirs. What it saves is
// the way back to Python between them: a step of few rows streams all weights through the caches,
// and finds the interpreter thrown out of them nine times a layer. And its threads stay awake.
#include <algorithm>

#include "export.h"
#include "operations.h"
#include "room.h"

namespace tandem {
namespace {

// As kernels/layer_stack/cpu_extension.py lays them out.
struct Matrix {
  const void* packed;
  int64_t is_narrow;
};

struct Layer {
  Matrix qkv, output, gate_up, down;
  const float *input_norm, *mlp_norm;
  const float *qk_norm, *qkv_bias, *output_bias, *gate_up_bias, *down_bias;  // or null
  float* kv_cache;
  const Plan* plan;
};

struct Stack {
  int64_t num_layers, hidden_size, inner_size, num_heads, num_kv_heads, head_dim;
  int64_t num_rows, num_positions, num_threads;
  const Layer* layers;         // [num_layers]
  float* hidden;               // [num_rows, hidden_size]
  const float* rotation;       // [num_rows, head_dim]
  const int64_t* kv_position;  // [num_rows]
  float* narrow;  // [num_rows, max(hidden_size, num_heads * head_dim)]
  float* wide;    // [num_rows, max(2 * inner_size, (num_heads + 2 * num_kv_heads) * head_dim)]
  float* inner;   // [num_rows, inner_size]
  float norm_eps, scale;
};

// One thread's way through the layers.
struct Run {
  const Stack& stack;
  Member& member;
  float* arranged;

  void norm(const float* weight) const {
    rms_norm(member, stack.hidden, stack.hidden_size, weight, stack.narrow, stack.num_rows,
             stack.hidden_size, stack.norm_eps);
    member.wait();
  }

  void multiply(const float* x, int64_t width, const Matrix& weight, const float* bias, float* out,
                int64_t num_columns, bool adds) const {
    const Product product{x,           width,          weight.packed, weight.is_narrow != 0,
                          bias,        out,            num_columns,   stack.num_rows,
                          width,       num_columns,    adds};
    tandem::multiply(member, product, arranged);
    member.wait();
  }

  void attend(const Layer& layer) const {
    const int64_t query_size = stack.num_heads * stack.head_dim;
    const int64_t qkv_size = query_size + 2 * stack.num_kv_heads * stack.head_dim;
    const Heads heads{stack.num_rows, stack.num_heads, stack.num_kv_heads, stack.head_dim};
    norm(layer.input_norm);
    multiply(stack.narrow, stack.hidden_size, layer.qkv, layer.qkv_bias, stack.wide, qkv_size,
             false);
    rope_kv_write(member, stack.wide, qkv_size, stack.rotation, stack.kv_position, layer.kv_cache,
                  layer.qk_norm, stack.norm_eps, heads);
    member.wait();
    tandem::attend(member, *layer.plan, stack.wide, qkv_size, stack.head_dim, layer.kv_cache,
                   stack.narrow, stack.scale);
    member.wait();
    multiply(stack.narrow, query_size, layer.output, layer.output_bias, stack.hidden,
             stack.hidden_size, true);
  }

  void feed_forward(const Layer& layer) const {
    norm(layer.mlp_norm);
    multiply(stack.narrow, stack.hidden_size, layer.gate_up, layer.gate_up_bias, stack.wide,
             2 * stack.inner_size, false);
    silu_mul(member, stack.wide, 2 * stack.inner_size, stack.inner, stack.num_rows,
             stack.inner_size);
    member.wait();
    multiply(stack.inner, stack.inner_size, layer.down, layer.down_bias, stack.hidden,
             stack.hidden_size, true);
  }
};

// The first position that the caches do not have, or -1.
int64_t first_outside(const Stack& stack) {
  for (int64_t row = 0; row < stack.num_rows; ++row)
    if (stack.kv_position[row] >= stack.num_positions) return stack.kv_position[row];
  return -1;
}

}  // namespace
}  // namespace tandem

// Of the structs that both sides must agree on.
TANDEM_EXPORT int64_t tandem_layer_bytes() { return sizeof(tandem::Layer); }
TANDEM_EXPORT int64_t tandem_stack_bytes() { return sizeof(tandem::Stack); }

// Returns the first position that the caches do not have, and has changed nothing then; else -1.
TANDEM_EXPORT int64_t tandem_layer_stack(const tandem::Stack* stack) {
  using namespace tandem;
  const int64_t outside = first_outside(*stack);
  if (outside >= 0) return outside;
  const int64_t query_size = stack->num_heads * stack->head_dim;
  int64_t most = 0;
  for (const int64_t width : {stack->hidden_size, query_size, stack->inner_size})
    most = std::max(most, arranged_floats(stack->num_rows, width));
  static thread_local Room room;  // of the calling thread, for all
  float* const arranged = room.of(most);
  const int64_t num_products = stack->num_rows * stack->hidden_size * 2 * stack->inner_size;
  with_team(num_products < kSerialProducts ? 1 : stack->num_threads, [&](Member& member) {
    const Run run{*stack, member, arranged};
    for (int64_t index = 0; index < stack->num_layers; ++index) {
      run.attend(stack->layers[index]);
      run.feed_forward(stack->layers[index]);
    }
  });
  return -1;
}
