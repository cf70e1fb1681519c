// Chapter "Quantization": bits per weight, bytes of a model, and what rounding costs in precision.
"use strict";
{
  const density = (x) => Math.exp((-x * x) / 2) / Math.sqrt(2 * Math.PI);

  // The sum of the density at x, x + step, ..., without an exponential for each.
  function row(x, step, count) {
    const fall = Math.exp(-step * step);
    let [at, ratio, sum] = [density(x), Math.exp(-step * (x + step / 2)), 0];
    for (let k = 0; k < count; k++) {
      sum += at;
      at *= ratio;
      ratio *= fall;
    }
    return sum;
  }

  // Gauss-Legendre on 0..1, enough points for the widest and for narrow steps.
  const wide = [
    [0.0337652428984240, 0.0856622461895852], [0.1693953067668677, 0.1803807865240693],
    [0.3806904069584015, 0.2339569672863455], [0.6193095930415985, 0.2339569672863455],
    [0.8306046932331323, 0.1803807865240693], [0.9662347571015760, 0.0856622461895852],
  ];
  const narrow = [
    [0.1127016653792583, 0.2777777777777778], [0.5, 0.4444444444444444],
    [0.8872983346207417, 0.2777777777777778],
  ];

  // The squared distance to the nearest of steps + 1 marks on low..high, summed over normal weights.
  function damage(low, high, steps) {
    const step = (high - low) / steps;
    let sum = 0;
    for (const [at, share] of steps > 14 ? narrow : wide) {
      const off = (at * step) / 2;
      const mass = row(low + off, step, steps) + row(low + step - off, step, steps);
      sum += share * off * off * mass;
    }
    return (sum * step) / 2;
  }

  const pace = 1 / 6; // of the grid for the ends of a group; the sums converge exponentially in it
  const ends = Array.from({ length: 85 }, (_, i) => (i - 42) * pace); // -7..7
  const below = [0]; // the normal distribution at these points
  for (let i = 1; i < ends.length; i++) {
    const mass = wide.reduce((sum, [at, share]) => sum + share * density(ends[i - 1] + at * pace), 0);
    below.push(below[i - 1] + mass * pace);
  }

  // The mean squared error of a weight, in units of the variance: of `group` normal weights the
  // outermost lie on marks and the others between them.
  function meanSquare(bits, group, ruler) {
    let sum = 0;
    const add = (i, j, weight, steps) => {
      if (weight > 1e-9) sum += weight * damage(ends[i], ends[j], steps);
    };
    for (let j = 43; j < ends.length; j++) {
      const inside = (i) => below[j] - below[i];
      if (ruler === "symmetric") {
        const weight = (group - 1) * inside(84 - j) ** (group - 2) * 2 * density(ends[j]) * pace;
        add(84 - j, j, weight, 2 ** bits - 2);
        continue;
      }
      for (let i = 84 - j; i < j; i++) { // |low| <= high; the others are mirror images
        const both = density(ends[i]) * density(ends[j]) * pace * pace * (i === 84 - j ? 1 : 2);
        add(i, j, (group - 1) * (group - 2) * inside(i) ** (group - 3) * both, 2 ** bits - 1);
      }
    }
    return sum;
  }

  const known = new Map(); // the curve asks again and again
  function error(bits, group, ruler) {
    const key = `${bits} ${group} ${ruler}`;
    if (!known.has(key)) known.set(key, 100 * Math.sqrt(meanSquare(bits, group, ruler)));
    return known.get(key);
  }

  (globalThis.courseCalculators ??= []).push({
    name: "quantization",
    title: "size and error of quantized weights",
    formula: String.raw`\text{bits per weight} &= b + \frac{r}{G} \\
      \text{error} &= \frac{\sqrt{\mathbb{E}\,(w - \hat w)^2}}{\sigma}`,
    note: `An asymmetric ruler is a scale and a zero point in fp16, <i>r</i> = 32; a symmetric one is a
scale, <i>r</i> = 16. The error is the expected one of weights that follow a normal law with spread
<i>σ</i>, rounded to nearest.`,
    inputs: [
      {
        name: "parameters", label: "Weights", symbol: "N", unit: "billions",
        min: 0.0625, max: 1024, step: 0.0005, scale: "log2", octave: 0.1, default: 8.03,
      },
      { name: "bits", label: "Bits of a code", symbol: "b", min: 2, max: 8, step: 1, default: 4 },
      {
        name: "group", label: "Group", symbol: "G", unit: "weights",
        min: 8, max: 16384, step: 1, scale: "log2", octave: 1, default: 64,
      },
      {
        name: "ruler", label: "Ruler", symbol: "r", default: "asymmetric",
        choices: [
          { value: "asymmetric", label: "asymmetric" },
          { value: "symmetric", label: "symmetric" },
        ],
      },
    ],
    outputs: [
      { name: "each", label: "Bits per weight", format: "short" },
      { name: "size", label: "Size", format: "bytes" },
      { name: "ratio", label: "Smaller than 16 bits", unit: "times", format: "short" },
      { name: "error", label: "Rounding error", unit: "%", format: "short" },
    ],
    compute({ parameters, bits, group, ruler }) {
      const each = bits + (ruler === "symmetric" ? 16 : 32) / group;
      const size = (parameters * 1e9 * each) / 8;
      return { each, size, ratio: 16 / each, error: error(bits, group, ruler) };
    },
    curve: { x: "bits", y: "error", log: true },
  });
}
