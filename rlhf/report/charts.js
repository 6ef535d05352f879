"use strict";
// Draws every chart of the page with uPlot, and adds what uPlot lacks: the keyboard, a line with the
// values under the pointer, intervals, flags, and a table of the values.
(() => {
  const HEIGHT = 220;
  const MOST_DOTS = 40; // points of a line that are also drawn as dots
  const DASHES = [[], [6, 3], [2, 3], [9, 3, 2, 3]];
  let picked = null; // the setting of a sweep that the reader has chosen

  const shown = (value) => {
    const size = Math.abs(value);
    return value && (size < 1e-3 || size >= 1e5) ? value.toExponential(2) : String(+value.toPrecision(4));
  };
  const STEPS = Array.from({length: 40}, (_, power) =>
    [1, 2, 5].map((factor) => Number(`${factor}e${power - 20}`))).flat(); // between two marks of an axis
  const numbered = (u, values, _axis, _space, step) => {
    const largest = Math.max(...values.map(Math.abs));
    const digits = Math.floor(Math.log10(step * 1.001));
    const isPlain = largest >= 1e-3 && largest < 1e5;
    return values.map((value) => isPlain || !value ? value.toFixed(value ? Math.max(0, -digits) : 0)
      : value.toExponential(Math.max(0, Math.floor(Math.log10(Math.abs(value))) - digits)));
  };
  const padded = (low, high, share) => {
    const margin = share * (high - low) || 0.1 * Math.abs(high) || 1;
    return [low - margin, high + margin];
  };

  // uPlot needs one x column: lines are merged by x, and a row has the place of each line's point.
  const merged = (lines) => {
    const rows = [];
    const points = lines.flatMap((line, index) => line.x.map((x, place) => ({x, index, place})));
    for (const {x, index, place} of points.sort((a, b) => a.x - b.x)) {
      let row = rows.at(-1);
      if (row?.x !== x || row.at[index] !== undefined) rows.push(row = {x, at: []});
      row.at[index] = place;
    }
    return rows;
  };

  const build = (box) => {
    const figure = box.closest("figure");
    let chart, lines, rows, xs, columns, ends, xEnds;
    const read = (data) => {
      chart = data;
      lines = chart.lines;
      rows = merged(lines);
      xs = rows.map((row) => row.x);
      columns = lines.map((line, index) => rows.map((row) => line.y[row.at[index]] ?? null));
      ends = lines.flatMap((line) =>
        (line.half ?? []).flatMap((half, place) => [line.y[place] - half, line.y[place] + half]));
      xEnds = lines.flatMap((line) =>
        (line.xHalf ?? []).flatMap((half, place) => [line.x[place] - half, line.x[place] + half]));
    };
    read(box.chart ?? JSON.parse(box.dataset.chart));
    const colour = (name) => getComputedStyle(box).getPropertyValue(name);

    const xName = (row) => {
      for (const [index, line] of lines.entries()) {
        const name = line.names?.[row.at[index]];
        if (name !== undefined) return name;
      }
      return `${chart.xLabel} ${shown(row.x)}`;
    };
    const withHalf = (line, place) =>
      shown(line.y[place]) + (line.half?.[place] ? ` ± ${shown(line.half[place])}` : "");
    // A line without a point at x: the nearest, with its own x.
    const nearest = (u, series, index) => {
      const column = u.data[series];
      for (let away = 0; away < column.length; away++) {
        if (column[index - away] != null) return index - away;
        if (column[index + away] != null) return index + away;
      }
      return index;
    };
    let place = null; // of the row that the reader looks at
    const tell = (index) => {
      const values = lines.map((line, series) => {
        const row = rows[nearest(plot, series + 1, index)];
        const away = row.x === xs[index] ? "" : ` (at ${shown(row.x)})`;
        return `${line.label} ${withHalf(line, row.at[series])}${away}`;
      });
      figure.querySelector("output").textContent = `${xName(rows[index])}: ${values.join(", ")}`;
    };

    const band = ({ctx, bbox, valToPos}) => {
      if (!chart.healthy) return;
      const top = bbox.top, bottom = bbox.top + bbox.height;
      const [low, high] = chart.healthy.map((value) =>
        Math.min(bottom, Math.max(top, valToPos(value, "y", true))));
      ctx.fillStyle = colour("--good");
      ctx.fillRect(bbox.left, high, bbox.width, low - high);
    };
    const marks = (u) => {
      const {ctx, bbox} = u;
      const [x, y] = ["x", "y"].map((scale) => (value) => u.valToPos(value, scale, true));
      const stroke = (...steps) => {
        ctx.beginPath();
        for (const [fromX, fromY, toX, toY] of steps) {
          ctx.moveTo(fromX, fromY);
          ctx.lineTo(toX, toY);
        }
        ctx.stroke();
      };
      ctx.save();
      ctx.beginPath();
      ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
      ctx.clip();
      ctx.lineWidth = devicePixelRatio;
      ctx.setLineDash([]);
      for (const [index, line] of lines.entries()) {
        ctx.strokeStyle = colour(`--s${index}`);
        line.x.forEach((at, place) => {
          const value = line.y[place], half = line.half?.[place], xHalf = line.xHalf?.[place];
          const isPicked = line.settings?.[place] === picked;
          ctx.globalAlpha = line.settings && picked !== null && !isPicked ? 0.2 : 1;
          if (half) stroke([x(at), y(value - half), x(at), y(value + half)]);
          if (xHalf) stroke([x(at - xHalf), y(value), x(at + xHalf), y(value)]);
          if (!line.settings) return;
          ctx.font = `${isPicked ? "bold " : ""}${12 * devicePixelRatio}px system-ui, sans-serif`;
          ctx.fillStyle = colour("--text");
          ctx.fillText(line.settings[place] + 1, x(at) + 7 * devicePixelRatio, y(value) - 7 * devicePixelRatio);
          if (!isPicked) return;
          ctx.beginPath();
          ctx.arc(x(at), y(value), 9 * devicePixelRatio, 0, 2 * Math.PI);
          ctx.stroke();
        });
      }
      ctx.globalAlpha = 1;
      ctx.strokeStyle = ctx.fillStyle = colour("--flag");
      for (const at of chart.flags) {
        const size = 5 * devicePixelRatio;
        stroke([x(at), bbox.top, x(at), bbox.top + bbox.height]);
        ctx.fill(new Path2D(`M${x(at)} ${bbox.top}l${2 * size} ${size}l${-2 * size} ${size}`));
      }
      ctx.restore();
    };

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
    const whole = () => xs.every(Number.isInteger) ? STEPS.filter((step) => step >= 1) : STEPS;
    const plot = new uPlot({
      width: box.clientWidth,
      height: HEIGHT,
      legend: {show: false},
      scales: {
        x: {
          time: false,
          range: (u, low, high) => low == null ? [0, 1]
            : low === xs[0] && high === xs.at(-1)
              ? padded(Math.min(low, ...xEnds), Math.max(high, ...xEnds), 0.03) : [low, high],
        },
        y: {
          range: (u, low, high) => low == null ? [0, 1]
            : padded(Math.min(low, ...ends), Math.max(high, ...ends), 0.05),
        },
      },
      axes: [
        {...axis, label: chart.xLabel, labelSize: 18, size: 24, gap: 2, values: numbered, incrs: whole, ...named},
        {...axis, size: 58, space: 28, values: numbered, incrs: STEPS},
      ],
      series: [{}, ...lines.map((line, index) => ({
        label: line.label,
        stroke: () => colour(`--s${index}`),
        width: 1.8,
        dash: DASHES[index],
        spanGaps: true,
        ...(line.joined ? {} : {paths: () => null}),
        points: {
          show: () => !line.joined || lines[index].x.length <= MOST_DOTS,
          size: line.settings ? 8 : 5,
          fill: () => colour(`--s${index}`),
        },
      }))],
      cursor: {drag: {x: true, y: false}, dataIdx: nearest, points: {size: 8}, y: false},
      hooks: {
        drawClear: [band],
        draw: [marks],
        setCursor: [(u) => u.cursor.idx != null && tell(place = u.cursor.idx)],
      },
    }, [xs, ...columns], box);

    const view = (low, high) => plot.setScale("x", {min: low, max: high});
    const all = () => view(xs[0], xs.at(-1));
    const go = (wanted) => {
      const index = Math.max(0, Math.min(xs.length - 1, wanted));
      const {min, max} = plot.scales.x;
      if (xs[index] < min || xs[index] > max) view(xs[index] - (max - min) / 2, xs[index] + (max - min) / 2);
      plot.setCursor({left: plot.valToPos(xs[index], "x"), top: HEIGHT / 2});
      tell(place = index); // of several points at one x uPlot finds the first
    };
    const zoom = (factor) => {
      const {min, max} = plot.scales.x;
      const centre = place === null ? (min + max) / 2 : xs[place];
      const low = centre - (centre - min) * factor, high = centre + (max - centre) * factor;
      if (low <= xs[0] && high >= xs.at(-1)) all(); else view(low, high);
    };
    const keys = {
      ArrowLeft: () => go((place ?? 1) - 1),
      ArrowRight: () => go((place ?? -1) + 1),
      Home: () => go(0),
      End: () => go(xs.length - 1),
      "+": () => zoom(0.5),
      "-": () => zoom(2),
      Escape: all,
    };
    box.addEventListener("keydown", (event) => {
      if (!Object.hasOwn(keys, event.key) || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      keys[event.key]();
    });

    const table = () => {
      const made = document.createElement("table");
      const add = (parent, name, words) => {
        const row = parent.insertRow();
        for (const text of words) row.appendChild(document.createElement(name)).textContent = text;
      };
      add(made.createTHead(), "th", [chart.xLabel, ...lines.map((line) => line.label)]);
      const body = made.createTBody();
      for (const row of rows) {
        const cells = lines.map((line, index) =>
          row.at[index] === undefined ? "" : withHalf(line, row.at[index]));
        const isNamed = lines.some((line) => line.names);
        add(body, "td", [isNamed ? xName(row) : shown(row.x), ...cells]);
      }
      return made;
    };
    const values = figure.querySelector("details");
    values.addEventListener("toggle", () => values.querySelector("div").replaceChildren(table()));

    // Show new data of the same lines; what the reader has zoomed to stays.
    plot.replace = (data) => {
      const {min, max} = plot.scales.x;
      const isWhole = min <= xs[0] && max >= xs.at(-1);
      read(data);
      plot.setData([xs, ...columns], isWhole);
      if (!isWhole) view(min, max);
    };
    return plot;
  };

  // A chart is built when it first has a width: those in a folded part wait until it is opened.
  const plots = new Map();
  const watch = new ResizeObserver((entries) => {
    for (const {target} of entries) {
      if (!target.isConnected) {
        watch.unobserve(target);
        plots.delete(target);
      }
      if (!target.clientWidth) continue;
      const plot = plots.get(target);
      if (plot) plot.setSize({width: target.clientWidth, height: HEIGHT});
      else plots.set(target, build(target));
    }
  });
  for (const box of document.querySelectorAll("[data-chart]")) watch.observe(box);
  // A page that follows a run sends the data of a chart to its box, which may be new.
  document.addEventListener("chart", ({target, detail}) => {
    target.chart = detail;
    if (plots.has(target)) plots.get(target).replace(detail); else watch.observe(target);
  });
  const redraw = () => plots.forEach((plot) => plot.redraw(false));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  document.addEventListener("pick", (event) => {
    picked = event.detail;
    redraw();
  });
})();
