"use strict";
// Fetches changes of the run, and updates the page; its scroll position and focus stay.
(() => {
  const EVERY = 2000; // milliseconds
  const FOCUSABLE = "a, button, input, select, summary, [tabindex]";
  const query = new URLSearchParams(location.search);
  const charts = new Map(); // data by key
  let version = "";

  // A chart is drawn when the window shows it; the other charts wait until they come into view.
  const keyOf = (box) => JSON.parse(box.dataset.chart).key;
  const shown = new Set();
  const draw = (box) => {
    const chart = charts.get(keyOf(box));
    if (box.chart !== chart) box.dispatchEvent(new CustomEvent("chart", {bubbles: true, detail: chart}));
  };
  const view = new IntersectionObserver((entries) => {
    for (const {target, isIntersecting} of entries) {
      if (isIntersecting) draw(target);
      shown[isIntersecting ? "add" : "delete"](target);
    }
  });

  // A figure whose HTML has not changed stays, so that it keeps its zoom and open table.
  const source = new WeakMap();
  const replace = (part, html) => {
    const focused = document.activeElement;
    const place = [...part.querySelectorAll(FOCUSABLE)].indexOf(focused);
    const sections = () => [...part.querySelectorAll("details:not(figure details)")];
    const areOpen = sections().map((each) => each.open);
    const made = document.createElement("template");
    made.innerHTML = html;
    const old = new Map([...part.querySelectorAll("figure")].map((figure) => [source.get(figure), figure]));
    for (const figure of made.content.querySelectorAll("figure")) {
      const text = figure.outerHTML;
      if (old.has(text)) figure.replaceWith(old.get(text)); else source.set(figure, text);
    }
    part.replaceChildren(made.content);
    sections().forEach((each, index) => each.open = areOpen[index] ?? each.open);
    if (place < 0) return;
    (focused.isConnected ? focused : part.querySelectorAll(FOCUSABLE)[place])?.focus({preventScroll: true});
  };

  const merge = (key, chart) => {
    const old = charts.get(key)?.lines ?? [];
    const lines = chart.lines.map(({from, ...line}, index) => {
      for (const [name, column] of Object.entries(line)) {
        if (Array.isArray(column)) line[name] = (old[index]?.[name] ?? []).slice(0, from).concat(column);
      }
      return line;
    });
    charts.set(key, {...chart, lines});
  };

  const apply = (found) => {
    document.title = found.title;
    for (const [key, chart] of Object.entries(found.charts)) merge(key, chart);
    for (const part of document.querySelectorAll("[data-part]")) {
      const html = found.parts[part.dataset.part];
      if (html !== undefined) replace(part, html);
    }
    const boxes = [...document.querySelectorAll("[data-chart]")];
    const used = new Set(boxes.map(keyOf));
    for (const key of charts.keys()) if (!used.has(key)) charts.delete(key);
    for (const box of boxes) {
      box.setAttribute("aria-label", charts.get(keyOf(box)).description);
      if (shown.has(box)) draw(box); else view.observe(box);
    }
    version = found.version;
  };

  // A print shows all charts of the open sections, also those that have not come into view.
  addEventListener("beforeprint", () => {
    document.querySelectorAll("[data-chart]").forEach(draw);
    drawAll();
  });

  const update = async () => {
    query.set("since", version);
    const answer = await fetch(`updates?${query}`);
    if (!answer.ok) throw new Error(answer.statusText);
    apply(await answer.json());
  };
  const follow = async () => {
    if (!document.hidden) {
      const isLost = await update().then(() => false, () => true);
      document.getElementById("lost").hidden = !isLost;
    }
    setTimeout(follow, EVERY);
  };
  follow();
})();
