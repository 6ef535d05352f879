// Texts of numbers, and the marks of axes.
const shown = (value) => {
  if (!Number.isFinite(value)) return "not a number";
  const size = Math.abs(value);
  if (value && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return size >= 1e4 ? value.toFixed(0) : String(+value.toPrecision(4));
};
// Possible distances between two marks of an axis.
const STEPS = Array.from({length: 40}, (_, power) =>
  [1, 2, 5].map((factor) => Number(`${factor}e${power - 20}`))).flat();
const numbered = (u, values, _axis, _space, step) => {
  const largest = Math.max(...values.map(Math.abs));
  const digits = Math.floor(Math.log10(step * 1.001));
  const isPlain = largest >= 1e-3 && largest < 1e6;
  const text = (value) => isPlain || !value ? value.toFixed(value ? Math.max(0, -digits) : 0)
    : value.toExponential(Math.max(0, Math.floor(Math.log10(Math.abs(value))) - digits));
  return values.map((value) => value === null ? "" : text(value));
};
const numberedByTens = (u, values) => values.map((value) => value === null ? "" : shown(value));

// Extends an axis beyond its lowest and highest value by a share of their distance.
const padded = (low, high, share) => [low - share * (high - low), high + share * (high - low)];
// A constant has no distance: show a share between 0 and 1, and another number with 10 % around it.
const widened = (low, high, most) => {
  if (low !== high) return [low, high];
  if (most !== null) return [0, most];
  const margin = 0.1 * Math.abs(low) || 1;
  return [low < 0 || low > 0 ? low - margin : 0, high + margin];
};
