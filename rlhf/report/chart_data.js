// Converts the lines of a chart to the columns that uPlot draws, and finds the ends of its axes.
const FEWEST_TO_SMOOTH = 20; // points that a line needs to be smoothed
const look = {picked: null, smoothing: null, isLog: false}; // what the reader has chosen for all charts

// Charts with the same x label share the ends of the x axis, its visible part (null: all of it) and the pointer.
const groups = new Map();
const groupOf = (label) => {
  if (!groups.has(label)) groups.set(label, {charts: new Set(), view: null});
  return groups.get(label);
};
const range = (values) => values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
const xRange = (line) => range(line.x.flatMap((x, place) => [x - (line.xHalf?.[place] ?? 0), x + (line.xHalf?.[place] ?? 0)]));
const ends = (group) => {
  const [low, high] = range([...group.charts].flatMap((chart) => chart.xRange));
  return padded(...widened(low, high, null), 0.03);
};

// uPlot needs one x column: lines are merged by x, and a row has the index of each line's point (`at`).
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

// An exponential moving average; the division corrects for the missing values before the first.
const smoothed = (ys) => {
  let sum = 0, weight = 0;
  return ys.map((y) => {
    sum = look.smoothing * sum + y;
    weight = look.smoothing * weight + 1;
    return sum / weight;
  });
};
const isSmoothed = (line) => look.smoothing > 0 && line.isSeries && line.joined && line.x.length >= FEWEST_TO_SMOOTH;
const lows = (line) => line.low ?? line.y.map((y, place) => y - (line.half?.[place] ?? 0));
const highs = (line) => line.high ?? line.y.map((y, place) => y + (line.half?.[place] ?? 0));

// Sets or replaces the data of a chart, which come with the page or as updates.
const fill = (chart, data) => Object.assign(chart, data, {
  rows: merged(data.lines),
  xRange: range(data.lines.flatMap(xRange)),
  floor: data.lines.every((line) => line.y.every((y) => y >= 0)) ? 0 : -Infinity,
});

// Returns the columns that uPlot draws: x, every line, and every line again, smoothed (or empty).
const columns = ({lines, rows}) => {
  const column = (values, index) => rows.map((row) => values[row.at[index]] ?? null);
  const smooth = lines.map((line) => isSmoothed(line) ? smoothed(line.y) : []);
  return [rows.map((row) => row.x), ...lines.map((line, index) => column(line.y, index)), ...smooth.map(column)];
};
const isLogarithmic = ({lines}) => look.isLog && lines.every((line) => lows(line).every((low) => low > 0));
const isFaint = (line) => look.picked !== null && line.setting !== undefined && line.setting !== look.picked;
const tone = (line, index) => line.setting ?? index;
