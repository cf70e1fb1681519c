// The curve of one output over one input, with the present setting marked, as the inside of an SVG.
"use strict";
calculator.chart = (() => {
  const { grouped, shown, typed, toSlider, fromSlider } = calculator;
  const box = { left: 46, right: 350, top: 28, bottom: 186 }; // of a drawing of 360 by 230
  const samples = 64;

  function axis(low, high, from, to, log) {
    const at = log ? Math.log2 : (x) => x;
    const share = (x) => (at(x) - at(low)) / (at(high) - at(low));
    const ticks = log ? powers(low, high) : steps(low, high);
    return { ticks, place: (x) => from + share(x) * (to - from) };
  }

  // [value, label] of at most six powers of 2, counted in 1,024s, or of 10.
  function powers(low, high) {
    const base = high / low > 5e4 ? 10 : 2;
    const first = Math.ceil(Math.log(low) / Math.log(base) - 1e-9);
    const last = Math.floor(Math.log(high) / Math.log(base) + 1e-9);
    const stride = Math.ceil((last - first + 1) / 6);
    const all = Array.from({ length: last - first + 1 }, (_, i) => base ** (first + i));
    const kept = all.filter((_, i) => i % stride === 0);
    return kept.map((x) => [x, base === 2 ? brief(x, 1024, 1024) : brief(x, 1000, 1e4)]);
  }

  function steps(low, high) {
    const unit = 10 ** Math.floor(Math.log10((high - low) / 4));
    const stride = unit * [1, 2, 5, 10].find((n) => 4 * n * unit >= high - low);
    const first = Math.ceil(low / stride);
    const count = Math.floor(high / stride) - first + 1;
    const all = Array.from({ length: count }, (_, i) => Number(((first + i) * stride).toPrecision(6)));
    return all.map((x) => [x, brief(x, 1000, 1e4)]);
  }

  function brief(x, thousand, from) {
    let power = 0;
    for (; x >= (power ? thousand : from) && power < 3; power++) x /= thousand;
    return grouped(String(Number(x.toPrecision(3)))) + ["", "k", "M", "G"][power];
  }

  const text = (x, y, anchor, words) =>
    `<text x="${x}" y="${y}" text-anchor="${anchor}">${words}</text>`;
  const title = (of) => (of.unit ? `${of.label} (${of.unit})` : of.label);

  return (d, values, outputs) => {
    const input = d.inputs.find((i) => i.name === d.curve.x);
    const output = d.outputs.find((o) => o.name === d.curve.y);
    const { log } = d.curve;
    const [start, end] = [toSlider(input, input.min), toSlider(input, input.max)];
    const along = Array.from({ length: samples + 1 }, (_, i) => start + ((end - start) * i) / samples);
    const points = [...new Set(along.map((at) => fromSlider(input, at)))]
      .map((x) => [x, d.compute({ ...values, [input.name]: x })[output.name]])
      .filter(([, y]) => y > 0 || !log); // zero has no place on a logarithmic axis
    const heights = points.map(([, y]) => y);
    const high = Math.max(...heights, log ? 10 : 0) || 1;
    const low = log ? Math.min(...heights, high / 10) : 0;
    const x = axis(input.min, input.max, box.left, box.right, input.scale === "log2");
    const y = axis(low, high, box.bottom, box.top, log);
    const spot = ([a, b]) => [x.place(a).toFixed(1), y.place(Math.max(b, low)).toFixed(1)];
    const [cx, cy] = spot([values[input.name], outputs[output.name]]);
    const parts = [
      ...y.ticks.flatMap(([at, words]) => [
        `<path class="calc-grid" d="M${box.left} ${y.place(at).toFixed(1)}H${box.right}"/>`,
        text(box.left - 6, (y.place(at) + 4).toFixed(1), "end", words),
      ]),
      ...x.ticks.map(([at, words]) => text(x.place(at).toFixed(1), box.bottom + 18, "middle", words)),
      text(0, 12, "start", title(output)),
      text((box.left + box.right) / 2, box.bottom + 40, "middle", title(input)),
      points.length ? `<path class="calc-curve" d="M${points.map((p) => spot(p).join(" ")).join("L")}"/>` : "",
      `<circle class="calc-here" cx="${cx}" cy="${cy}" r="5.5"/>`,
    ];
    const at = `${typed(input, values[input.name])}: ${shown(output, outputs[output.name])}`;
    const name = `Curve of ${output.label} over ${input.label}. Marked at ${at}.`;
    return { name, drawn: parts.join("") };
  };
})();
