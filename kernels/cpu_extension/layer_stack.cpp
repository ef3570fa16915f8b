// All layers of a decoder over a step's rows in one call, float32 on the CPU.
//
// It calls the operations as they are, one after another, so its bits are theirs. What it saves is
// the way back to Python between them: a step of few rows streams all weights through the caches,
// and finds the interpreter thrown out of them nine times a layer.
#include "operations.h"

namespace tandem {
namespace {

// As kernels/layer_stack/cpu_extension.py lays them out.
struct Layer {
  const float *input_norm, *qkv, *qkv_bias, *qk_norm, *output, *output_bias;  // biases, qk_norm: or
  const float *mlp_norm, *gate_up, *gate_up_bias, *down, *down_bias;          // null
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

constexpr int64_t kFloat32 = 0;

struct Run {
  const Stack& stack;

  void norm(const float* weight) const {
    tandem_rms_norm(kFloat32, stack.hidden, stack.hidden_size, weight, stack.narrow,
                    stack.num_rows, stack.hidden_size, stack.norm_eps, stack.num_threads);
  }

  void multiply(const float* x, int64_t width, const float* weight, const float* bias, float* out,
                int64_t num_columns, bool adds) const {
    tandem_linear(x, width, weight, bias, out, num_columns, stack.num_rows, width, num_columns,
                  adds, stack.num_threads);
  }

  // As tandem_rope_kv_write.
  int64_t attend(const Layer& layer) const {
    const int64_t query_size = stack.num_heads * stack.head_dim;
    const int64_t qkv_size = query_size + 2 * stack.num_kv_heads * stack.head_dim;
    norm(layer.input_norm);
    multiply(stack.narrow, stack.hidden_size, layer.qkv, layer.qkv_bias, stack.wide, qkv_size,
             false);
    const int64_t outside = tandem_rope_kv_write(
        kFloat32, stack.wide, qkv_size, stack.rotation, stack.kv_position, layer.kv_cache,
        stack.num_positions, layer.qk_norm, stack.norm_eps, stack.num_rows, stack.num_heads,
        stack.num_kv_heads, stack.head_dim, stack.num_threads);
    if (outside >= 0) return outside;
    tandem_attention_attend(layer.plan, stack.wide, qkv_size, stack.head_dim, layer.kv_cache,
                            stack.narrow, stack.scale);
    multiply(stack.narrow, query_size, layer.output, layer.output_bias, stack.hidden,
             stack.hidden_size, true);
    return -1;
  }

  void feed_forward(const Layer& layer) const {
    norm(layer.mlp_norm);
    multiply(stack.narrow, stack.hidden_size, layer.gate_up, layer.gate_up_bias, stack.wide,
             2 * stack.inner_size, false);
    tandem_silu_mul(kFloat32, stack.wide, 2 * stack.inner_size, stack.inner, stack.num_rows,
                    stack.inner_size, stack.num_threads);
    multiply(stack.inner, stack.inner_size, layer.down, layer.down_bias, stack.hidden,
             stack.hidden_size, true);
  }
};

}  // namespace
}  // namespace tandem

// Of the structs that both sides must agree on.
TANDEM_EXPORT int64_t tandem_layer_bytes() { return sizeof(tandem::Layer); }
TANDEM_EXPORT int64_t tandem_stack_bytes() { return sizeof(tandem::Stack); }

// Returns the first position that the caches do not have, and has changed nothing then; else -1.
TANDEM_EXPORT int64_t tandem_layer_stack(const tandem::Stack* stack) {
  const tandem::Run run{*stack};
  for (int64_t index = 0; index < stack->num_layers; ++index) {
    const tandem::Layer& layer = stack->layers[index];
    const int64_t outside = run.attend(layer);
    if (outside >= 0) return outside;  // of the first layer: all have the same positions
    run.feed_forward(layer);
  }
  return -1;
}
