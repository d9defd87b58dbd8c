// Bytes and time of a token: what one decode step at batch 1 must read, and how long that takes at a given bandwidth.
// bytesPerToken is the twin of bytes_per_token in nanoqwen/model.py; a test runs both on the same dimensions.
"use strict";

const TokenBytes = (() => {
  // dims: num_layers, hidden, intermediate, num_heads, num_kv_heads, head_dim, vocab. Returns bytes by kind.
  // bits is the width of a weight of the seven projections; at 16 bits there are no scales.
  function bytesPerToken(dims, { bits, group, context, valueBytes }) {
    const q = dims.num_heads * dims.head_dim;
    const kv = dims.num_kv_heads * dims.head_dim;
    const h = dims.hidden;
    const weights = dims.num_layers * (2 * q * h + 2 * kv * h + 3 * h * dims.intermediate);
    const out = {
      int4: (weights * bits) / 8,
      scales: bits < 16 ? Math.floor(weights / group) * 2 : 0,
      lm_head: dims.vocab * h * 2,
      norms_biases: 2 * (dims.num_layers * (2 * h + q + 2 * kv) + h),
      embed_row: 2 * h,
      kv: context * 2 * dims.num_layers * kv * valueBytes,
    };
    out.total = Object.values(out).reduce((sum, n) => sum + n, 0);
    return out;
  }

  // Milliseconds that `bytes` take at `gbPerS` (10^9 bytes a second).
  function limitMs(bytes, gbPerS) {
    return (bytes / (gbPerS * 1e9)) * 1e3;
  }

  function size(bytes) {
    for (const [unit, one] of [["GB", 1e9], ["MB", 1e6], ["KB", 1e3]]) {
      if (bytes >= one) return `${(bytes / one).toPrecision(bytes >= 100 * one ? 4 : 3)} ${unit}`;
    }
    return `${bytes} B`;
  }

  const KINDS = { int4: "weights of the projections", scales: "their scales", lm_head: "output head", kv: "KV cache", rest: "norms, biases, one embedding row" };

  function build(config) {
    const { el } = NQ;
    const first = Object.keys(config.models)[0];
    let dims = { ...config.models[first] };
    const state = { bits: config.bits, group: config.group, context: config.context, gbPerS: Object.values(config.bandwidth)[0] };
    const controls = [];

    // A labelled slider; get and set reach the number it stands for.
    function slider(label, min, max, stepSize, get, set, format = (n) => n.toLocaleString("en")) {
      const shown = el("output", {});
      const input = el("input", {
        type: "range", min, max, step: stepSize, "aria-label": label,
        oninput: () => { set(Number(input.value)); model.value = ""; show(); },
      });
      const refresh = () => {
        input.value = get();
        shown.textContent = format(get());
        input.setAttribute("aria-valuetext", shown.textContent);
      };
      controls.push(refresh);
      return el("label", { class: "nq-slider" }, el("span", {}, label), input, shown);
    }

    function choice(label, values, get, set) {
      const select = el("select", { onchange: () => { set(Number(select.value)); show(); } }, ...values.map((v) => el("option", { value: v }, String(v))));
      controls.push(() => { select.value = get(); });
      return el("label", { class: "nq-slider" }, el("span", {}, label), select);
    }

    const model = el("select", { onchange: () => { if (model.value) { dims = { ...config.models[model.value] }; show(); } } },
      el("option", { value: "" }, "your own"), ...Object.keys(config.models).map((name) => el("option", { value: name }, name)));
    model.value = first;

    const dim = (key) => [() => dims[key], (n) => { dims[key] = n; }];
    const step = config.models[first].head_dim;
    const panel = el("div", { class: "nq-sliders" },
      el("label", { class: "nq-slider" }, el("span", {}, "model"), model),
      slider("layers", 1, 96, 1, ...dim("num_layers")),
      slider("hidden size", step, 8192, step, () => dims.hidden, (n) => {
        dims.hidden = n;  // Qwen2's query heads together are as wide as the residual stream
        dims.num_heads = Math.max(1, Math.round(n / dims.head_dim));
        dims.num_kv_heads = Math.min(dims.num_kv_heads, dims.num_heads);
      }),
      slider("MLP size", step, 32768, step, ...dim("intermediate")),
      slider("KV heads", 1, 16, 1, () => dims.num_kv_heads, (n) => { dims.num_kv_heads = Math.min(n, dims.num_heads); }),
      slider("vocabulary", 1024, 262144, 1024, ...dim("vocab")),
      slider("cached tokens", 0, 32768, 128, () => state.context, (n) => { state.context = n; }),
      choice("bits a weight", [4, 8, 16], () => state.bits, (n) => { state.bits = n; }),
      choice("weights a scale", config.groups, () => state.group, (n) => { state.group = n; }),
      slider("bandwidth", 1, 4, 0.005, () => Math.log10(state.gbPerS), (n) => { state.gbPerS = Math.round(10 ** n); },
        () => `${state.gbPerS.toLocaleString("en")} GB/s`));
    const cards = el("p", { class: "nq-cards" }, "by data sheet: ",
      ...Object.entries(config.bandwidth).map(([name, rate]) =>
        el("button", { type: "button", onclick: () => { state.gbPerS = rate; show(); } }, `${name}, ${rate.toLocaleString("en")} GB/s`)));

    const answer = el("p", { class: "nq-answer", "aria-live": "polite" });
    const bar = el("div", { class: "nq-stack", "aria-hidden": "true" });
    const body = el("tbody");
    const table = el("table", {}, el("thead", {}, el("tr", {}, ...["read at every token", "bytes", "share"].map((t) => el("th", { scope: "col" }, t)))), body);

    function show() {
      controls.forEach((refresh) => refresh());
      const bytes = bytesPerToken(dims, { ...state, valueBytes: config.value_bytes });
      const ms = limitMs(bytes.total, state.gbPerS);
      const parts = { int4: bytes.int4, scales: bytes.scales, lm_head: bytes.lm_head, kv: bytes.kv, rest: bytes.norms_biases + bytes.embed_row };
      answer.replaceChildren(el("b", {}, size(bytes.total)), " a token: at least ", el("b", {}, `${ms.toPrecision(3)} ms`),
        `, at most ${Number((1e3 / ms).toPrecision(3)).toLocaleString("en")} tokens a second`);
      bar.replaceChildren(...Object.entries(parts).map(([kind, n]) => el("span", { class: `nq-kind-${kind}`, style: `width:${(100 * n) / bytes.total}%` })));
      body.replaceChildren(...Object.entries(parts).map(([kind, n]) => el("tr", {},
        el("th", { scope: "row" }, el("span", { class: `nq-key nq-kind-${kind}` }), KINDS[kind]),
        el("td", {}, size(n)), el("td", {}, `${((100 * n) / bytes.total).toFixed(1)}%`))));
    }

    show();
    return el("div", { class: "nq-piece" }, panel, cards, answer, bar, table);
  }

  return { bytesPerToken, limitMs, build };
})();

if (typeof module !== "undefined") module.exports = TokenBytes;
else document.addEventListener("DOMContentLoaded", () => NQ.mount("token-bytes", TokenBytes.build));
