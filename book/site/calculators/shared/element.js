// <course-calculator name="NAME">: brings the form that the build has written to life.
"use strict";
customElements.define("course-calculator", class extends HTMLElement {
  connectedCallback() {
    this.d = courseCalculators.find((d) => d.name === this.getAttribute("name"));
    this.form = this.querySelector("form");
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("input", (event) => this.changed(event.target));
    this.form.addEventListener("change", (event) => this.left(event.target));
    this.form.querySelector("button").addEventListener("click", () => this.share());
    for (const control of this.form.querySelectorAll("[disabled]")) control.disabled = false;
    const notices = this.fromAddress(new URLSearchParams(location.search));
    this.write(null);
    if (notices.length) this.say(notices.join(" "));
  }

  // Start from the address: ?NAME.INPUT=VALUE for any of the inputs, else from the defaults.
  fromAddress(query) {
    const notices = [];
    this.values = Object.fromEntries(this.d.inputs.map((input) => [input.name, input.default]));
    for (const [key, text] of query) {
      if (!key.startsWith(`${this.d.name}.`)) continue;
      const input = this.d.inputs.find((i) => key === `${this.d.name}.${i.name}`);
      if (!input) {
        notices.push(`There is no input “${key.slice(0, 40)}”.`);
        continue;
      }
      const { value, told } = calculator.understood(input, text);
      this.values[input.name] = value;
      if (told) notices.push(told);
    }
    return notices;
  }

  changed(control) {
    if (control.dataset.preset !== undefined) {
      Object.assign(this.values, this.d.presets.options[control.value]?.values);
    } else if (control.dataset.slider) {
      const input = this.d.inputs.find((i) => i.name === control.dataset.slider);
      this.values[input.name] = calculator.fromSlider(input, Number(control.value));
    } else {
      const input = this.d.inputs.find((i) => i.name === control.name);
      const { value, told } = calculator.understood(input, control.value);
      control.ariaInvalid = told ? "true" : null;
      if (told) return; // half typed, perhaps
      this.values[input.name] = value;
    }
    this.write(control);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.say(""), 600); // not at each step of a slider
  }

  // A number that is still impossible when its field is left gives way to the nearest possible one.
  left(control) {
    if (control.type !== "number" || !control.ariaInvalid) return;
    const input = this.d.inputs.find((i) => i.name === control.name);
    const { value, told } = calculator.understood(input, control.value);
    control.ariaInvalid = null;
    this.values[input.name] = value;
    this.write(null);
    this.say(told);
  }

  // Show the values and what follows from them; the control in hand is left alone.
  write(inHand) {
    const { d, form, values } = this;
    const outputs = d.compute(values);
    const put = (control, value) => {
      if (control && control !== inHand) control.value = value;
    };
    for (const input of d.inputs) {
      const slider = form.querySelector(`[data-slider="${input.name}"]`);
      put(form.querySelector(`[name="${input.name}"]`), values[input.name]);
      put(slider, calculator.toSlider(input, values[input.name]));
      slider?.setAttribute("aria-valuetext", calculator.typed(input, values[input.name]));
    }
    if (d.presets) {
      const { options } = d.presets;
      const chosen = calculator.preset(options, values);
      form.querySelector("[data-preset]").value = chosen < 0 ? options.length : chosen;
    }
    const results = d.outputs.map((output) => {
      const text = calculator.shown(output, outputs[output.name]);
      form.querySelector(`[data-output="${output.name}"]`).textContent = text;
      return `${output.label}: ${text}`;
    });
    this.result = `${results.join("; ")}.`;
    if (d.curve) {
      const { name, drawn } = calculator.chart(d, values, outputs);
      const svg = form.querySelector("svg");
      svg.setAttribute("aria-label", name);
      svg.innerHTML = drawn;
    }
  }

  // A notice is for all to see; the result stands in the form and is spoken only.
  say(notice) {
    clearTimeout(this.timer);
    const spoken = document.createElement("span");
    spoken.className = "visually-hidden";
    spoken.textContent = ` ${this.result}`;
    this.form.querySelector("[role=status]").replaceChildren(notice, spoken);
  }

  async share() {
    const url = new URL(location.href);
    for (const input of this.d.inputs) {
      url.searchParams.set(`${this.d.name}.${input.name}`, this.values[input.name]);
    }
    url.hash = this.id;
    history.replaceState(null, "", url);
    try {
      await navigator.clipboard.writeText(url.href);
      this.say("The link is copied.");
    } catch {
      this.say("The link is in the address bar.");
    }
  }
});
