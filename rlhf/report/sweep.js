"use strict";
(() => {
  const buttons = [...document.querySelectorAll("button[data-pick]")];
  const pick = (button) => {
    const was = button.getAttribute("aria-pressed") === "true";
    for (const each of buttons) each.setAttribute("aria-pressed", String(each === button && !was));
    const detail = was ? null : Number(button.dataset.pick);
    document.dispatchEvent(new CustomEvent("pick", {detail})); // charts.js listens
  };
  for (const button of buttons) button.addEventListener("click", () => pick(button));
})();
