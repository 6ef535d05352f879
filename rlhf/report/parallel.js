// Brushes of parallel coordinates: drag along an axis, or focus it and use the keyboard, to keep only the
// settings in a range; other settings fade in the chart and in the table.
for (const svg of document.querySelectorAll("svg[data-axes]")) {
  const REACH = 30; // pixels beside an axis that count as the axis
  const axes = JSON.parse(svg.dataset.axes);
  const groups = [...svg.querySelectorAll(".axis")];
  const [bottom, top] = [Number(svg.dataset.bottom), Number(svg.dataset.top)];
  const brushes = new Map(); // [upper, lower] y by number of the axis
  const says = svg.closest("figure").querySelector("output");

  const isKept = (setting) => [...brushes].every(([number, [upper, lower]]) => {
    const y = axes[number].heights[setting];
    return y !== null && y >= upper - 0.5 && y <= lower + 0.5;
  });
  const show = () => {
    const settings = axes[0].heights.map((_, setting) => setting);
    const kept = settings.filter(isKept);
    for (const part of document.querySelectorAll("[data-setting]")) {
      part.classList.toggle("out", !isKept(Number(part.dataset.setting)));
    }
    groups.forEach((group, number) => {
      const [upper, lower] = brushes.get(number) ?? [0, 0];
      group.querySelector(".brush").setAttribute("y", upper);
      group.querySelector(".brush").setAttribute("height", lower - upper);
    });
    const parts = [...brushes.keys()].map((number) => {
      const {title, values} = axes[number];
      const seen = [...new Set(kept.map((setting) => values[setting]))];
      return `${title} ${seen.length > 3 ? `${seen.length} values` : seen.join(", ")}`;
    });
    const numbers = kept.map((setting) => setting + 1).join(", ");
    says.textContent = brushes.size ? `${kept.length} of ${settings.length} settings (${numbers}): ${parts.join("; ")}` : "";
  };
  const brush = (number, from, to) => {
    const [upper, lower] = [Math.min(from, to), Math.max(from, to)].map((y) => Math.min(bottom, Math.max(top, y)));
    if (lower - upper > 2) brushes.set(number, [upper, lower]); else brushes.delete(number);
    show();
  };

  const at = (event) => new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
  let held = null; // the axis and the y where the pointer went down
  svg.addEventListener("pointerdown", (event) => {
    const {x, y} = at(event);
    const number = axes.findIndex((axis) => Math.abs(axis.x - x) <= REACH);
    if (number < 0) return;
    held = {number, y};
    svg.setPointerCapture(event.pointerId);
    event.preventDefault();
  });
  svg.addEventListener("pointermove", (event) => held && brush(held.number, held.y, at(event).y));
  svg.addEventListener("pointerup", (event) => {
    if (held) brush(held.number, held.y, at(event).y);
    held = null;
  });

  // A quarter of the axis, which the arrow keys move, and + and - change.
  const STEP = (bottom - top) / 8;
  groups.forEach((group, number) => group.addEventListener("keydown", (event) => {
    const [upper, lower] = brushes.get(number) ?? [top - 2 * STEP, top];
    const move = (by) => lower + by > top && upper + by < bottom && brush(number, upper + by, Math.max(upper, top) === upper ? lower + by : top + 2 * STEP);
    const keys = {
      ArrowDown: () => move(STEP),
      ArrowUp: () => move(-STEP),
      "+": () => brush(number, upper - STEP, lower + STEP),
      "-": () => brush(number, upper + STEP / 2, lower - STEP / 2),
      Escape: () => brush(number, 0, 0),
    };
    if (!Object.hasOwn(keys, event.key)) return;
    event.preventDefault();
    keys[event.key]();
  }));
}
