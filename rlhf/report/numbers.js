// Formats numbers, and chooses the ends and the marks of axes.
const shown = (value) => {
  if (!Number.isFinite(value)) return "not a number";
  const size = Math.abs(value);
  if (value && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return size >= 1e4 ? value.toFixed(0) : String(+value.toPrecision(4));
};
// The distances that two marks of an axis may have.
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

// Extends the range from low to high on both sides by a share of its length.
const padded = (low, high, share) => [low - share * (high - low), high + share * (high - low)];
// Widens a range of one value: to 0..most for a share, otherwise by 10 % of the value on both sides.
const widened = (low, high, most) => {
  if (low !== high) return [low, high];
  if (most !== null) return [0, most];
  const margin = 0.1 * Math.abs(low) || 1;
  return [low < 0 || low > 0 ? low - margin : 0, high + margin];
};
