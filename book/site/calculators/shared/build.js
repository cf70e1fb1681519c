// Runs in Node while the book is built, `node build.js FOLDER NAME...`: holds each declaration and
// its vectors against each other and prints {NAME: {formula, note, form}}, or on stderr what is
// wrong. A form must hold no blank line, since it stands in Markdown.
"use strict";
const { readFileSync } = require("fs");
require("./values.js");
require("./chart.js");
const { shown, typed, toSlider, understood, preset, chart } = calculator;

const option = (value, words, chosen) =>
  `<option value="${value}"${chosen ? " selected" : ""}>${words}</option>`;

function control(d, input, value) {
  const id = `${d.name}-${input.name}`;
  const symbol = input.symbol ? ` <i>${input.symbol}</i>` : "";
  const label = `<label for="${id}" id="${id}-label">${input.label}${symbol}</label>`;
  if (input.choices) {
    const options = input.choices.map((c) => option(c.value, c.label, c.value === value)).join("");
    return `<div>${label}\n<select id="${id}" name="${input.name}">${options}</select></div>`;
  }
  const step = input.scale === "log2" ? input.octave : input.step;
  const [low, high, at] = [input.min, input.max, value].map((v) => toSlider(input, v));
  return `<div>${label}
<span class="calc-entry"><input type="number" name="${input.name}" aria-labelledby="${id}-label" \
min="${input.min}" max="${input.max}" step="${input.step}" value="${value}">\
<span class="calc-unit">${input.unit ?? ""}</span></span>
<input type="range" class="pst-js-only" id="${id}" data-slider="${input.name}" min="${low}" \
max="${high}" step="${step}" value="${at}" aria-valuetext="${typed(input, value)}"></div>`;
}

function presets(d, values) {
  const { label, options } = d.presets;
  const chosen = preset(options, values);
  const named = options.map((o, i) => option(i, o.label, i === chosen));
  named.push(option(options.length, "own numbers", chosen < 0));
  return `<div><label for="${d.name}-preset">${label}</label>
<select id="${d.name}-preset" data-preset>${named.join("")}</select></div>`;
}

function form(d, { inputs, outputs }) {
  const controls = d.inputs.map((input) => control(d, input, inputs[input.name]));
  if (d.presets) controls.unshift(presets(d, inputs));
  const results = d.outputs.map((o) =>
    `<div><dt>${o.label}</dt><dd data-output="${o.name}">${shown(o, outputs[o.name])}</dd></div>`);
  let curve = "";
  if (d.curve) {
    const { name, drawn } = chart(d, inputs, outputs);
    curve = `<svg role="img" aria-label="${name}" viewBox="0 0 360 230">${drawn}</svg>`;
  }
  return `<form class="calc" aria-label="Calculator: ${d.title}" autocomplete="off" novalidate>
<fieldset disabled>
${controls.join("\n")}
</fieldset>
<div class="calc-answer"><dl>
${results.join("\n")}
</dl>
${curve}</div>
<div class="calc-foot"><button type="button" class="pst-js-only" disabled>Copy link</button>
<noscript>This is one example; with JavaScript its numbers can be changed.</noscript>
<p role="status"></p></div>
</form>`;
}

// What is wrong with a declaration or its vectors, or undefined.
function fault(d, vectors) {
  const forbidden = d.inputs.find((i) => ["item", "length", "namedItem"].includes(i.name));
  if (forbidden) return `${d.name}.js: "${forbidden.name}" cannot name an input of a form`;
  for (const [index, { inputs, outputs }] of vectors.entries()) {
    const where = `${d.name}.json, vector ${index + 1}:`;
    const declared = d.inputs.map((i) => i.name).sort().join();
    if (Object.keys(inputs).sort().join() !== declared) return `${where} its inputs are not ${declared}`;
    for (const input of d.inputs) {
      const { told } = understood(input, String(inputs[input.name]));
      if (told) return `${where} ${told}`;
      if (!index && inputs[input.name] !== input.default)
        return `${where} ${input.name} is ${inputs[input.name]}, the default is ${input.default}`;
    }
    const computed = d.compute(inputs);
    const names = d.outputs.map((o) => o.name).sort().join();
    for (const found of [outputs, computed])
      if (Object.keys(found).sort().join() !== names) return `${where} the outputs are not ${names}`;
    for (const { name, format } of d.outputs) {
      const [one, other] = [outputs[name], computed[name]];
      const tolerance = format === "whole" ? 0 : 1e-6 * Math.abs(one);
      if (!(Math.abs(one - other) <= tolerance))
        return `${where} ${name} is ${one}, but ${d.name}.js computes ${other}`;
    }
  }
}

// What `read` returns; a failure names the file.
function reading(file, read) {
  try {
    return read();
  } catch (problem) {
    throw `${file}: ${problem.message}`;
  }
}

function page(folder, name) {
  reading(`${name}.js`, () => require(`${folder}/${name}.js`));
  const d = globalThis.courseCalculators?.find((one) => one.name === name);
  if (!d) throw `${name}.js: declares no calculator called ${name}`;
  const text = readFileSync(`${folder}/${name}.json`, "utf8");
  const vectors = reading(`${name}.json`, () => JSON.parse(text));
  if (!vectors.length) throw `${name}.json: holds no vector`;
  const found = reading(`${name}.js`, () => fault(d, vectors));
  if (found) throw found;
  const written = reading(`${name}.js`, () => form(d, vectors[0]));
  return { formula: d.formula, note: d.note, form: written };
}

const [folder, ...names] = process.argv.slice(2);
try {
  const pages = Object.fromEntries(names.map((name) => [name, page(folder, name)]));
  process.stdout.write(JSON.stringify(pages));
} catch (problem) {
  process.stderr.write(typeof problem === "string" ? problem : problem.stack);
  process.exitCode = 1;
}
