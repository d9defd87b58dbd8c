// What the interactive pieces share: making elements, and putting each piece into its place on the page.
// Plain scripts, no modules: pages opened straight from the disk (file://) may not load modules.
"use strict";

const NQ = {
  // el("label", {class: "x", onclick: f}, "text", child, ...): an element with attributes, listeners and children.
  el(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value === true) element.setAttribute(name, "");
      else if (value !== false && value != null) element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  },

  // Replace the still figure in every place marked data-nq="name" by what build(config) returns.
  mount(name, build) {
    document.querySelectorAll(`[data-nq="${name}"]`).forEach((place) => {
      const still = place.querySelector("figure");
      const piece = build(JSON.parse(place.dataset.config));
      if (still) still.replaceWith(piece);
      else place.append(piece);
    });
  },
};
