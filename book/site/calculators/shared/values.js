// Numbers as a calculator shows them, and as they are slid and typed.
//
// NAME.js pushes a declaration to courseCalculators:
//   name, title, formula (TeX), note (HTML, optional)
//   inputs: {name, label, symbol?, unit?, default} with {min, max, step}, and {scale: "log2", octave}
//     for a slider that moves in octaves (by what part of one), or with choices: {value, label}
//   presets?: {label, options: [{label, values}]} sets several inputs at once
//   outputs: {name, label, unit?, format: "whole", "short" or "bytes"}
//   compute(values of the inputs) -> values of the outputs
//   curve?: {x: an input, y: an output, log?}
"use strict";
globalThis.calculator = (() => {
  const grouped = (text) => text.replace(/^\d+/, (whole) => whole.replace(/\B(?=(\d{3})+$)/g, ","));
  const short = (x) => (x === 0 ? "0" : grouped(x >= 100 ? x.toFixed(0) : x.toPrecision(3)));

  function bytes(x) {
    let power = 0;
    for (; x >= 999.5 && power < 5; power++) x /= 1000;
    return `${short(x)}\u00a0${["bytes", "kB", "MB", "GB", "TB", "PB"][power]}`;
  }

  const formats = { whole: (x) => grouped(x.toFixed(0)), short, bytes };
  const withUnit = (text, unit) => (unit ? `${text}\u00a0${unit}` : text);
  const shown = (output, value) => withUnit(formats[output.format](value), output.unit);
  const typed = (input, value) => withUnit(grouped(String(value)), input.unit);

  // The nearest value that an input takes.
  function nearest(input, number) {
    const digits = (String(input.step).split(".")[1] ?? "").length;
    const stepped = Math.round(number / input.step) * input.step;
    return Number(Math.min(Math.max(stepped, input.min), input.max).toFixed(digits));
  }

  // With scale "log2" the slider moves in octaves.
  const toSlider = (input, value) => (input.scale === "log2" ? Math.log2(value) : value);
  const fromSlider = (input, at) => nearest(input, input.scale === "log2" ? 2 ** at : at);

  // The value that a text means to an input and, if that is not what it says, a sentence about it.
  function understood(input, text) {
    const number = text.trim() === "" ? NaN : Number(text);
    let value, allowed;
    if (input.choices) {
      const choice = input.choices.find((c) => String(c.value) === text.trim());
      if (choice) return { value: choice.value };
      value = input.default;
      allowed = input.choices.map((c) => c.value).join(", ");
    } else {
      value = Number.isNaN(number) ? input.default : nearest(input, number);
      if (value === number) return { value };
      allowed = `${grouped(String(input.min))} to ${grouped(String(input.max))}`;
    }
    const used = grouped(String(value));
    return { value, told: `${input.label}: ${used} in place of “${text.slice(0, 20)}” (${allowed}).` };
  }

  // Which preset the values are, or -1.
  const preset = (options, values) =>
    options.findIndex((o) => Object.entries(o.values).every(([name, v]) => values[name] === v));

  return { grouped, shown, typed, toSlider, fromSlider, understood, preset };
})();
