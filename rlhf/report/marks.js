// Draws on a chart's canvas what uPlot lacks: healthy ranges, bands, intervals, setting numbers and flags.
const ARROW = 5; // half the height of a flag's arrow, pixels
const NUMBER_OFFSETS = [[8, -8], [-4, -9], [-4, 22], [8, 18], [-16, -8], [-16, 18], [-4, -23], [-4, 36]];

const paintOf = (u, colour) => {
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
  const inside = (draw) => {
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([]);
    draw();
    ctx.restore();
  };
  return {ctx, bbox, x, y, stroke, inside, colour};
};

// Draws the healthy range below everything else; the legend notes if it is outside the chart, or has all values.
const drawHealthy = ({ctx, bbox, y, colour}, {healthy, lines, figure}) => {
  if (!healthy) return;
  const top = bbox.top, bottom = bbox.top + bbox.height;
  const [low, high] = healthy.map((value) => Math.min(bottom, Math.max(top, y(value))));
  const {classList} = figure.querySelector(".healthy");
  classList.toggle("outside", low - high < 1);
  const isHealthy = lines.every((line) => line.y.every((value) => value >= healthy[0] && value <= healthy[1]));
  if (classList.toggle("inside", isHealthy && low - high > 0.8 * bbox.height)) return; // no border would be seen
  ctx.fillStyle = colour("--good");
  ctx.fillRect(bbox.left, high, bbox.width, low - high);
};

// Draws a thin line for each run or, without runs, the band; dots that are not joined get bars.
const drawBand = ({ctx, x, y, stroke, colour}, line, tone) => {
  if (!line.low) return;
  ctx.strokeStyle = ctx.fillStyle = colour(`--s${tone}`);
  if (!line.joined) {
    stroke(...line.x.map((at, place) => [x(at), y(line.low[place]), x(at), y(line.high[place])]));
    return;
  }
  if (line.runs) {
    ctx.globalAlpha = 0.4;
    for (const run of line.runs) stroke(...run.slice(1).map((to, place) => [x(line.x[place]), y(run[place]), x(line.x[place + 1]), y(to)]));
    ctx.globalAlpha = 1;
    return;
  }
  ctx.beginPath();
  line.x.forEach((at, place) => ctx.lineTo(x(at), y(line.low[place])));
  for (let place = line.x.length - 1; place >= 0; place--) ctx.lineTo(x(line.x[place]), y(line.high[place]));
  ctx.globalAlpha = 0.13;
  ctx.fill();
  ctx.globalAlpha = 1;
};

const drawIntervals = ({ctx, x, y, stroke, colour}, line, tone) => {
  ctx.strokeStyle = colour(`--s${tone}`);
  line.x.forEach((at, place) => {
    const value = line.y[place], half = line.half?.[place], xHalf = line.xHalf?.[place];
    if (half) stroke([x(at), y(value - half), x(at), y(value + half)]);
    if (xHalf) stroke([x(at - xHalf), y(value), x(at + xHalf), y(value)]);
  });
};

// Writes the numbers of a sweep's settings beside their points, each at the first free position.
const drawNumbers = ({ctx, bbox, x, y, colour}, line, picked) => {
  const ratio = devicePixelRatio, height = 12 * ratio;
  const boxes = line.x.map((at, place) => ({left: x(at) - 5 * ratio, top: y(line.y[place]) - 5 * ratio, width: 10 * ratio, height: 10 * ratio}));
  const touches = (a) => (b) => a.left < b.left + b.width && b.left < a.left + a.width &&
    a.top < b.top + b.height && b.top < a.top + a.height;
  line.x.forEach((at, place) => {
    const isPicked = line.settings[place] === picked;
    const text = String(line.settings[place] + 1);
    ctx.font = `${isPicked ? "bold " : ""}${height}px system-ui, sans-serif`;
    const {width} = ctx.measureText(text);
    const tried = NUMBER_OFFSETS.map(([right, down]) =>
      ({left: x(at) + right * ratio, top: y(line.y[place]) + down * ratio - height, width, height}));
    const free = tried.find((box) => !boxes.some(touches(box)) &&
      box.left >= bbox.left && box.left + width <= bbox.left + bbox.width &&
      box.top >= bbox.top && box.top + height <= bbox.top + bbox.height) ?? tried[0];
    boxes.push(free);
    ctx.globalAlpha = picked !== null && !isPicked ? 0.3 : 1;
    ctx.fillStyle = colour("--text");
    ctx.fillText(text, free.left, free.top + height - 2 * ratio);
    if (!isPicked) return;
    ctx.strokeStyle = colour("--text");
    ctx.beginPath();
    ctx.arc(x(at), y(line.y[place]), 9 * ratio, 0, 2 * Math.PI);
    ctx.stroke();
  });
};

const drawFlags = ({ctx, bbox, x, stroke, colour}, flags) => {
  ctx.globalAlpha = 1;
  ctx.strokeStyle = ctx.fillStyle = colour("--flag");
  const size = ARROW * devicePixelRatio;
  for (const at of flags) {
    stroke([x(at), bbox.top, x(at), bbox.top + bbox.height]);
    ctx.fill(new Path2D(`M${x(at)} ${bbox.top}l${2 * size} ${size}l${-2 * size} ${size}`));
  }
};
