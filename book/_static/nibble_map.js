// The nibble map: eight signed 4-bit weights in one 32-bit word, in ValueShuffle order, and the two masks that take them out.
// The order of the nibbles is not written here: it comes from config/nanoqwen.yaml with the page.
"use strict";

const NibbleMap = (() => {
  const PAIR_MASK = 0x000f000f;

  // Eight codes in [-8, 7] -> the word as an unsigned number; weight i sits at bit shifts[i].
  function packWord(codes, shifts) {
    return codes.reduce((word, code, i) => (word | ((code & 0xf) << shifts[i])) >>> 0, 0);
  }

  // Two's complement of four bits.
  function signed(nibble) {
    return nibble >= 8 ? nibble - 16 : nibble;
  }

  // The word -> eight codes.
  function unpackWord(word, shifts) {
    return shifts.map((shift) => signed((word >>> shift) & 0xf));
  }

  // Step j of the unpacking: weights 2j and 2j+1, one in the low bits of each 16-bit half.
  function pair(word, j) {
    const shifted = word >>> (4 * j);
    const masked = (shifted & PAIR_MASK) >>> 0;
    return { shifted, masked, low: signed(masked & 0xf), high: signed(masked >>> 16) };
  }

  // What a reader sees that expects weight i at bit 4i: why a file names its layout.
  function plainOrder(word) {
    return Array.from({ length: 8 }, (_, i) => signed((word >>> (4 * i)) & 0xf));
  }

  const hex = (word) => "0x" + (word >>> 0).toString(16).toUpperCase().padStart(8, "0");
  const minus = (n) => String(n).replace("-", "\u2212");

  function build(config) {
    const { el } = NQ;
    const shifts = config.shuffle_bits;
    const ownerOf = (bit) => shifts.indexOf(bit - (bit % 4));
    let codes = [3, -1, 7, -8, 0, 5, -4, 2];
    let step = 0;

    const inputs = codes.map((code, i) =>
      el("input", {
        type: "number", min: -8, max: 7, step: 1, value: code, inputmode: "text",
        oninput: (event) => {
          const value = event.target.valueAsNumber;
          const ok = Number.isInteger(value) && value >= -8 && value <= 7;
          event.target.setAttribute("aria-invalid", String(!ok));
          if (ok) { codes[i] = value; show(); }
        },
        onblur: (event) => { event.target.value = codes[i]; event.target.setAttribute("aria-invalid", "false"); },
      }));
    const weights = el("div", { class: "nq-weights", role: "group", "aria-label": "eight weights, each from -8 to 7" },
      ...inputs.map((input, i) => el("label", {}, el("span", {}, `w${i}`), input)));

    const bits = [];  // bits[b] is the button of bit b
    const nibbles = [];  // nibbles[i] is the box of weight i
    const half = (name, from) => el("div", { class: "nq-half" }, el("span", { class: "nq-half-name" }, name),
      ...[from + 12, from + 8, from + 4, from].map((base) => {
        const i = ownerOf(base);
        const buttons = [3, 2, 1, 0].map((k) => (bits[base + k] = el("button", {
          type: "button",
          onclick: () => {
            const word = (packWord(codes, shifts) ^ (1 << (base + k))) >>> 0;
            codes = unpackWord(word, shifts);
            inputs[i].value = codes[i];
            show();
          },
        })));
        return (nibbles[i] = el("div", { class: "nq-nibble" },
          el("span", { class: "nq-name" }, `w${i}`), el("span", { class: "nq-bits" }, ...buttons),
          el("span", { class: "nq-at" }, `bit ${base}`)));
      }));
    const wordValue = el("output", { class: "nq-hex" });
    const word = el("div", { class: "nq-word", role: "group", "aria-label": "the 32-bit word, highest bit first" },
      half("high half", 16), half("low half", 0));

    const stepper = el("fieldset", { class: "nq-steps" }, el("legend", {}, "Take out a pair"),
      ...[0, 1, 2, 3].map((j) => el("label", {},
        el("input", { type: "radio", name: config.id, value: j, checked: j === 0, onchange: () => { step = j; show(); } }),
        ` j = ${j}`)));
    const sums = el("pre", { class: "nq-sums", tabindex: 0, role: "group", "aria-label": "the shift and the mask" });
    const outcome = el("p", { class: "nq-outcome", "aria-live": "polite" });
    const wrong = el("p", { class: "nq-aside" });

    function show() {
      const value = packWord(codes, shifts);
      const got = pair(value, step);
      wordValue.textContent = hex(value);
      bits.forEach((button, b) => {
        const on = (value >>> b) & 1;
        button.textContent = on;
        button.setAttribute("aria-pressed", String(Boolean(on)));
        button.setAttribute("aria-label", `bit ${b}, of w${ownerOf(b)}`);
      });
      nibbles.forEach((box, i) => box.classList.toggle("nq-on", i >> 1 === step));
      const line = (label, number) => {
        const text = (number >>> 0).toString(2).padStart(32, "0").replace(/(.{4})(?=.)/g, "$1 ");
        return `${label.padEnd(13)}${text.slice(0, 19)}  ${text.slice(20)}\n`;
      };
      sums.replaceChildren(
        line("word", value), line(`>> ${4 * step}`, got.shifted), line("& 0x000F000F", PAIR_MASK),
        el("b", {}, line("pair", got.masked).trimEnd()));
      outcome.replaceChildren(
        "Low half ", el("b", {}, `w${2 * step} = ${minus(got.low)}`), ", high half ", el("b", {}, `w${2 * step + 1} = ${minus(got.high)}`),
        ": one shift and one mask bring two weights to where a half2 holds its two numbers.");
      wrong.textContent = `A reader that expects w0 to w7 in plain order from the low bits up would see ${plainOrder(value).map(minus).join(", ")}.`;
    }

    show();
    return el("div", { class: "nq-piece" }, weights, el("p", { class: "nq-line" }, "packed: ", wordValue), word, stepper, sums, outcome, wrong);
  }

  return { packWord, unpackWord, pair, plainOrder, build };
})();

if (typeof module !== "undefined") module.exports = NibbleMap;
else document.addEventListener("DOMContentLoaded", () => NQ.mount("nibble-map", NibbleMap.build));
