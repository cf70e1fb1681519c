// Chapter "Serving": the least time of one decode step, and the rates that follow.
"use strict";
(globalThis.courseCalculators ??= []).push({
  name: "serving",
  title: "latency and throughput of decoding",
  formula: String.raw`t(B) &= \max\left(\frac{W + B\,T\,\kappa}{\mathit{BW}},\;
    \frac{2PB}{F}\right) \\ \text{tokens/s} &= \frac{B}{t(B)}`,
  note: "A bound, not a measurement: no launch costs, no imperfect kernels.",
  presets: {
    label: "Device",
    options: [
      { label: "A100 80 GB SXM", values: { bandwidth: 2.039, compute_rate: 312 } },
      { label: "H100 SXM", values: { bandwidth: 3.35, compute_rate: 989 } },
      { label: "H200 SXM", values: { bandwidth: 4.8, compute_rate: 989 } },
      { label: "MI300X", values: { bandwidth: 5.3, compute_rate: 1307 } },
    ],
  },
  inputs: [
    {
      name: "bandwidth", label: "Bandwidth", symbol: "BW", unit: "TB/s",
      min: 0.05, max: 20, step: 0.001, scale: "log2", octave: 0.05, default: 3.35,
    },
    {
      name: "compute_rate", label: "Arithmetic", symbol: "F", unit: "TFLOP/s",
      min: 1, max: 8192, step: 1, scale: "log2", octave: 0.1, default: 989,
    },
    {
      name: "weights", label: "Weights", symbol: "W", unit: "GB",
      min: 0.125, max: 1024, step: 0.001, scale: "log2", octave: 0.1, default: 16.06,
    },
    {
      name: "parameters", label: "Parameters", symbol: "P", unit: "billions",
      min: 0.0625, max: 1024, step: 0.0005, scale: "log2", octave: 0.1, default: 8.03,
    },
    {
      name: "per_token", label: "Cache of a token", symbol: "κ", unit: "bytes",
      min: 1024, max: 4194304, step: 1, scale: "log2", octave: 0.25, default: 131072,
    },
    {
      name: "context", label: "Context", symbol: "T", unit: "tokens",
      min: 128, max: 1048576, step: 1, scale: "log2", octave: 0.5, default: 2048,
    },
    { name: "batch", label: "Sequences", symbol: "B", min: 1, max: 1024, step: 1, default: 64 },
  ],
  outputs: [
    { name: "total", label: "All users together", unit: "tokens/s", format: "short" },
    { name: "each", label: "Each user", unit: "tokens/s", format: "short" },
    { name: "step", label: "One step", unit: "ms", format: "short" },
    { name: "reading", label: "Time to read", unit: "ms", format: "short" },
    { name: "computing", label: "Time to compute", unit: "ms", format: "short" },
  ],
  compute({ bandwidth, compute_rate, weights, parameters, per_token, context, batch }) {
    const reading = (weights * 1e9 + batch * context * per_token) / (bandwidth * 1e12);
    const computing = (2 * parameters * 1e9 * batch) / (compute_rate * 1e12);
    const step = Math.max(reading, computing);
    return {
      total: batch / step,
      each: 1 / step,
      step: 1e3 * step,
      reading: 1e3 * reading,
      computing: 1e3 * computing,
    };
  },
  curve: { x: "batch", y: "total" },
});
