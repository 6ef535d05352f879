// Draws every chart of the page with uPlot, and adds what uPlot lacks: use by keyboard, a text with the
// values under the pointer, a pointer that charts share, smoothing, and a table of the values.
const HEIGHT = 220;
const MOST_DOTS = 40; // a line of more points is drawn without dots
const MOST_RAW = 500; // with a line of more points, smoothing is on at first
const DASHES = [[], [6, 3], [2, 3], [9, 3, 2, 3]];

const show = (group, view) => {
  group.view = view;
  const [min, max] = view ?? ends(group);
  for (const {plot} of group.charts) plot?.setScale("x", {min, max});
};

const read = (box, data) => {
  const group = groupOf(data.xLabel);
  // ``place`` is the index of the row that the reader looks at; ``plot`` exists once the box has a width
  const chart = fill({box, group, figure: box.closest("figure"), place: null, plot: null}, data);
  group.charts.add(chart);
  listen(chart);
  return chart;
};

const xName = ({lines, xLabel}, row) => {
  const names = lines.map((line, index) => line.names?.[row.at[index]]);
  return names.find((name) => name !== undefined) ?? `${xLabel} ${shown(row.x)}`;
};
const valueText = (line, place) => {
  if (line.low) return `${shown(line.y[place])} (${shown(line.low[place])} to ${shown(line.high[place])})`;
  return shown(line.y[place]) + (line.half?.[place] ? ` ± ${shown(line.half[place])}` : "");
};
// Returns the index of the line's point that is nearest to a row; it is shown with its x if that differs.
const nearest = (u, series, index) => {
  const column = u.data[series];
  for (let away = 0; away < column.length; away++) {
    if (column[index - away] != null) return index - away;
    if (column[index + away] != null) return index + away;
  }
  return index;
};
const tell = (chart, index) => {
  const {lines, rows, plot} = chart;
  chart.place = index;
  const values = lines.map((line, series) => {
    const row = rows[nearest(plot, series + 1, index)];
    const away = row.x === rows[index].x ? "" : ` (at ${shown(row.x)})`;
    return `${line.label} ${valueText(line, row.at[series])}${away}`;
  });
  chart.figure.querySelector("output").textContent = `${xName(chart, rows[index])}: ${values.join(", ")}`;
};

// The callbacks below read chart.lines again when they are called, since new data can replace it.
const draw = (chart) => {
  const {box, figure, group, lines} = chart;
  const colour = (name) => getComputedStyle(box).getPropertyValue(name);
  const isLog = isLogarithmic(chart);
  const axis = {
    stroke: () => colour("--soft"),
    font: "12px system-ui, sans-serif",
    labelFont: "12px system-ui, sans-serif",
    grid: {stroke: () => colour("--line"), width: 1},
    ticks: {show: false},
  };
  const named = chart.ticks && {
    splits: () => chart.ticks.map(([at]) => at),
    values: () => chart.ticks.map(([, label]) => label),
  };
  const isWhole = () => chart.rows.every((row) => Number.isInteger(row.x));
  const xSteps = () => isWhole() ? STEPS.filter((step) => step >= 1) : STEPS;
  // Drops marks at impossible values: shares above 1, and values below 0 if the chart has none.
  const possible = (u, marks) =>
    marks.map((mark) => mark < chart.floor || mark > (chart.most ?? Infinity) ? null : mark);
  const yEnds = () => {
    const [first, last] = group.view ?? ends(group);
    const [least, most] = range(chart.lines.flatMap((line) => [...lows(line), ...highs(line)].filter((_, place) =>
      line.x[place % line.x.length] >= first && line.x[place % line.x.length] <= last)));
    if (least > most) return [0, 1]; // no point is visible
    return isLog ? [least / 1.1, most * 1.1] : padded(...widened(least, most, chart.most), 0.05);
  };
  chart.plot?.destroy();
  chart.plot = new uPlot({
    width: box.clientWidth,
    height: HEIGHT,
    legend: {show: false},
    scales: {
      x: {time: false, range: () => group.view ?? ends(group)},
      y: {range: yEnds, ...(isLog ? {distr: 3} : {})},
    },
    axes: [
      {...axis, label: chart.xLabel, labelSize: 18, size: 24, gap: 2, values: numbered, incrs: xSteps, ...named},
      {...axis, size: 58, space: 28, ...(isLog ? {values: numberedByTens} : {values: numbered, incrs: STEPS, filter: possible})},
    ],
    series: [{}, ...lines.map((line, index) => ({
      label: line.label,
      stroke: () => colour(`--s${tone(line, index)}`),
      width: 1.8,
      dash: DASHES[tone(line, index) % DASHES.length],
      alpha: isFaint(line) ? 0.15 : isSmoothed(line) ? 0.3 : 1,
      spanGaps: true,
      ...(line.joined ? {} : {paths: () => null}),
      points: {
        show: () => !line.joined || chart.lines[index].x.length <= MOST_DOTS,
        size: line.settings || !line.joined ? 8 : 5,
        fill: () => colour(`--s${tone(line, index)}`),
      },
    })), ...lines.map((line, index) => ({
      stroke: () => colour(`--s${tone(line, index)}`),
      width: 2.2,
      alpha: isFaint(line) ? 0.15 : 1,
      spanGaps: true,
      points: {show: false},
    }))],
    cursor: {
      drag: {x: true, y: false, setScale: false},
      dataIdx: nearest,
      points: {size: 8, show: (u, series) => series <= lines.length && undefined},
      y: false,
      bind: {dblclick: () => () => show(group, null)},
      sync: {key: chart.xLabel, filters: {pub: (type) => type === "mousemove" || type === "mouseleave"}},
    },
    hooks: {
      drawClear: [(u) => {
        const paint = paintOf(u, colour);
        drawHealthy(paint, chart);
        paint.inside(() => chart.lines.forEach((line, index) => line.joined && !isFaint(line) && drawBand(paint, line, tone(line, index))));
      }],
      draw: [(u) => {
        const paint = paintOf(u, colour);
        paint.inside(() => {
          chart.lines.forEach((line, index) => drawIntervals(paint, line, tone(line, index)));
          chart.lines.forEach((line, index) => !line.joined && !isFaint(line) && drawBand(paint, line, tone(line, index)));
          for (const line of chart.lines) if (line.settings) drawNumbers(paint, line, look.picked);
          drawFlags(paint, chart.flags);
        });
      }],
      setCursor: [(u) => u.cursor.idx != null && tell(chart, u.cursor.idx)],
      setSelect: [(u) => {
        const {left, width} = u.select;
        if (width > 0) show(group, [u.posToVal(left, "x"), u.posToVal(left + width, "x")]);
        u.setSelect({left: 0, width: 0}, false);
      }],
    },
  }, columns(chart), box);
  chart.isLog = isLog;
};

// Adds the keyboard commands and the table of values to a chart.
const listen = (chart) => {
  const {box, figure, group} = chart;
  const go = (wanted) => {
    const index = Math.max(0, Math.min(chart.rows.length - 1, wanted)), {x} = chart.rows[index];
    const {min, max} = chart.plot.scales.x;
    if (x < min || x > max) show(group, [x - (max - min) / 2, x + (max - min) / 2]);
    chart.plot.setCursor({left: chart.plot.valToPos(x, "x"), top: HEIGHT / 2}, true, true);
    tell(chart, index); // setCursor finds the first of several points at one x
  };
  const zoom = (factor) => {
    const {min, max} = chart.plot.scales.x;
    const centre = chart.place === null ? (min + max) / 2 : chart.rows[chart.place].x;
    const low = centre - (centre - min) * factor, high = centre + (max - centre) * factor;
    const [first, last] = ends(group);
    show(group, low <= first && high >= last ? null : [low, high]);
  };
  const keys = {
    ArrowLeft: () => go((chart.place ?? 1) - 1),
    ArrowRight: () => go((chart.place ?? -1) + 1),
    Home: () => go(0),
    End: () => go(chart.rows.length - 1),
    "+": () => zoom(0.5),
    "-": () => zoom(2),
    Escape: () => show(group, null),
  };
  box.addEventListener("keydown", (event) => {
    if (!Object.hasOwn(keys, event.key) || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  // Of the charts that share a pointer, screen readers read only the one with the focus.
  box.addEventListener("focus", () => figure.querySelector("output").setAttribute("aria-live", "polite"));
  box.addEventListener("blur", () => figure.querySelector("output").setAttribute("aria-live", "off"));

  const table = () => {
    const {lines, rows} = chart;
    const made = document.createElement("table");
    const add = (parent, name, words) => {
      const row = parent.insertRow();
      for (const text of words) row.appendChild(document.createElement(name)).textContent = text;
    };
    add(made.createTHead(), "th", [chart.xLabel, ...lines.map((line) => line.label)]);
    const body = made.createTBody();
    const isNamed = lines.some((line) => line.names);
    for (const row of rows) {
      const cells = lines.map((line, index) => row.at[index] === undefined ? "" : valueText(line, row.at[index]));
      add(body, "td", [isNamed ? xName(chart, row) : shown(row.x), ...cells]);
    }
    return made;
  };
  const values = figure.querySelector("details");
  values.addEventListener("toggle", () => values.querySelector("div").replaceChildren(table()));
};

// A chart is drawn when it first has a width: charts in a closed section wait until it is opened.
const charts = new Map();
const drawAgain = () => charts.forEach((chart) => chart.plot && draw(chart));
const sizes = new ResizeObserver((entries) => {
  for (const {target} of entries) {
    const chart = charts.get(target);
    if (!target.isConnected) {
      sizes.unobserve(target);
      charts.delete(target);
      chart.group.charts.delete(chart);
    } else if (!target.clientWidth) continue;
    else if (chart.plot) chart.plot.setSize({width: target.clientWidth, height: HEIGHT});
    else draw(chart);
  }
});
// Lines of very many points would look like bands, so they are smoothed until the reader chooses.
const smoothLong = ({lines}) => {
  if (look.smoothing !== null || !lines.some((line) => line.joined && line.x.length > MOST_RAW)) return;
  document.getElementById("smoothing").value = look.smoothing = 0.6;
  drawAgain();
};
const add = (box, data) => {
  smoothLong(data);
  charts.set(box, read(box, data));
  sizes.observe(box);
};
const found = [...document.querySelectorAll("[data-chart]")].map((box) => [box, JSON.parse(box.dataset.chart)]);
for (const [box, data] of found) if (data.lines) add(box, data); // a live page gets its data later
// A live page sends new data of a chart as an event to the chart's box, which may be a new one. The zoom stays.
document.addEventListener("chart", ({target, detail}) => {
  target.chart = detail;
  const chart = charts.get(target);
  if (!chart) {
    add(target, detail);
    return;
  }
  smoothLong(detail);
  const shape = () => chart.lines.map((line) => line.joined).join();
  const before = shape();
  fill(chart, detail);
  if (!chart.plot) return;
  if (shape() !== before || isLogarithmic(chart) !== chart.isLog) {
    draw(chart);
    return;
  }
  const [min, max] = chart.group.view ?? ends(chart.group);
  chart.plot.setData(columns(chart), false);
  chart.plot.setScale("x", {min, max});
});

// A chart that has not been drawn when the page is printed would be an empty card; uPlot draws at once in a batch.
const drawAll = () => charts.forEach((chart, box) => {
  if (!box.clientWidth || chart.plot) return;
  draw(chart);
  chart.plot.batch(() => {});
});
addEventListener("beforeprint", drawAll);
for (const media of ["(prefers-color-scheme: dark)", "print"]) {
  matchMedia(media).addEventListener("change", () => charts.forEach(({plot}) => plot?.redraw(false)));
}
document.addEventListener("pick", (event) => {
  look.picked = event.detail;
  drawAgain();
});
const choose = (id, change) => document.getElementById(id)?.addEventListener("input", (event) => {
  change(event.target);
  drawAgain();
});
choose("smoothing", (select) => look.smoothing = Number(select.value));
choose("log", (box) => look.isLog = box.checked);
document.getElementById("whole")?.addEventListener("click", () => groups.forEach((group) => show(group, null)));
