// Chapter "The KV cache": bytes of a token, bytes of a sequence, sequences that fit.
"use strict";
(globalThis.courseCalculators ??= []).push({
  name: "kv_cache",
  title: "KV cache and concurrency",
  formula: String.raw`\text{bytes per token} &= 2 \cdot L \cdot H_{kv} \cdot d \cdot b \\
    \text{sequences} &= \left\lfloor \frac{\text{util} \cdot \text{HBM} - \text{weights}}
    {\text{bytes per token} \cdot T} \right\rfloor`,
  presets: {
    label: "Model",
    options: [
      { label: "Llama-3-8B", values: { layers: 32, kv_heads: 8, head_size: 128, weights: 16.06 } },
      { label: "Llama-2-7B", values: { layers: 32, kv_heads: 32, head_size: 128, weights: 13.48 } },
      { label: "SmolLM2-135M", values: { layers: 30, kv_heads: 3, head_size: 64, weights: 0.27 } },
    ],
  },
  inputs: [
    { name: "layers", label: "Layers", symbol: "L", min: 1, max: 128, step: 1, default: 32 },
    { name: "kv_heads", label: "KV heads", symbol: "H<sub>kv</sub>", min: 1, max: 128, step: 1, default: 8 },
    { name: "head_size", label: "Head size", symbol: "d", min: 8, max: 512, step: 1, default: 128 },
    {
      name: "bytes_per_number", label: "Stored as", symbol: "b", default: 2,
      choices: [
        { value: 1, label: "1 byte (fp8, int8)" },
        { value: 2, label: "2 bytes (bf16, fp16)" },
        { value: 4, label: "4 bytes (fp32)" },
      ],
    },
    {
      name: "context", label: "Context", symbol: "T", unit: "tokens",
      min: 128, max: 1048576, step: 1, scale: "log2", octave: 0.5, default: 8192,
    },
    { name: "memory", label: "GPU memory", symbol: "HBM", unit: "GB", min: 4, max: 640, step: 1, default: 80 },
    {
      name: "weights", label: "Weights", unit: "GB",
      min: 0.125, max: 1024, step: 0.001, scale: "log2", octave: 0.1, default: 16.06,
    },
    { name: "util", label: "Share in use", symbol: "util", min: 0.05, max: 1, step: 0.01, default: 0.9 },
  ],
  outputs: [
    { name: "per_token", label: "Cache of a token", unit: "bytes", format: "whole" },
    { name: "per_sequence", label: "Cache of a sequence", format: "bytes" },
    { name: "sequences", label: "Sequences that fit", format: "whole" },
  ],
  compute({ layers, kv_heads, head_size, bytes_per_number, context, memory, util, weights }) {
    const per_token = 2 * layers * kv_heads * head_size * bytes_per_number;
    const per_sequence = per_token * context;
    const free = util * (memory * 1e9) - weights * 1e9;
    // Not floor(free / per_sequence): that quotient may be rounded up to the next whole number.
    const sequences = free > 0 ? Math.round((free - (free % per_sequence)) / per_sequence) : 0;
    return { per_token, per_sequence, sequences };
  },
  curve: { x: "context", y: "sequences", log: true },
});
